"""From estimates to certificates: search with few draws, confirm on fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from corrnoise import checks
from corrnoise.accounting import balls_in_bins
from corrnoise.accounting.balls_in_bins import Estimate
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

    def __init__(self, bins: Bins, delta: float, draws: Draws) -> None:
        self.bins, self.delta, self.draws = bins, delta, draws
        self.samples = draws.samples or max(20_000, min(500_000, 50_000_000 // bins.num_bins))
        self.few = max(1_000, self.samples // 10)

    def promising(self, sigma: float, epsilon: float) -> bool:
        """Whether the full number of draws would certify δ here, as far as a few can tell."""
        if self.bins.num_bins == 1:
            return False
        for direction in ("remove", "add"):
            if direction == "add" and self._add_is_small(sigma, epsilon):
                continue
            found = balls_in_bins.estimate(
                self.bins,
                sigma,
                epsilon,
                direction,
                samples=self.few,
                failure_probability=self.draws.failure_probability / 4.0,
                seed=(self.draws.seed, 0),
            )
            if found.upper_with(self.samples) > self.delta:
                return False
        return True

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

    def _certificate(self, sigma: float, epsilon: float, attempt: int) -> Estimate:
        """The larger of the two directions."""
        worst: Estimate | None = None
        for direction in ("remove", "add"):
            if direction == "add" and self._add_is_small(sigma, epsilon):
                continue
            found = balls_in_bins.estimate(
                self.bins,
                sigma,
                epsilon,
                direction,
                samples=self.samples,
                failure_probability=self.draws.failure_probability / 2.0 ** (attempt + 1),
                seed=(self.draws.seed, attempt, int(direction == "add")),
                progress=self.draws.progress,
            )
            worst = found if worst is None or found.upper > worst.upper else worst
        assert worst is not None
        return worst

    def _add_is_small(self, sigma: float, epsilon: float) -> bool:
        return balls_in_bins.add_bound(self.bins, sigma, epsilon) <= self.delta


def bisect(private: Callable[[float], bool], low: float, high: float, tolerance: float) -> float:
    """The private end of a bracket of this relative width; ``high`` is private."""
    while high - low > tolerance * high:
        middle = (low + high) / 2.0
        if private(middle):
            high = middle
        else:
            low = middle
    return high
