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

from corrnoise.accounting import allocation, gaussian, renyi, roots
from corrnoise.accounting.bins import Bins

# From σ and ε to an upper bound of δ(ε) of both directions.
Bound = Callable[[float, float], float]

# The relative width of the bracket that a search ends with.
_TOLERANCE = 1e-4
# How often a search looks for a better bound; one whose δ is less by this factor is better.
_ROUNDS, _BETTER = 4, 0.98


def delta(bins: Bins, sigma: float, epsilon: float) -> float:
    """An upper bound of δ(ε) in both directions, with no random draws: the best of all bounds."""
    return best(bins, sigma, epsilon)[0]


def best(bins: Bins, sigma: float, epsilon: float) -> tuple[float, Bound]:
    """The least δ(ε) of all bounds at this noise, and the bound that has it."""

    def plain(sigma: float, epsilon: float) -> float:
        return gaussian.delta(epsilon, bins.longest / sigma)

    bounds: list[Bound] = [plain]
    if bins.every_square.size > 1:
        choices = allocation.comparisons(bins)
        if len(choices) > 1:
            choices = [min(choices, key=lambda each: each.coarse(sigma, epsilon))]
        bounds += choices
        if not bins.orthogonal:
            bounds.append(partial(renyi.delta, bins))
    return min(((bound(sigma, epsilon), bound) for bound in bounds), key=lambda found: found[0])


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
