"""Search for one number: the size or the parameter of a closed form with the least error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from corrnoise import sensitivity
from corrnoise.mechanisms.amplification import AmplifiedError
from corrnoise.mechanisms.mechanism import Optimization
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation

# A parameter in [0, 1] is a whole number of millionths, so that it is the same on every machine.
# The search begins with forty intervals; one half, which is BISR, is one of their ends.
MILLION = 10**6
_GRID = range(0, MILLION + 1, MILLION // 40)
# Under amplification an evaluation takes a fraction of a second, so the search has fewer points.
_AMPLIFIED_UNITS, _AMPLIFIED_GRID = 1000, (0, 500, 750, 900, 1000)
AMPLIFIED_WIDTH = 12

Member = Callable[[float], ToeplitzMechanism]
Error = Callable[[ToeplitzMechanism], float]


def least_integer(
    function: Callable[[int], float], grid: Iterable[int], *, width: int = 2, relative: float = 0.0
) -> int:
    """The argument with the least value seen, for a function that first decreases, then increases.

    The grid brackets the minimum, and a golden-section search narrows the bracket with one
    evaluation for each step. The function may be infinite, except at its minimum.

    Args:
        function: its value is computed once for each argument.
        grid: the arguments to begin with, in ascending order.
        width: the search ends at a bracket of this width; with 2, it skips no integer.
        relative: the same as a fraction of the argument.

    >>> least_integer(lambda x: (x - 37) ** 2, [0, 20, 100])
    37
    """
    points = list(grid)
    seen = {point: function(point) for point in points}
    best = min(range(len(points)), key=lambda i: seen[points[i]])
    low, up = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
    middle = points[best] if low < points[best] < up else low + _golden(up - low)
    while up - low > max(width, low * relative):
        if middle not in seen:
            seen[middle] = function(middle)
        if up - middle > middle - low:
            probe = middle + _golden(up - middle)
        else:
            probe = middle - _golden(middle - low)
        seen[probe] = function(probe)
        left, right = min(middle, probe), max(middle, probe)
        if seen[left] <= seen[right]:
            up, middle = right, left
        else:
            low, middle = left, right
    return min(sorted(seen), key=seen.__getitem__)


def _golden(length: int) -> int:
    """The shorter part of the golden section of a length, at least 1."""
    return max(1, round(length * (3 - math.sqrt(5)) / 2))


def least_certified(
    symbol: str, member: Member, usual: float, participation: Participation
) -> tuple[ToeplitzMechanism, float]:
    """The member with the least certified rmse of a family with a parameter in [0, 1], and it.

    The search uses the sensitivity that the pattern 0, b, 2b, … attains, which is O(n) and never
    above the certified one. If the two differ at the minimiser, the certified rmse itself is
    searched. Either way the result is no worse than any member that was tried. All multiples of
    1/40 are tried.

    Args:
        symbol: the symbol of the parameter in the record of the search.
        member: builds the mechanism from the parameter.
        usual: a multiple of 1/40, whose error is recorded as that of the start.
        participation: n, b, k.
    """
    evaluations = 0

    def least(error: Error) -> float:
        def value(millionths: int) -> float:
            nonlocal evaluations
            evaluations += 1
            return _finite(error, member, millionths / MILLION)

        return least_integer(value, _GRID) / MILLION

    def attained(mechanism: ToeplitzMechanism) -> float:
        square = sensitivity.attained(mechanism.strategy_coef, participation)
        return math.sqrt(square) * mechanism.decoder_rms

    def certified(mechanism: ToeplitzMechanism) -> float:
        return mechanism.rmse(participation)

    best = least(attained)
    found = member(best)
    if certified(found) > attained(found) * (1.0 + sensitivity.ROUNDING):
        best = least(certified)
    start, final = (_finite(certified, member, parameter) for parameter in (usual, best))
    start = start if start < math.inf else final
    record = Optimization(True, f"{symbol} = {best:g}", evaluations, start, final, participation)
    return replace(member(best), optimization=record), best


def least_amplified(
    member: Member,
    usual: float,
    largest: float,
    error: AmplifiedError,
    width: int = AMPLIFIED_WIDTH,
) -> ToeplitzMechanism:
    """The member with the least error under amplification, estimated from draws.

    Amplification favours a C that decays faster, so the parameter is at most the best one without
    amplification. By an estimate from fresh draws the result is no worse than with ``usual`` or
    ``largest``.

    Args:
        member: builds the mechanism from the parameter.
        usual: a parameter to compare with.
        largest: the best parameter without amplification.
        error: the estimate of the error.
        width: the search ends at a bracket of this width, in thousandths of ``largest``.
    """
    scale = largest / _AMPLIFIED_UNITS
    best = least_integer(lambda i: _finite(error, member, i * scale), _AMPLIFIED_GRID, width=width)
    return error.best(member(parameter) for parameter in (best * scale, usual, largest))


def _finite(error: Error, member: Member, parameter: float) -> float:
    """The error of a member; infinite if its coefficients are beyond the range of floats."""
    try:
        return error(member(parameter))
    except OverflowError:
        return math.inf
