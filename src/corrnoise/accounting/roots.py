"""Roots of decreasing functions in few evaluations: log δ as a function of log noise or log ε."""

from __future__ import annotations

import math
from collections.abc import Callable

# A guess of the first slope of log δ against the logarithm of noise or ε, and the longest step.
_SLOPE, _STRIDE = -12.0, 0.5
# A slope may be flatter than the one before it by at most this factor: a small jump of an otherwise
# smooth function must not send the search far away.
_FLATTER = 4.0
# The logarithm of a smaller number is replaced by that of this one.
_TINY = 1e-320


def falling(
    excess: Callable[[float], float], start: float, limits: tuple[float, float], tolerance: float
) -> float:
    """The root of a smooth decreasing function, or the limit nearest to it.

    The secant method, kept between the nearest known points of either sign; the first slope is a
    guess.

    >>> round(falling(lambda x: 2.0 - x**3, 1.0, (0.0, 3.0), 1e-9) ** 3, 6)
    2.0
    """
    low, high = limits
    x, slope = min(max(start, low), high), _SLOPE
    value = excess(x)
    while True:
        low, high = (x, high) if value > 0.0 else (low, x)
        following = x + max(-_STRIDE, min(_STRIDE, -value / slope))
        if not low < following < high:
            # Beyond a limit, where nothing is known yet, or beyond a known point.
            beyond = (low if value <= 0.0 else high) in limits
            following = min(max(following, low), high) if beyond else (low + high) / 2.0
        if abs(following - x) <= tolerance:
            return following
        before, value = value, excess(following)
        slope = min((value - before) / (following - x), slope / _FLATTER)
        x = following


def least(
    delta: Callable[[float], float],
    target: float,
    limits: tuple[float, float],
    tolerance: float,
    start: float | None = None,
) -> float:
    """The least x in the limits with δ(x) ≤ target, or more by a relative ``tolerance``.

    δ must decrease with x. If no smaller x is found, the upper limit is returned: the caller must
    know that it meets the target. The search begins at ``start``.
    """
    low, high = math.log(limits[0]), math.log(limits[1])

    def excess(log_x: float) -> float:
        return math.log(max(delta(math.exp(log_x)), _TINY)) - math.log(target)

    first = (low + high) / 2.0 if start is None else math.log(start)
    found, width = falling(excess, first, (low, high), tolerance / 4.0), tolerance / 2.0
    while found < high:
        if excess(found) <= 0.0:
            return math.exp(found)
        found, width = found + width, 2.0 * width
    return limits[1]
