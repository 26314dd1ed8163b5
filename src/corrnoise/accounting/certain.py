"""Prices of balls-in-bins that hold with certainty: bounds with no random draws.

There are several bounds, and which of them is the best depends on the bins, σ and ε: the Gaussian
mechanism without amplification, comparisons with independent bins (``allocation``) and moments
(``renyi``). A search takes the bound that is the best at one point, finds its root, and looks for a
better one there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from corrnoise._threads import one_blas_thread
from corrnoise.accounting import allocation, balls_in_bins, gaussian, renyi, roots
from corrnoise.accounting.bins import Bins

# From σ and ε to an upper bound of δ(ε) of both directions.
Bound = Callable[[float, float], float]

# The relative width of the bracket that a search ends with.
_TOLERANCE = 1e-4
# How often a search looks for a better bound; one whose δ is less by this factor is better.
_ROUNDS, _BETTER = 4, 0.98
# The relative width that is narrow enough for a price of a curve.
_NEAR = 0.01
# A coarse δ that is larger than this times a δ shows that a finer one is above it.
_NEARLY = 2.0
# The least ε that a curve looks for, relative to that of the mechanism without amplification.
_LEAST = 1e-6


def delta(bins: Bins, sigma: float, epsilon: float) -> float:
    """An upper bound of δ(ε) in both directions, with no random draws: the least of all bounds.

    It is at most δ wherever a search for noise or ε with that δ ended, whichever bound it took.
    """
    plain, moments, comparisons = _bounds(bins)
    return min(bound(sigma, epsilon) for bound in (plain, *moments, *comparisons))


def best(bins: Bins, sigma: float, epsilon: float) -> tuple[float, Bound]:
    """The least δ(ε) of the bounds at this noise, and the bound that has it.

    Only one comparison is evaluated in full, the best one on a coarse grid. At a small ε, where
    coarse grids mislead, another one may be better.
    """
    plain, moments, comparisons = _bounds(bins)
    if len(comparisons) > 1:
        comparisons = [_closest(comparisons, sigma, epsilon)]
    bounds = [plain, *comparisons, *moments]
    return min(((bound(sigma, epsilon), bound) for bound in bounds), key=lambda found: found[0])


def _closest(
    comparisons: list[allocation.Comparison], sigma: float, epsilon: float
) -> allocation.Comparison:
    """The comparison with the least δ on a coarse grid; the middle ones are mostly the best."""
    least, found, middle = math.inf, comparisons[0], len(comparisons) // 2
    for each in [*comparisons[middle:], *comparisons[:middle][::-1]]:
        value = each.coarse(sigma, epsilon, least)
        if value < least:
            least, found = value, each
    return found


def at_most(bins: Bins, sigma: float, epsilon: float, delta: float) -> Bound | None:
    """The best bound at this noise where its δ(ε) is at most ``delta``, or ``None``: to estimate.

    Where all bounds are far above ``delta``, this is found faster than by ``best``: comparisons are
    evaluated on a coarse grid while they fall, and moments only if their order's W, which the best
    proposal has too, is near.
    """
    near, comparisons = _NEARLY * delta, _bounds(bins)[2]
    shape = balls_in_bins.best_shape(bins, sigma, epsilon, "remove")
    if shape.at(bins, sigma, epsilon).largest > near:
        middle, least = len(comparisons) // 2, math.inf
        for side in (comparisons[middle:], comparisons[:middle][::-1]):
            before = math.inf
            for each in side:
                value = each.coarse(sigma, epsilon, near)
                least = min(least, value)
                if value > before:
                    break
                before = value
        if least > near:
            return None
    value, bound = best(bins, sigma, epsilon)
    return bound if value <= delta else None


def _bounds(bins: Bins) -> tuple[Bound, list[Bound], list[allocation.Comparison]]:
    """All bounds: without amplification, from moments, and by comparison."""

    def plain(sigma: float, epsilon: float) -> float:
        return gaussian.delta(epsilon, bins.longest / sigma)

    if bins.every_square.size == 1:
        return plain, [], []
    moments: list[Bound] = [] if bins.orthogonal else [partial(renyi.delta, bins)]
    return plain, moments, allocation.comparisons(bins)


def noise(bins: Bins, epsilon: float, delta: float) -> float:
    """Noise that is (ε, δ)-DP with certainty."""
    plain = gaussian.noise_multiplier(epsilon, delta, bins.longest)
    b = bins.every_square.size
    if b == 1:
        return plain
    low = 1e-3 * plain
    if b * delta < 1.0:
        # One bin has a weight of 1/b in the mixture, so no less noise is private.
        low = min(bins.longest / gaussian.mu(epsilon + math.log(b), b * delta), plain)

    def least(bound: Bound) -> float:
        # From below: with very much noise the grid of a bound is too coarse, and it is loose again.
        top, step = low, 0.05
        while top < plain and bound(top, epsilon) > delta:
            top, step = top * math.exp(step), 2.0 * step
        limits = 1e-3 * plain, min(top, plain)
        return roots.least(lambda x: bound(x, epsilon), delta, limits, _TOLERANCE, limits[1])

    return _search(least, lambda x: best(bins, x, epsilon), low, delta)


def epsilon(bins: Bins, sigma: float, delta: float) -> float:
    """An ε that holds at this noise and δ with certainty."""
    plain = gaussian.epsilon(delta, bins.longest / sigma) if delta < 1.0 else 0.0
    if bins.every_square.size == 1 or plain == 0.0:
        return plain
    if best(bins, sigma, 0.0)[0] <= delta:
        return 0.0

    def least(bound: Bound) -> float:
        limits = 1e-6 * plain, plain
        return roots.least(lambda x: bound(sigma, x), delta, limits, _TOLERANCE, plain / 2.0)

    return _search(least, lambda x: best(bins, sigma, x), plain / 2.0, delta)


class Curve:
    """ε as a function of the steps taken and δ, for one run: bounds that hold with certainty.

    The first price is a search among all bounds. Later ones evaluate the comparison that was the
    best there, and the moments, a few times near the ε that the last price suggests: within 1 % of
    the least ε that these two give.

    Args:
        bins: from a number of steps to the bins of these first steps.
        sigma: the noise.
    """

    def __init__(self, bins: Callable[[int], Bins], sigma: float) -> None:
        self._bins, self._sigma = bins, sigma
        self._choice: int | None = None  # which comparison is the best; 0 for none of them
        self._last = (0, 0.0)  # steps and ε of the last price

    @one_blas_thread()
    def __call__(self, num_steps: int, delta: float) -> float:
        """The ε of the first steps."""
        found = self._bins(num_steps)
        value = self._near(found, num_steps, delta)
        if value is None:
            value = epsilon(found, self._sigma, delta)
            if value > 0.0:
                plain, _, comparisons = _bounds(found)
                prices = [plain(self._sigma, value)]
                prices += [bound.coarse(self._sigma, value) for bound in comparisons]
                self._choice = prices.index(min(prices))
        if value > 0.0:
            self._last = (num_steps, value)
        return value

    def _near(self, bins: Bins, num_steps: int, delta: float) -> float | None:
        """A price from few evaluations of one bound; ``None`` where there is none yet."""
        if self._choice is None or delta >= 1.0:
            return None
        plain_bound, moments, comparisons = _bounds(bins)
        if self._choice >= len(comparisons) + 1:
            return None
        bounds = [*moments, [plain_bound, *comparisons][self._choice]]
        steps, last = self._last
        plain = gaussian.epsilon(delta, bins.longest / self._sigma)
        if plain == 0.0:
            return 0.0

        def price(epsilon: float) -> float:
            return min(bound(self._sigma, epsilon) for bound in bounds)

        at = min(last * math.sqrt(num_steps / steps), plain)
        return roots.least(price, delta, (_LEAST * plain, plain), _NEAR, at)


def _search(
    least: Callable[[Bound], float],
    choose: Callable[[float], tuple[float, Bound]],
    start: float,
    delta: float,
) -> float:
    """The least value that any of the bounds gives, beginning with the best one at ``start``."""
    _, bound = choose(start)
    found = least(bound)
    for _ in range(_ROUNDS):
        value, better = choose(found)
        if better == bound or value > _BETTER * delta:
            break
        bound = better
        found = min(found, least(bound))
    return found
