"""Certificates: a search with few draws finds a noise or ε, and fresh draws certify it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property

from corrnoise.accounting import balls_in_bins, certain, gaussian, many_folds, roots
from corrnoise.accounting.balls_in_bins import Direction, Estimate
from corrnoise.accounting.bins import Bins
from corrnoise.accounting.draws import MOST_ATTEMPTS, NO_ATTEMPT, Draws
from corrnoise.accounting.proposals import Shape

# The margin that a search leaves for its confirmation, relative to noise or ε, and its tolerance.
_ROOM = 5e-4
_SEARCH_TOLERANCE = _ROOM
_WIDER = 3.0
# The size of a step, relative to what the error of the search or the δ of a failed attempt needs,
# and the largest step, relative to the smallest.
_SURELY, _WIDEST = 1.3, 10.0
# A search begins with a tenth of its draws, but at least this many, until its bracket has this
# relative width. Its lower limit is this fraction of what is private without amplification.
_FEWEST, _NEAR, _LEAST = 1_000, 0.01, 1e-3
# A search begins at this logarithm below the value that is private without amplification. Without
# draws it then looks, to this relative width, for the point where W is this multiple of b·δ: most
# certificates are near it.
_FIRST, _ABOUT, _USUAL = 0.5, 0.05, 0.3
# The relative distance of the two points that give a slope: large enough that small jumps hardly
# matter. A proposal is kept if it was chosen within this distance.
_APART = 0.03
# The draws of a search are a tenth of those of a certificate, or this multiple of W/δ, up to this
# fraction of the certificate's.
_SEARCH_PER_LARGEST, _MOST_PART = 25.0, 0.25
# How often the proposal of a search is chosen again.
_RESHAPES = 6
# With these settings the standard error of ``estimate_noise`` is about 0.5 %. With many bins it is
# 0.7 %, as the product of draws and bins below limits the number of draws.
_ESTIMATE_DRAWS, _LEAST_ESTIMATE_DRAWS, _ESTIMATE_TOLERANCE = 4_000, 2_000, 2e-3
_ESTIMATE_NUMBERS = 2_000_000
# The default number of draws: this product of draws and bins over the bins, within these limits.
_NUMBERS, _LEAST_DRAWS, _MOST_DRAWS = 50_000_000, 100_000, 500_000
# If W is large there are more draws: this multiple of W/δ, within a larger product.
_PER_LARGEST, _MOST_NUMBERS = 90.0, 300_000_000
# To allow more draws, bins that are all alike are thinned out, at most to every 4th.
_MOST_STRIDE = 4
# A cache of the last certificates of this process, by everything that they depend on. A certificate
# is a function of these alone, so a certificate that is repeated for verification is found here.
_DRAWN: dict[tuple[object, ...], Estimate] = {}
_MOST_DRAWN = 256

# A function from the value that is searched to (noise, ε).
Point = Callable[[float], tuple[float, float]]
# A function from a direction to the proposal that a search keeps.
Shapes = Callable[[Direction], Shape]


def certified_noise(
    bins: Bins, epsilon: float, delta: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least noise that a search certifies for (ε, δ), and the estimate that certifies it.

    If a bound with no random draws (``certain``) needs no more noise, its noise is returned,
    without an estimate. Orthogonal means need no draws, as that bound is tight.
    """
    if bins.orthogonal:
        return certain.noise(bins, epsilon, delta), None
    most = gaussian.noise_multiplier(epsilon, delta, bins.longest)
    found = _search(bins, delta, draws).certified(lambda sigma: (sigma, epsilon), most)
    return found or (certain.noise(bins, epsilon, delta), None)


def certified_epsilon(
    bins: Bins, sigma: float, delta: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The least ε that a search certifies at this noise and δ, as in ``certified_noise``."""
    most = gaussian.epsilon(delta, bins.longest / sigma) if delta < 1.0 else 0.0
    if bins.orthogonal or most == 0.0:
        return certain.epsilon(bins, sigma, delta), None
    found = _search(bins, delta, draws).certified(lambda epsilon: (sigma, epsilon), most)
    return found or (certain.epsilon(bins, sigma, delta), None)


def certified_delta(
    bins: Bins, sigma: float, epsilon: float, draws: Draws
) -> tuple[float, Estimate | None]:
    """The δ that draws certify at this noise and ε, or a bound, as in ``certified_noise``."""
    most = certain.delta(bins, sigma, epsilon)
    if bins.orthogonal or draws.attempt == NO_ATTEMPT:
        return max(most, draws.enough), None
    return _search(bins, 0.0, draws).least_delta(sigma, epsilon, most)


def estimate_noise(
    bins: Bins,
    epsilon: float,
    delta: float,
    draws: Draws,
    *,
    samples: int | None = None,
    near: float | None = None,
    effort: int = 1,
) -> float:
    """An estimate, from few draws, of the noise that a certificate needs.

    It ranks mechanisms, in a tenth of the time, and certifies nothing. Only the removal of an
    example is considered: adding one needs about the same noise or less. ``near`` is a guess of the
    result. ``effort`` multiplies the number of draws; each effort has draws of its own.
    """
    if bins.orthogonal:
        return certain.noise(bins, epsilon, delta)
    if samples is None:
        fewer = max(_LEAST_ESTIMATE_DRAWS, _ESTIMATE_NUMBERS // bins.num_bins)
        samples = min(_ESTIMATE_DRAWS, fewer)
    others = replace(draws, seed=draws.seed + effort - 1)
    search = Search(bins, delta, others, effort * samples, directions=("remove",))
    most = gaussian.noise_multiplier(epsilon, delta, bins.longest)
    tolerance = _ESTIMATE_TOLERANCE / math.sqrt(effort)
    return search.promising(lambda sigma: (sigma, epsilon), most, tolerance, near)


def _limit(bins: Bins) -> int:
    """The most draws of a certificate with these bins, if the user gives no number."""
    return max(_LEAST_DRAWS, min(_MOST_DRAWS, _MOST_NUMBERS // bins.num_bins))


def _search(bins: Bins, delta: float, draws: Draws) -> Search:
    """The search with these draws, and with as many bins as a given number of draws allows.

    The bins depend on the number of draws alone, so that a certificate can be repeated.
    """
    if draws.samples is not None and draws.samples > _limit(bins):
        bins = bins.at_most(_MOST_NUMBERS // draws.samples)
    return Search(bins, delta, draws)


class Search:
    """A search for a promising noise or ε with few draws, and its confirmation with fresh draws.

    A certificate is valid only for draws that did not choose its point, so the search uses separate
    draws. The confirmations share the failure probability: the first has half of it, the second a
    quarter, and so on; each direction has half of that.
    """

    def __init__(
        self,
        bins: Bins,
        delta: float,
        draws: Draws,
        few: int | None = None,
        directions: tuple[Direction, ...] = ("remove", "add"),
    ) -> None:
        self.bins, self.delta, self.draws = bins, delta, draws
        self.directions = directions
        self.samples = self._number(0.0)
        self._fixed = few is not None
        self.few = few or max(1_000, self.samples // 10)
        self._normals = balls_in_bins.Normals(self.few)

    def _number(self, largest: float) -> int:
        """The number of draws of a certificate whose values are at most ``largest``."""
        if self.draws.samples is not None:
            return self.draws.samples
        b = self.bins.num_bins
        number = max(_LEAST_DRAWS, min(_MOST_DRAWS, _NUMBERS // b))
        if self.delta > 0.0:
            wanted = _PER_LARGEST * largest / self.delta
            number = max(number, int(min(wanted, _limit(self.bins))))
        return number

    def certified(self, point: Point, most: float) -> tuple[float, Estimate | None] | None:
        """The least value that the search certifies, and the estimate; ``None`` as in ``confirm``.

        If W requires more draws than this number of bins allows, and all bins are alike, fewer bins
        with more draws are tried too.
        """
        search, near = self._with_best_bins(point, most)
        start = search.promising(point, most, _SEARCH_TOLERANCE, near)
        return search.confirm(start, most, point)

    def _with_best_bins(self, point: Point, most: float) -> tuple[Search, float | None]:
        """The search with the best number of bins, and a guess of its result or ``None``."""
        if self.draws.samples is not None or self.bins.at_most(0) is self.bins:
            return self, None
        search, near = self, self._scout(point, most, None)
        for stride in range(2, _MOST_STRIDE + 1):
            bins = self.bins.at_most(-(-self.bins.num_bins // stride))
            if bins.num_bins >= search.bins.num_bins or not search.limited(point(near)):
                break
            fewer = Search(bins, self.delta, replace(self.draws, samples=_limit(bins)), self.few)
            found = fewer._scout(point, most, near)
            if found >= near:
                break
            search, near = fewer, found
        return search, near

    def _scout(self, point: Point, most: float, near: float | None) -> float:
        """An approximation of ``promising``, from fewer draws and removing alone."""
        few = max(_FEWEST, self.few // 2)
        rough = Search(self.bins, self.delta, self.draws, few, directions=("remove",))
        return rough.promising(point, most, _NEAR / 2.0, near)

    def limited(self, at: tuple[float, float]) -> bool:
        """Whether W at one (noise, ε) requires more draws than these bins allow."""
        return _PER_LARGEST * max(self._largest(at)) > _limit(self.bins) * self.delta

    def _largest(self, at: tuple[float, float]) -> list[float]:
        """W of each direction at one (noise, ε)."""
        shapes = self._shapes(at)
        return [shapes(x).at(self.bins, *at).largest for x in self._directions(*at)]

    def promising(
        self, point: Point, most: float, tolerance: float, near: float | None = None
    ) -> float:
        """The least value at which the full number of draws is likely to certify δ.

        ``point`` turns a value into (noise, ε), ``most`` is proven to be private, and ``near`` is a
        guess. A search with few draws comes first, then one with more. Each uses the same random
        numbers throughout, so that δ is a smooth function and its root takes few evaluations.
        """
        top = math.log(most)
        bottom = top + math.log(_LEAST)
        if near is None:
            guess = self._rough(point, top, bottom)
        else:
            guess = min(max(math.log(near), bottom), top)
        if not self._fixed:
            self._take_enough(point(math.exp(guess)))
        found = guess
        for _ in range(_RESHAPES):
            found = self._root(point, guess, (bottom, top), tolerance)
            if abs(found - guess) <= _APART:
                break
            guess = found
        return min(math.exp(found), most)

    def _rough(self, point: Point, top: float, bottom: float) -> float:
        """The logarithm of the promising value within a few percent, from very few draws."""
        fewest = max(_FEWEST, self.few // 10)

        def rough(log_value: float) -> float:
            at = point(math.exp(log_value))
            shapes = self._shapes(at, most_triples=0)
            found = self._estimates(*at, fewest, shapes, ["remove"])
            return self._log_largest(found) - math.log(self.delta)

        usual = math.log(_USUAL * self.bins.num_bins * self.delta)

        def largest(log_value: float) -> float:
            found = many_folds.best(self.bins, *point(math.exp(log_value)))
            return 0.0 if found is None else found[0] - usual

        first = roots.falling(largest, top - _FIRST, (bottom, top), _ABOUT)
        return roots.falling(rough, first, (bottom, top), _NEAR)

    def _take_enough(self, at: tuple[float, float]) -> None:
        """Raise the number of draws if W is large; else the first certificate would often fail."""
        largest = self._shapes(at)("remove").at(self.bins, *at).largest
        wanted = int(min(_SEARCH_PER_LARGEST * largest / self.delta, _MOST_PART * self.samples))
        if wanted > self.few:
            self.few, self._normals = wanted, balls_in_bins.Normals(wanted)

    def _root(
        self, point: Point, near: float, limits: tuple[float, float], tolerance: float
    ) -> float:
        """The logarithm of the promising value, by the proposal that is best at ``near``."""
        shapes = self._shapes(point(math.exp(near)))

        def excess(log_value: float) -> float:
            at = point(math.exp(log_value))
            found = self._estimates(*at, self.few, shapes, self._directions(*at))
            return self._log_largest(found) - math.log(self.delta)

        return roots.falling(excess, near, limits, tolerance / 2.0)

    def _shapes(self, at: tuple[float, float], **settings: int) -> Shapes:
        """The best proposal of each direction at one (noise, ε), chosen on first use."""
        return cache(
            lambda direction: balls_in_bins.best_shape(self.bins, *at, direction, **settings)
        )

    def confirm(
        self, start: float, most: float, point: Point
    ) -> tuple[float, Estimate | None] | None:
        """The first value from ``start`` upward that fresh draws certify.

        The first step covers the error of the search. After a failed attempt, the next step is as
        wide as the attempt's δ requires, and at least three times the least step before. The result
        is ``None`` if a bound with no draws is no worse, or if ``most`` is reached.
        """
        value, shapes = start, self._shapes(point(start))
        self.samples = max(map(self._number, self._largest(point(start))))
        slope, error = self._slope(point, start, shapes)
        step = _SURELY * error / slope
        for attempt in range(1, MOST_ATTEMPTS):
            least = _ROOM * _WIDER ** (attempt - 1)
            value *= 1.0 + min(max(least, step), _WIDEST * least)
            if value >= most or certain.best(self.bins, *point(value))[0] <= self.delta:
                break
            found = self._certificate(*point(value), attempt)
            if found.upper <= self.delta:
                return value, found
            upper = found.upper_with(self.samples)
            step = _SURELY * max(math.log(upper / self.delta), 0.0) / slope
        return None

    def _slope(self, point: Point, value: float, shapes: Shapes) -> tuple[float, float]:
        """The slope at which log δ falls with log value, and the error of log δ, from few draws."""
        higher, here = (
            self._estimates(*at, self.few, shapes, self._directions(*at))
            for at in (point(value * math.exp(_APART)), point(value))
        )
        fall = self._log_largest(here) - self._log_largest(higher)
        errors = (each.standard_error / max(each.mean, 1e-320) for each in here)
        return max(fall / _APART, 1.0), min(max(errors), 1.0)

    def least_delta(
        self, sigma: float, epsilon: float, most: float
    ) -> tuple[float, Estimate | None]:
        """The δ(ε) that draws certify at this noise, or ``most`` if they certify no less.

        There is no search, so the two directions share the whole failure probability. If
        ``draws.enough`` is given, no δ below it is computed.
        """
        if self.bins.num_bins == 1:
            return most, None
        half, attempt = self.draws.failure_probability / 2.0, self.draws.attempt
        (worst,) = self._drawn(sigma, epsilon, ["remove"], half, attempt)
        least = max(worst.upper, self.draws.enough)
        bound = balls_in_bins.add_bound(self.bins, sigma, epsilon)
        if bound > least:
            (add,) = self._drawn(sigma, epsilon, ["add"], half, attempt)
            if worst.upper < add.upper < bound:
                worst = add
            bound = min(bound, add.upper)
        least = max(least, bound)
        repeats = self.draws.enough > 0.0
        return (least, replace(worst, attempt=0)) if least < most or repeats else (most, None)

    def _estimates(
        self,
        sigma: float,
        epsilon: float,
        draws: int,
        shapes: Shapes,
        directions: list[Direction],
    ) -> list[Estimate]:
        """Estimates of δ(ε) of these directions, from a few draws."""
        return [
            balls_in_bins.estimate(
                self.bins,
                sigma,
                epsilon,
                direction,
                samples=draws,
                failure_probability=self.draws.failure_probability / 4.0,
                seed=(self.draws.seed, 0, 0),
                shape=shapes(direction),
                normals=self._normals,
            )
            for direction in directions
        ]

    def _log_largest(self, found: list[Estimate]) -> float:
        """The logarithm of the larger δ that the full number of draws would certify."""
        uppers = (each.upper_with(self._number(each.largest)) for each in found)
        return max(math.log(max(upper, 1e-320)) for upper in uppers)

    def _certificate(self, sigma: float, epsilon: float, attempt: int) -> Estimate:
        """The estimate of the direction with the larger upper bound, from draws used only here."""
        failure = self.draws.failure_probability / 2.0 ** (attempt + 1)
        found = self._drawn(sigma, epsilon, self._directions(sigma, epsilon), failure, attempt)
        return max(found, key=lambda estimate: estimate.upper)

    def _directions(self, sigma: float, epsilon: float) -> list[Direction]:
        """The directions of the search; "add" is left out if ``add_bound`` is at most δ."""
        both = balls_in_bins.add_bound(self.bins, sigma, epsilon) > self.delta
        return [x for x in self.directions if x == "remove" or both]

    def _drawn(
        self,
        sigma: float,
        epsilon: float,
        directions: list[Direction],
        failure_probability: float,
        attempt: int,
    ) -> list[Estimate]:
        """Estimates of these directions from an attempt's draws; they record seed and attempt."""
        common = (self._digest, sigma, epsilon, self.samples, self.draws.seed, attempt)
        known = [_DRAWN.get((*common, direction)) for direction in directions]
        if self.draws.enough and None not in known:
            kept = [each for each in known if each is not None]
            return [replace(each, failure_probability=failure_probability) for each in kept]
        shapes = self._shapes((sigma, epsilon))
        found = balls_in_bins.estimates(
            self.bins,
            sigma,
            epsilon,
            {direction: shapes(direction) for direction in directions},
            samples=self.samples,
            failure_probability=failure_probability,
            seed=(self.draws.seed, attempt, 0),
            progress=self.draws.progress,
            wanted=self.delta or math.inf,
        )
        found = [replace(each, seed=self.draws.seed, attempt=attempt) for each in found]
        if found[0].samples == self.samples:  # otherwise it ended early and certifies nothing
            if len(_DRAWN) >= _MOST_DRAWN:
                _DRAWN.clear()
            _DRAWN.update({(*common, each.direction): each for each in found})
        return found

    @cached_property
    def _digest(self) -> bytes:
        return hashlib.sha256(self.bins.gram[: self.bins.kinds].tobytes()).digest()
