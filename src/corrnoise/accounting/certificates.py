"""From estimates to certificates: search with few draws, confirm with fresh draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from corrnoise import _checks as checks
from corrnoise import _progress
from corrnoise._progress import Progress
from corrnoise.accounting import balls_in_bins, gaussian, renyi
from corrnoise.accounting.balls_in_bins import Direction, Estimate
from corrnoise.accounting.bins import Bins

# The margin that a search leaves for its confirmation, relative to noise or ε, and its tolerance.
_ROOM = 2e-4
_SEARCH_TOLERANCE = _ROOM / 4
_MOST_ATTEMPTS = 30
# With these settings the error of ``estimate_noise`` is a fraction of a percent.
_ESTIMATE_DRAWS, _ESTIMATE_TOLERANCE = 2_000, 5e-4


@dataclass(frozen=True)
class Draws:
    """How many draws to take, from which seed, at which failure probability."""

    failure_probability: float
    samples: int | None
    seed: int
    progress: Progress | None

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
            None if samples is None else checks.integer("samples", samples, 1_000),
            checks.integer("seed", seed, 0),
            _progress.resolve(progress),
        )


def certified_noise(
    bins: Bins, epsilon: float, delta: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least noise that draws certify for (ε, δ), and the estimate that certifies it.

    Where no draws certify less, it is the noise of the unamplified Gaussian, without an estimate.
    """
    search = Search(bins, delta, draws)
    start, most = _promising_noise(search, epsilon, _SEARCH_TOLERANCE)
    return search.confirm(start, most, lambda sigma: (sigma, epsilon))


def certified_epsilon(
    bins: Bins, sigma: float, delta: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least ε that draws certify at this noise and δ, as in ``certified_noise``."""
    most = gaussian.epsilon(delta, bins.longest / sigma)
    search = Search(bins, delta, draws)
    start = bisect(lambda x: search.promising(sigma, x), 0.0, most, _SEARCH_TOLERANCE)
    return search.confirm(start, most, lambda epsilon: (sigma, epsilon))


def certified_delta(
    bins: Bins, sigma: float, epsilon: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least δ that draws certify at this noise and ε, as in ``certified_noise``."""
    most = gaussian.delta(epsilon, bins.longest / sigma)
    return Search(bins, 0.0, draws).least_delta(sigma, epsilon, most)


def estimate_noise(bins: Bins, epsilon: float, delta: float, draws: Draws) -> float:
    """An estimate, from few draws, of the noise that ``certified_noise`` finds.

    It serves to rank mechanisms, in a tenth of the time; it certifies nothing.
    """
    search = Search(bins, delta, draws, _ESTIMATE_DRAWS)
    return _promising_noise(search, epsilon, _ESTIMATE_TOLERANCE)[0]


def sure_epsilon(bins: Bins, sigma: float, delta: float) -> float:
    """An ε that holds at this noise and δ with certainty, with no random draws."""
    plain = gaussian.epsilon(delta, bins.longest / sigma) if delta < 1.0 else 0.0
    return bisect(lambda x: renyi.delta_bound(bins, sigma, x) <= delta, 0.0, plain, 1e-4)


def _promising_noise(search: Search, epsilon: float, tolerance: float) -> tuple[float, float]:
    """Noise that is private by an estimate from few draws, and noise that is proven private."""
    most = gaussian.noise_multiplier(epsilon, search.delta, search.bins.longest)
    low = most
    while search.promising(low, epsilon) and low > 1e-3 * most:
        low *= 0.8
    return bisect(lambda x: search.promising(x, epsilon), low, most, tolerance), most


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
        found = self._estimates(
            sigma, epsilon, self.few, self.draws.failure_probability / 4.0, (self.draws.seed, 0)
        )
        return all(e.upper_with(self.samples) <= self.delta for e in found)

    def confirm(
        self, start: float, most: float, point: Callable[[float], tuple[float, float]]
    ) -> tuple[float, Estimate | None]:
        """The first value from ``start`` upward that fresh draws certify.

        ``point`` turns a value into (noise, ε). ``most`` needs no certificate: at this value even
        the unamplified Gaussian is private.
        """
        value = start
        for attempt in range(1, _MOST_ATTEMPTS):
            value *= 1.0 + attempt * _ROOM
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

        There is no search, so the two directions share the whole failure probability.
        """
        if self.bins.num_bins == 1:
            return most, None
        half, seed = self.draws.failure_probability / 2.0, (self.draws.seed, 1)
        found = self._estimates(sigma, epsilon, self.samples, half, seed, self.draws.progress)
        largest = next(found)
        bound = balls_in_bins.add_bound(self.bins, sigma, epsilon)
        if bound > largest.upper:
            largest = max(largest, *found, key=lambda estimate: estimate.upper)
        return (largest.upper, largest) if largest.upper < most else (most, None)

    def _certificate(self, sigma: float, epsilon: float, attempt: int) -> Estimate:
        """The estimate of the worse direction, from draws that are used for nothing else."""
        failure = self.draws.failure_probability / 2.0 ** (attempt + 1)
        seed = (self.draws.seed, attempt)
        found = self._estimates(sigma, epsilon, self.samples, failure, seed, self.draws.progress)
        return max(found, key=lambda estimate: estimate.upper)

    def _estimates(
        self,
        sigma: float,
        epsilon: float,
        samples: int,
        failure_probability: float,
        seed: tuple[int, int],
        progress: Progress | None = None,
    ) -> Iterator[Estimate]:
        """Estimates of δ for removing and, unless ``add_bound`` is at most δ, for adding."""
        directions: list[Direction] = ["remove"]
        if balls_in_bins.add_bound(self.bins, sigma, epsilon) > self.delta:
            directions.append("add")
        for index, direction in enumerate(directions):
            yield balls_in_bins.estimate(
                self.bins,
                sigma,
                epsilon,
                direction,
                samples=samples,
                failure_probability=failure_probability,
                seed=(*seed, index),
                progress=progress,
            )


def bisect(private: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """Narrow a bracket to this relative width and return its private end; ``high`` is private."""
    while high - low > tolerance * high:
        middle = (low + high) / 2.0
        if private(middle):
            high = middle
        else:
            low = middle
    return high
