r"""Balls-in-bins with equal inner products: δ to any accuracy, with no random draws.

Under Q let X_j = e^{x_j} with x_j = ⟨m_j, y⟩/σ² - ‖m_j‖²/(2σ²), so that P/Q = mean_j X_j and

    δ_remove(ε) = E_Q[(mean_j X_j - e^ε)_+],   δ_add(ε) = E_Q[(1 - e^ε·mean_j X_j)_+].

**Comparison.** Both are E_Q[F(mean_j X_j)] with a convex F, and so they grow with every entry of
the Gram matrix (Kahane, 1986). To see this, take Gaussian vectors with covariances K ≤ K', entry by
entry, and interpolate between them by x(s) with covariance (1-s)K + sK'. Gaussian integration by
parts gives

    d/ds E[F(mean_j X_j)] = ½ b^{-2} Σ_jl (K'_jl - K_jl)·E[F''(mean_j X_j) X_j X_l] ≥ 0

(for a smooth F; every convex F is a limit of smooth ones). So every Gram matrix whose entries are
no smaller gives an upper bound.

**Independent bins and a common part.** Let all inner products of different means be g·σ². Then
X_j = e^{√g z - g/2}·Y_j with independent Y_j = e^{√v_j z_j - v_j/2}. Given the Y_j, the integral
over z is the δ of a Gaussian mechanism, in closed form. It depends only on the sum of the Y_j,
whose law is a convolution. For C = I, g = 0, and the result is the exact δ of random allocation
(Feldman and Shenfeld, 2025) up to the grid.

**The grid.** Each Y_j is moved to the two neighbouring points of a grid so that its mean is kept.
By convexity this can only raise both δ; the error is of second order in the grid's width. Beyond
the largest grid point T, for removing,

    E_Q[mean_j Y_j; some Y_j > T] ≤ mean_j (P_j(Y_j > T) + Σ_l Q(Y_l > T))

is added, where P_j is Q weighted by Y_j; for adding, a Y_j > T is replaced by T. The sum's law is
a product of Fourier transforms, tilted by e^{λs} so that even a very small δ has a small relative
error. The transforms' rounding errors are bounded and added.

The transform is periodic, so sums beyond its period appear at smaller values. For removing, their
mass is bounded by Markov's inequality and added. For adding, such a sum contributes at most as much
as a sum at the period, and this is added.

One evaluation takes a few milliseconds, for any number of bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corrnoise.accounting import convolution
from corrnoise.accounting.bins import Bins

Array = npt.NDArray[np.float64]
# Pairs (variance of the bins' own parts, number of such bins).
Groups = Sequence[tuple[float, int]]

# Grid points of a coarse evaluation, which compares settings, and of a fine one.
_COARSE, _FINE = 1 << 11, 1 << 15
# Values to try for the largest grid point, in units of the threshold of the sum, b·e^{±ε}.
_REACHES = (1.5, 4.0, 12.0, 40.0, 150.0)
# The largest exponent of the tilt at the end of the grid, of either sign.
_MOST_TILT = 600.0
# The relative rounding error of all other arithmetic (no transforms, no tilts) is far below this.
_ARITHMETIC = 1e-6
# The relative error of a power for each of its factors, as a fraction of a transform's error.
_POWER = 1.0 / 8.0
# For removing, only this fraction of the tilt with the least rounding errors is used, since sums
# beyond the period count e^{λ·period} times.
_EASE = 0.65
# A larger ε would overflow.
_LARGEST_EPSILON = 500.0
# Smaller variances would suffer cancellation. They are raised to this, which only raises δ.
_LEAST_VARIANCE = 1e-14
# The relative rounding error of the two terms of a difference.
_CANCELLATION = 4e-15
# Orthogonal means of more different lengths than this are compared with equal ones.
_MOST_GROUPS = 4


@dataclass(frozen=True)
class Comparison:
    """Independent bins with a common part, whose δ is an upper bound for the bins of a strategy.

    Attributes:
        groups: pairs (squared norm of the bins' own parts, number of such bins), for σ = 1.
        common: the common inner product g, for σ = 1.
    """

    groups: Groups
    common: float

    def __call__(self, sigma: float, epsilon: float) -> float:
        """An upper bound of δ(ε) in both directions at this noise."""
        return delta(*self._at(sigma), epsilon)

    def coarse(self, sigma: float, epsilon: float, most: float = math.inf) -> float:
        """The bound on a coarse grid, to compare; one direction only if it exceeds ``most``."""
        if not 0.0 <= epsilon <= _LARGEST_EPSILON:
            return 1.0
        remove = _best(_remove, *self._at(sigma), epsilon)[0]
        return remove if remove > most else max(remove, _best(_add, *self._at(sigma), epsilon)[0])

    def _at(self, sigma: float) -> tuple[Groups, float]:
        squared = sigma**2
        return [(own / squared, count) for own, count in self.groups], self.common / squared


def comparisons(bins: Bins) -> list[Comparison]:
    r"""The comparisons that are valid for these bins; for orthogonal means a single, tight one.

    If the means are orthogonal, their squares are used as they are. Otherwise, for a distance w,
    the t = ⌊b/w⌋ bins r, r+w, …, counted mod b, are at least w apart in both directions. P is the
    average over r of their mixtures P_r, and the hockey-stick divergence is jointly convex. So δ is
    at most that of t means with the largest square, and with the largest inner product at distances
    from w to b-w.
    """
    b, lags = bins.every_square.size, np.maximum(bins.every_lag, 0.0)
    if bins.orthogonal:
        squares, counts = np.unique(bins.every_square, return_counts=True)
        if squares.size <= _MOST_GROUPS:
            return [Comparison(tuple(zip(squares.tolist(), counts.tolist(), strict=True)), 0.0)]
    result: list[Comparison] = []
    for window in sorted(set(np.geomspace(1, max(b // 2, 1), 12).astype(int).tolist())):
        between = lags[window : b - window + 1]
        common = float(np.max(between)) if b // window > 1 else 0.0
        result.append(Comparison(((float(lags[0]) - common, b // window),), common))
    return result


def delta(groups: Groups, common: float, epsilon: float) -> float:
    """An upper bound of δ(ε) in both directions, tight up to the grid.

    >>> one_of_five = [(1.0, 5)]  # random allocation of one step in five, noise multiplier 1
    >>> round(delta(one_of_five, 0.0, 1.0), 5)
    0.01378
    """
    if not 0.0 <= epsilon <= _LARGEST_EPSILON:
        return 1.0
    remove, reach = _best(_remove, groups, common, epsilon)
    remove = min(remove, _remove(groups, common, epsilon, reach, _FINE))
    add, reach = _best(_add, groups, common, epsilon)
    if add > remove:
        add = min(add, _add(groups, common, epsilon, reach, _FINE))
    return min(max(remove, add), 1.0)


def _best(
    direction: Callable[[Groups, float, float, float, int], float],
    groups: Groups,
    common: float,
    epsilon: float,
) -> tuple[float, float]:
    """The least δ on a coarse grid over all reaches, and the reach that attains it."""
    return min((direction(groups, common, epsilon, reach, _COARSE), reach) for reach in _REACHES)


def _remove(groups: Groups, common: float, epsilon: float, reach: float, points: int) -> float:
    b = sum(count for _, count in groups)
    # Values on the grid are in units of b·e^ε, the sum of the X_j at which δ begins.
    log_unit = math.log(b) + epsilon
    laws = [(_on_grid(variance, log_unit, reach, points), count) for variance, count in groups]
    cut = sum(count * (law.beyond + law.weighted_beyond / b) for law, count in laws)
    values, sums = _values(reach, points)
    worth = _call(sums, common)
    bounds = (0.0, _MOST_TILT / reach)
    tilt, log_total, tilted = _tilted(laws, values, worth, bounds, _EASE)
    transforms = [np.fft.rfft(mass, sums.size) for mass, _ in tilted]
    # Under P one of the b variables is weighted by its value.
    law, least = np.zeros_like(transforms[0]), np.ones(transforms[0].size)
    for i, (mass, count) in enumerate(tilted):
        term = count * np.fft.rfft(mass * values, sums.size)
        for k, (transform, (_, times)) in enumerate(zip(transforms, tilted, strict=True)):
            term = term * convolution.power(transform, times - (k == i))
        law += term
        least *= np.abs(transforms[i]) ** max(count - 2, 0)
    mean = max(float(mass @ values) for mass, _ in tilted)
    # The error of a product is at most that of each factor times all others (Cauchy-Schwarz).
    size = max(float(np.linalg.norm(mass)) * mean for mass, _ in tilted)
    size = max(size, *(float(np.linalg.norm(mass * values)) for mass, _ in tilted))
    error = b * _error(b, size, mean, least)
    worth = _scaled(worth, epsilon + log_total - tilt * sums)
    found = _sum(law, worth, error)
    wrapped = b * mean * math.exp(min(epsilon + log_total - tilt * 2.0 * reach, 700.0))
    return _rounded_up(found + wrapped + cut, b)


def _add(groups: Groups, common: float, epsilon: float, reach: float, points: int) -> float:
    b = sum(count for _, count in groups)
    # Values on the grid are in units of b·e^{-ε}, the sum of the X_j below which δ begins.
    log_unit = math.log(b) - epsilon
    laws = [(_on_grid(variance, log_unit, reach, points), count) for variance, count in groups]
    for law, _ in laws:
        law.mass[-1] += law.beyond
    values, sums = _values(reach, points)
    worth = _put(sums, common)
    bounds = (-_MOST_TILT / reach, 0.0)
    tilt, log_total, tilted = _tilted(laws, values, worth, bounds, 1.0)
    law = np.ones(sums.size // 2 + 1, dtype=complex)
    least = np.ones(law.size)
    for mass, count in tilted:
        transform = np.fft.rfft(mass, sums.size)
        law = law * convolution.power(transform, count)
        least *= np.abs(transform) ** (count - 1)
    size = max(float(np.linalg.norm(mass)) for mass, _ in tilted)
    error = _error(b, size, 1.0, least)
    worth = _scaled(worth, log_total - tilt * sums)
    # A sum beyond the period, which is above 1, contributes at most as much as one at the period.
    beyond = float(_put(np.array([2.0 * reach]), common)[0])
    return _rounded_up(_sum(law, worth, error) + beyond, b)


class _Law(NamedTuple):
    """The mass of Y on a grid, Q(Y > T), and E_Q[Y; Y > T]."""

    mass: Array
    beyond: float
    weighted_beyond: float


def _on_grid(variance: float, log_unit: float, reach: float, points: int) -> _Law:
    """The law of Y = e^{√v z - v/2} on Y ≤ T, its mean preserved; values in units of e^log_unit."""
    from scipy.special import ndtr  # deferred, like all of SciPy, for a quick import

    step = reach / points
    variance = max(variance, _LEAST_VARIANCE)
    root = math.sqrt(variance)
    edges = np.full(points + 1, -np.inf)
    edges[1:] = (np.log(np.arange(1, points + 1) * step) + log_unit + variance / 2.0) / root
    masses: list[Array] = []
    for z in (edges, edges - root):  # under Q, and weighted by Y
        below, above = ndtr(z), ndtr(-z)
        masses.append(np.where(z[1:] < 0.0, np.diff(below), -np.diff(above)))
    inside, weighted = masses
    upper = weighted * (math.exp(-log_unit) / step) - np.arange(points) * inside
    upper = np.clip(upper, 0.0, inside)
    mass = np.zeros(points + 1)
    mass[:-1] += inside - upper
    mass[1:] += upper
    return _Law(mass, float(ndtr(-edges[-1])), float(ndtr(root - edges[-1])))


def _values(reach: float, points: int) -> tuple[Array, Array]:
    """The grid of one variable, and that of the sum: twice as long."""
    sums = np.arange(2 * points, dtype=np.float64) * (reach / points)
    return sums[: points + 1].copy(), sums


def _tilted(
    laws: list[tuple[_Law, int]],
    values: Array,
    worth: Array,
    bounds: tuple[float, float],
    part: float,
) -> tuple[float, float, list[tuple[Array, int]]]:
    """λ, the logarithm of the total mass under e^{λs}, and the tilted laws, normalised to mass 1.

    Only rounding errors depend on λ. They grow with the total mass times the sum of
    e^{-λs}·``worth``; the λ that minimises this product is taken, times ``part``.
    """
    from scipy.optimize import minimize_scalar

    # A coarser grid with the same mean is enough to choose λ.
    few, some = _few(values.size), list[tuple[Array, Array, int]]()
    for law, count in laws:
        mass = np.add.reduceat(law.mass, few)
        centres = np.add.reduceat(law.mass * values, few) / np.maximum(mass, 1e-300)
        some.append((mass, centres, count))
    ends = np.arange(worth.size) * values[1]
    ends, value = ends[_few(worth.size)], worth[_few(worth.size)]

    def exponent(tilt: float) -> float:
        total = sum(
            count * math.log(float(mass @ np.exp(tilt * centres))) for mass, centres, count in some
        )
        logs = -tilt * ends
        top = float(np.max(logs[value > 0.0]))
        logs = np.minimum(logs, top)
        return total + top + math.log(max(float(np.exp(logs - top) @ value), 1e-300))

    tilt = part * float(minimize_scalar(exponent, bounds=bounds, method="bounded").x)
    log_total, result = 0.0, list[tuple[Array, int]]()
    for law, count in laws:
        mass = law.mass * np.exp(tilt * values)
        total = float(np.sum(mass))
        log_total += count * math.log(total)
        result.append((mass / total, count))
    return tilt, log_total, result


def _few(size: int) -> npt.NDArray[np.int64]:
    return np.arange(0, size, max(1, size // _COARSE))


def _call(sums: Array, common: float) -> Array:
    """E_z[(1 - e^{-√g z - g/2}/u)_+] for the values u of a sum: for removing."""
    from scipy.special import ndtr

    with np.errstate(divide="ignore", invalid="ignore"):
        if common == 0.0:
            return np.maximum(1.0 - 1.0 / sums, 0.0)
        logs, root = np.log(sums), math.sqrt(common)
        first = ndtr(logs / root + root / 2.0)
        second = np.exp(-logs) * ndtr(logs / root - root / 2.0)
    second[0] = 0.0
    # The difference may cancel; it is rounded up.
    return np.maximum(first - second, 0.0) + _CANCELLATION * first


def _put(sums: Array, common: float) -> Array:
    """E_z[(1 - u·e^{√g z - g/2})_+] for the values u of a sum: for adding."""
    from scipy.special import ndtr

    if common == 0.0:
        return np.maximum(1.0 - sums, 0.0)
    with np.errstate(divide="ignore"):
        logs, root = np.log(sums), math.sqrt(common)
    first = ndtr(root / 2.0 - logs / root)
    second = sums * ndtr(-root / 2.0 - logs / root)
    return np.maximum(first - second, 0.0) + _CANCELLATION * first


def _scaled(worth: Array, exponents: Array) -> Array:
    """``worth``·e^exponents; 0 where ``worth`` is 0, whatever the exponent."""
    with np.errstate(over="ignore"):
        return worth * np.exp(np.where(worth > 0.0, exponents, -np.inf))


def _sum(law: npt.NDArray[np.complex128], worth: Array, error: float) -> float:
    """An upper value of the sum of ``worth`` over a law, given its transform and its error."""
    with np.errstate(invalid="ignore"):
        found = float(np.fft.irfft(law, worth.size) @ worth)
        return max(found, 0.0) + error * float(np.sum(worth))


def _error(count: int, size: float, most: float, least: Array) -> float:
    """A bound of the rounding errors of the inverse transform of a product, at every point.

    Args:
        count: the number of factors.
        size: the error of one factor's transform is relative to this.
        most: a bound of the product with all but two factors replaced by 1.
        least: the size of the other factors at every frequency.
    """
    # The factors' own transforms; the powers, and the inverse transform of the product.
    total = count * size + (2.0 + _POWER * count) * most
    rounding = convolution.rounding(2 * (least.size - 1))
    return rounding * total * math.sqrt(float(np.mean(least**2)))


def _rounded_up(found: float, count: int) -> float:
    rounding = 1.0 + _ARITHMETIC + convolution.FACTOR * count
    return min(found * rounding, 1.0) if math.isfinite(found) else 1.0
