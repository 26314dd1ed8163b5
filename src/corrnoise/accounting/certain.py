"""Privacy bounds for balls-in-bins that hold with certainty, with no random draws.

There are three kinds of bounds: the Gaussian mechanism without amplification, comparisons with
independent bins (``allocation``) and moments (``renyi``). Which of them is the best depends on the
bins, σ and ε. A search takes the best bound at one point, finds its root, and looks for a better
bound there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from corrnoise._threads import one_blas_thread
from corrnoise.accounting import allocation, balls_in_bins, gaussian, renyi, roots
from corrnoise.accounting.bins import Bins

# A function of σ and ε: an upper bound of δ(ε) in both directions.
Bound = Callable[[float, float], float]

# The relative width of the bracket that a search ends with.
_TOLERANCE = 1e-4
# How often a search looks for a better bound, and the factor by which its δ must be less.
_ROUNDS, _BETTER = 4, 0.98
# The relative width of the bracket that ends the search for an ε of a curve.
_NEAR = 0.01
# If a coarse δ is above this multiple of a value, the fine δ is taken to be above that value.
_NEARLY = 2.0
# The least ε that a curve searches, relative to that of the mechanism without amplification.
_LEAST = 1e-6


def delta(bins: Bins, sigma: float, epsilon: float) -> float:
    """The least of all upper bounds of δ(ε), valid for both directions, with no random draws.

    At the result of a search for noise or ε it is at most the target δ, whichever bound was used.
    """
    plain, moments, comparisons = _bounds(bins)
    return min(bound(sigma, epsilon) for bound in (plain, *moments, *comparisons))


def best(bins: Bins, sigma: float, epsilon: float) -> tuple[float, Bound]:
    """The least δ(ε) of the bounds at this noise, and the bound that attains it.

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
    """The comparison with the least δ on a coarse grid; those in the middle are often the best."""
    least, found, middle = math.inf, comparisons[0], len(comparisons) // 2
    for each in [*comparisons[middle:], *comparisons[:middle][::-1]]:
        value = each.coarse(sigma, epsilon, least)
        if value < least:
            least, found = value, each
    return found


def at_most(bins: Bins, sigma: float, epsilon: float, delta: float) -> Bound | None:
    """The best bound at this noise if its δ(ε) is at most ``delta``, else ``None``.

    It serves estimates, as it may miss a bound. If all bounds are far above ``delta``, it is faster
    than ``best``. It evaluates comparisons on a coarse grid while their values fall, and moments
    only if W of the best proposal is near ``delta``: W of f folds is the bound of moments of order
    f.
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
    """A noise multiplier that is (ε, δ)-DP with certainty."""
    plain = gaussian.noise_multiplier(epsilon, delta, bins.longest)
    b = bins.every_square.size
    if b == 1:
        return plain
    low = 1e-3 * plain
    if b * delta < 1.0:
        # One bin has a weight of 1/b in the mixture, so less noise than this is not private.
        low = min(bins.longest / gaussian.mu(epsilon + math.log(b), b * delta), plain)

    def least(bound: Bound) -> float:
        # Search from below: with very much noise the grid is too coarse, and the bound is loose.
        top, step = low, 0.05
        while top < plain and bound(top, epsilon) > delta:
            top, step = top * math.exp(step), 2.0 * step
        limits = 1e-3 * plain, min(top, plain)
        return roots.least(lambda x: bound(x, epsilon), delta, limits, _TOLERANCE, limits[1])

    return _search(least, lambda x: best(bins, x, epsilon), low, delta)


def epsilon(bins: Bins, sigma: float, delta: float) -> float:
    """An ε such that this noise is (ε, δ)-DP with certainty."""
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

    The first call searches all bounds. Later calls evaluate only the comparison that was the best
    then, and the moments, a few times near the ε of the last call. Their result is within 1 % of
    the least ε that these two bounds give.

    Args:
        bins: a function from a number of steps to the bins of these first steps.
        sigma: the noise multiplier.
    """

    def __init__(self, bins: Callable[[int], Bins], sigma: float) -> None:
        self._bins, self._sigma = bins, sigma
        self._choice: int | None = None  # 1-based index of the best comparison; 0 for none
        self._last = (0, 0.0)  # steps and ε of the last call

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
        """An ε from few evaluations of one bound; ``None`` if no bound was chosen yet."""
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
    """The least value that any of the bounds gives, beginning with the best bound at ``start``."""
    _, bound = choose(start)
    found = least(bound)
    for _ in range(_ROUNDS):
        value, better = choose(found)
        if better == bound or value > _BETTER * delta:
            break
        bound = better
        found = min(found, least(bound))
    return found
