"""From estimates to certificates: search with few draws, confirm with fresh draws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from corrnoise import _checks as checks
from corrnoise import _progress
from corrnoise._progress import Progress
from corrnoise.accounting import balls_in_bins, gaussian, renyi
from corrnoise.accounting.balls_in_bins import Direction, Estimate
from corrnoise.accounting.bins import Bins

# The margin that a search leaves for its confirmation, relative to noise or ε, and its tolerance.
_ROOM = 2e-4
_SEARCH_TOLERANCE = _ROOM / 4
_WIDER = 3.0
# The relative width of the bracket that a search with no draws ends with.
_SURE_TOLERANCE = 1e-4
MOST_ATTEMPTS = 30
# The attempt of an account that takes no draws.
NO_ATTEMPT = -1
# With these settings the standard error of ``estimate_noise`` is about half a percent.
_ESTIMATE_DRAWS, _ESTIMATE_TOLERANCE = 4_000, 5e-4
# The limits of the number of draws; with the largest one a certificate takes minutes.
_LEAST_SAMPLES, _MOST_SAMPLES = 1_000, 100_000_000
# The last part of the seed of each direction.
_SEEDS: dict[Direction, int] = {"remove": 0, "add": 1}
# The certificates that this process drew last, by everything that they depend on. A certificate is
# a function of these alone, so one that is repeated to verify it takes them from here.
_DRAWN: dict[tuple[object, ...], Estimate] = {}
_MOST_DRAWN = 256


@dataclass(frozen=True)
class Draws:
    """How many draws to take, from which seed, at which failure probability.

    Attributes:
        failure_probability: that of the whole certificate.
        samples: the number of draws; ``None`` to choose it from the number of bins.
        seed: their seed.
        progress: called during a certificate.
        attempt: the confirmation whose draws ``certified_delta`` takes, or ``NO_ATTEMPT``.
        enough: a δ below which ``certified_delta`` looks for no smaller one; 0 except to verify.
    """

    failure_probability: float
    samples: int | None
    seed: int
    progress: Progress | None
    attempt: int = 1
    enough: float = 0.0

    @staticmethod
    def checked(
        failure_probability: float,
        samples: int | None,
        seed: int,
        progress: Progress | bool | None,
    ) -> Draws:
        """Validate the arguments and build the settings, or raise a ``ValueError``."""
        return Draws(
            checks.probability("failure_probability", failure_probability),
            None if samples is None else check_samples(samples),
            checks.integer("seed", seed, 0),
            _progress.resolve(progress),
        )

    @staticmethod
    def repeating(recorded: Estimate, delta: float, progress: Progress | None) -> Draws:
        """The draws of a certificate that was recorded, to repeat it at its noise, ε and δ."""
        if recorded.seed is None:
            raise ValueError("seed must be recorded to repeat the draws of a certificate, got none")
        return Draws(
            2.0 * recorded.failure_probability,
            recorded.samples,
            recorded.seed,
            progress,
            max(recorded.attempt, 1),
            delta,
        )


def certified_noise(
    bins: Bins, epsilon: float, delta: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least noise that draws certify for (ε, δ), and the estimate that certifies it.

    Where draws certify no less than ``sure_noise``, it is that, without an estimate. Orthogonal
    means need no draws: the bound is tight.
    """
    most = sure_noise(bins, epsilon, delta)
    if bins.orthogonal:
        return most, None
    search = Search(bins, delta, draws)
    start = _promising_noise(search, epsilon, most, _SEARCH_TOLERANCE)
    return search.confirm(start, most, lambda sigma: (sigma, epsilon))


def certified_epsilon(
    bins: Bins, sigma: float, delta: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least ε that draws certify at this noise and δ, as in ``certified_noise``."""
    most = sure_epsilon(bins, sigma, delta)
    if bins.orthogonal:
        return most, None
    search = Search(bins, delta, draws)
    start = bisect(lambda x: search.promising(sigma, x), 0.0, most, _SEARCH_TOLERANCE)
    return search.confirm(start, most, lambda epsilon: (sigma, epsilon))


def certified_delta(
    bins: Bins, sigma: float, epsilon: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least δ that draws certify at this noise and ε, as in ``certified_noise``."""
    most = renyi.delta_bound(bins, sigma, epsilon)
    if bins.orthogonal or draws.attempt == NO_ATTEMPT:
        return max(most, draws.enough), None
    return Search(bins, 0.0, draws).least_delta(sigma, epsilon, most)


def estimate_noise(bins: Bins, epsilon: float, delta: float, draws: Draws) -> float:
    """An estimate, from few draws, of the noise that ``certified_noise`` finds.

    It serves to rank mechanisms, in a tenth of the time; it certifies nothing.
    """
    if bins.orthogonal:
        return sure_noise(bins, epsilon, delta)
    search = Search(bins, delta, draws, _ESTIMATE_DRAWS)
    most = gaussian.noise_multiplier(epsilon, delta, bins.longest)
    return _promising_noise(search, epsilon, most, _ESTIMATE_TOLERANCE)


def sure_noise(bins: Bins, epsilon: float, delta: float) -> float:
    """Noise that is (ε, δ)-DP with certainty, with no random draws."""
    plain = gaussian.noise_multiplier(epsilon, delta, bins.longest)
    if bins.every_square.size == 1:
        return plain
    low = 1e-3 * plain
    b = bins.every_square.size
    if b * delta < 1.0:
        # One bin has a weight of 1/b in the mixture, so no less noise is private.
        low = min(bins.longest / gaussian.mu(epsilon + math.log(b), b * delta), plain)
    # From below: with very much noise the grid of the bound is too coarse, and it is loose again.
    step = 0.05
    while low < plain and renyi.delta_bound(bins, low, epsilon) > delta:
        low, step = low * math.exp(step), 2.0 * step
    top = min(low, plain)
    return _least(lambda x: renyi.delta_bound(bins, x, epsilon), delta, 1e-3 * plain, top)


def sure_epsilon(bins: Bins, sigma: float, delta: float) -> float:
    """An ε that holds at this noise and δ with certainty, with no random draws."""
    plain = gaussian.epsilon(delta, bins.longest / sigma) if delta < 1.0 else 0.0
    if bins.every_square.size == 1 or renyi.delta_bound(bins, sigma, 0.0) <= delta:
        return plain if bins.every_square.size == 1 else 0.0
    return _least(lambda x: renyi.delta_bound(bins, sigma, x), delta, 1e-6 * plain, plain)


def _least(bound: Callable[[float], float], delta: float, low: float, high: float) -> float:
    """The least x in [low, high] with bound(x) ≤ δ, or a little more; ``high`` is private.

    The root is found in the logarithms, where few evaluations are enough.
    """
    from scipy.optimize import brentq

    def excess(log_x: float) -> float:
        return math.log(max(bound(math.exp(log_x)), 1e-320)) - math.log(delta)

    top, step, least = math.log(high), 0.25, math.log(low)
    bottom = max(top - step, least)
    while excess(bottom) <= 0.0:
        if bottom == least:
            return low
        top, step = bottom, 2.0 * step
        bottom = max(top - step, least)
    if excess(top) < 0.0:
        found = float(brentq(excess, bottom, top, xtol=_SURE_TOLERANCE / 2.0))
        while found < top:
            found += _SURE_TOLERANCE / 2.0
            if excess(found) <= 0.0:
                return min(math.exp(found), high)
    return math.exp(top) if top < math.log(high) else high


def _promising_noise(search: Search, epsilon: float, most: float, tolerance: float) -> float:
    """Noise that is private by an estimate from few draws; ``most`` is proven to be private."""
    low = most
    while search.promising(low, epsilon) and low > 1e-3 * most:
        low *= 0.8
    return bisect(lambda x: search.promising(x, epsilon), low, most, tolerance)


class Search:
    """A search for a promising point with few draws, and its confirmation with fresh draws.

    A search on the draws that certify its result would void the certificate, so the search uses
    separate draws. The confirmations share the failure probability: half of it for the first, a
    quarter for the second, and so on, and each direction has half of that.
    """

    def __init__(self, bins: Bins, delta: float, draws: Draws, few: int | None = None) -> None:
        self.bins, self.delta, self.draws = bins, delta, draws
        self.samples = draws.samples or max(20_000, min(500_000, 50_000_000 // bins.num_bins))
        self.few = few or max(1_000, self.samples // 10)

    def promising(self, sigma: float, epsilon: float) -> bool:
        """Whether the full number of draws would certify δ here, by an estimate from a few."""
        if self.bins.num_bins == 1:
            return False
        failure, seed = self.draws.failure_probability / 4.0, (self.draws.seed, 0)
        found = (
            self._estimate(sigma, epsilon, direction, self.few, failure, seed)
            for direction in self._directions(sigma, epsilon)
        )
        return all(e.upper_with(self.samples) <= self.delta for e in found)

    def confirm(
        self, start: float, most: float, point: Callable[[float], tuple[float, float]]
    ) -> tuple[float, Estimate | None]:
        """The first value from ``start`` upward that fresh draws certify.

        ``point`` turns a value into (noise, ε). ``most`` needs no certificate. Each step is three
        times as wide as the one before, so that ``most`` is reached only where nothing between is
        certified.
        """
        value = start
        for attempt in range(1, MOST_ATTEMPTS):
            value *= 1.0 + _ROOM * _WIDER ** (attempt - 1)
            if value >= most:
                break
            found = self._certificate(*point(value), attempt)
            if found.upper <= self.delta:
                return value, found
        return most, None

    def least_delta(
        self, sigma: float, epsilon: float, most: float
    ) -> tuple[float, Estimate | None]:
        """The δ(ε) that draws certify at this noise; ``most`` where they certify no less.

        There is no search, so the two directions share the whole failure probability. Where
        ``draws.enough`` is given, no smaller δ is looked for.
        """
        if self.bins.num_bins == 1:
            return most, None
        half, attempt = self.draws.failure_probability / 2.0, self.draws.attempt
        worst = self._drawn(sigma, epsilon, "remove", half, attempt)
        least = max(worst.upper, self.draws.enough)
        bound = balls_in_bins.add_bound(self.bins, sigma, epsilon)
        if bound > least:
            add = self._drawn(sigma, epsilon, "add", half, attempt)
            if worst.upper < add.upper < bound:
                worst = add
            bound = min(bound, add.upper)
        least = max(least, bound)
        repeats = self.draws.enough > 0.0
        return (least, replace(worst, attempt=0)) if least < most or repeats else (most, None)

    def _certificate(self, sigma: float, epsilon: float, attempt: int) -> Estimate:
        """The estimate of the worse direction, from draws that are used for nothing else."""
        failure = self.draws.failure_probability / 2.0 ** (attempt + 1)
        found = (
            self._drawn(sigma, epsilon, direction, failure, attempt)
            for direction in self._directions(sigma, epsilon)
        )
        return max(found, key=lambda estimate: estimate.upper)

    def _directions(self, sigma: float, epsilon: float) -> list[Direction]:
        """Removing and, unless ``add_bound`` is at most δ, adding."""
        both = balls_in_bins.add_bound(self.bins, sigma, epsilon) > self.delta
        return ["remove", "add"] if both else ["remove"]

    def _drawn(
        self,
        sigma: float,
        epsilon: float,
        direction: Direction,
        failure_probability: float,
        attempt: int,
    ) -> Estimate:
        """The estimate of one direction from the draws of an attempt, with what repeats them."""
        seed = (self.draws.seed, attempt)
        key = (self._digest, sigma, epsilon, direction, self.samples, *seed)
        if self.draws.enough and key in _DRAWN:
            return replace(_DRAWN[key], failure_probability=failure_probability)
        progress = self.draws.progress
        found = self._estimate(
            sigma, epsilon, direction, self.samples, failure_probability, seed, progress
        )
        if len(_DRAWN) >= _MOST_DRAWN:
            _DRAWN.clear()
        _DRAWN[key] = replace(found, seed=self.draws.seed, attempt=attempt)
        return _DRAWN[key]

    def _estimate(
        self,
        sigma: float,
        epsilon: float,
        direction: Direction,
        samples: int,
        failure_probability: float,
        seed: tuple[int, int],
        progress: Progress | None = None,
    ) -> Estimate:
        return balls_in_bins.estimate(
            self.bins,
            sigma,
            epsilon,
            direction,
            samples=samples,
            failure_probability=failure_probability,
            seed=(*seed, _SEEDS[direction]),
            progress=progress,
        )

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self.bins.gram.tobytes()).digest()


def check_samples(samples: object) -> int:
    """Return ``samples`` as a number of draws, or raise."""
    found = checks.integer("samples", samples, _LEAST_SAMPLES)
    return checks.integer("samples", found, _LEAST_SAMPLES, _MOST_SAMPLES)


def bisect(private: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """Narrow a bracket to this relative width and return its private end; ``high`` is private."""
    while high - low > tolerance * high:
        middle = (low + high) / 2.0
        if private(middle):
            high = middle
        else:
            low = middle
    return high
