"""From estimates to certificates: search with few draws, confirm on fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from corrnoise import checks
from corrnoise.accounting import balls_in_bins
from corrnoise.accounting.balls_in_bins import Direction, Estimate
from corrnoise.accounting.bins import Bins
from corrnoise.accounting.progress import Progress, bar

# How much room a search leaves for its confirmation, relative to noise or ε, and how fine it is.
_ROOM = 2e-4
SEARCH_TOLERANCE = _ROOM / 4
_MOST_ATTEMPTS = 30


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
        """The same, or a ``ValueError``."""
        return Draws(
            checks.probability("failure_probability", failure_probability),
            None if samples is None else checks.integer("samples", samples, 1_000),
            checks.integer("seed", seed, 0),
            bar if progress is True else progress or None,
        )


class Search:
    """Looks for a promising point with few draws, and confirms it on fresh ones.

    A search on the draws that certify it would void the certificate, so it has draws of its own.
    The confirmations share the failure probability: half of it for the first, a quarter for the
    second, and so on, and each direction has half of that.
    """

    def __init__(self, bins: Bins, delta: float, draws: Draws, few: int | None = None) -> None:
        self.bins, self.delta, self.draws = bins, delta, draws
        self.samples = draws.samples or max(20_000, min(500_000, 50_000_000 // bins.num_bins))
        self.few = few or max(1_000, self.samples // 10)

    def promising(self, sigma: float, epsilon: float) -> bool:
        """Whether the full number of draws would certify δ here, as far as a few can tell."""
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

        ``point`` turns a value into (noise, ε). ``most`` needs no certificate: there even the
        unamplified Gaussian is private.
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

        Nothing is searched for, so the two directions share the whole failure probability.
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
        """The larger of the two directions, from draws that nothing else has seen."""
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
        """δ of removing and, unless a bound with no sampling settles it, of adding."""
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
    """The private end of a bracket of this relative width; ``high`` is private."""
    while high - low > tolerance * high:
        middle = (low + high) / 2.0
        if private(middle):
            high = middle
        else:
            low = middle
    return high
