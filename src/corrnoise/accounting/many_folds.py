r"""Importance sampling for removing an example, with many folds and many bins.

The proposal of ``few_folds`` for f folds is a mixture over all f-tuples of bins. Its tuples can
be drawn only for f ≤ 3, which gives a large W with many bins and a small ε. Here tuples are drawn
from few bins that are far apart, with upper bounds of the weights that are easy to draw from. The
integrand corrects for the difference.

Let A be a ``Pattern`` of t bins, A_r the pattern that begins at bin r, counted mod b, and
T_r = mean_{j∈A_r} e^{x_j}; the mean of T_r over all r is T = e^L. For a tuple of f bins of A_r let

    w = Π_{a<c} exp(⟨m_{j_a}, m_{j_c}⟩/σ²),

and w' ≥ w the same with the largest inner products of the pattern: v of a bin with itself, g₁ of
two bins in one block, g of two bins in different blocks. Draw r uniformly, a tuple of A_r with
probability t^{-f}·w'/Z, and y from N(m_{j_1} + … + m_{j_f}, σ²I). Then

    Y = Z·(w/w')·(T - e^ε)_+ / mean_r T_r^f

has the expectation δ_remove(ε) and is at most W = Z·e^{-(f-1)ε}(f-1)^{f-1}/f^f, because
mean_r T_r^f ≥ T^f. W is the bound of ``renyi`` of order f. Z depends only on the numbers n_j of
times that each bin occurs. So it is a coefficient of a power of a power series, and the n_j are
drawn by halving the pattern repeatedly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from corrnoise.accounting.bins import Bins, Indices
from corrnoise.accounting.convolution import log_power
from corrnoise.accounting.proposals import (
    LARGEST_EXPONENT,
    Noise,
    Pattern,
    Tilt,
    chunks,
    log_worth,
)

Array = npt.NDArray[np.float64]

# The largest number of folds.
_MOST_FOLDS = 128
# How many gaps between blocks are tried, and the blocks as (points, spacing relative to the gap).
_GAPS = 10
_BLOCKS = ((2, 0.5), (3, 0.35), (4, 0.25), (6, 0.2), (8, 0.15), (12, 0.1))
# The gaps that are tried with blocks, relative to the best gap without blocks.
_WIDER = (1.0, 1.4, 2.0)


@dataclass(frozen=True)
class ManyFolds:
    """The number of folds f, and the pattern of bins."""

    folds: int
    pattern: Pattern

    def at(self, bins: Bins, sigma: float, epsilon: float) -> Tilt:
        """The proposal at this noise and ε."""
        from scipy.sparse import csr_array  # deferred, like all of SciPy, for a quick import

        folds, pattern, b = self.folds, self.pattern, bins.num_bins
        own, near, far = _exponents(bins, sigma, pattern)
        inner = Spread(_log_own(own, folds), pattern.points)
        outer = Spread(inner.log_total + near * _pairs(folds), pattern.blocks)
        log_z = float(outer.log_total[folds]) + math.lgamma(folds + 1.0)
        log_z += far * folds * (folds - 1) / 2.0 - folds * math.log(pattern.size)
        places = pattern.bins
        half = bins.squares / (2.0 * sigma**2)

        def values(generator: np.random.Generator, noise: Noise) -> Array:
            count = noise.shape[0]
            first = generator.integers(b, size=count)
            in_blocks = outer.draw(generator, np.full(count, folds))
            in_bins = inner.draw(generator, in_blocks.reshape(-1)).reshape(count, -1)
            rows, columns = np.nonzero(in_bins)
            at, number = (first[rows] + places[columns]) % b, in_bins[rows, columns]
            kind = noise.dtype
            times = csr_array((number.astype(kind), (rows, at)), shape=(count, b))
            shift = bins.inner(times)
            shift *= kind.type(1.0 / sigma**2)
            # Twice the sum over pairs of places.
            within = number * (shift[rows, at] - 2.0 * half[at])
            log_weight = np.bincount(rows, within, count) / 2.0
            log_weight -= own * np.sum(in_bins * (in_bins - 1), axis=1) / 2.0
            log_weight -= near * np.sum(in_blocks * (in_blocks - 1), axis=1) / 2.0
            log_weight += log_z - far * folds * (folds - 1) / 2.0
            down, result = half.astype(kind), np.empty(count)
            for part in chunks(noise):
                x = noise[part] * (1.0 / sigma)
                x += shift[part]
                x -= down
                top = np.max(x, axis=1)
                x -= top[:, None]
                ratio = np.exp(x, out=x)
                log_mean = np.log(np.mean(ratio, axis=1))
                loss = top.astype(np.float64) + log_mean
                # log mean_r (T_r/T)^f
                log_power = _log_mean_power(pattern.different_sums(ratio), folds)
                log_power -= folds * (log_mean + math.log(pattern.size))
                exponent = log_weight[part] - (folds - 1) * loss - log_power
                weight = np.exp(np.minimum(exponent, LARGEST_EXPONENT))
                result[part] = weight * -np.expm1(np.minimum(epsilon - loss, 0.0))
            return result

        return Tilt(values, log_z + float(log_worth(folds, epsilon)))


def _log_mean_power(values: Array, power: int) -> Array:
    """The logarithm of the mean of a power, for each row of numbers that are not negative.

    Numbers are raised to a fraction of their row's largest number that is chosen so that its power
    does not underflow. The mean grows by less than its rounding error.
    """
    highest = np.max(values, axis=1)
    least = float(np.finfo(values.dtype).tiny) ** (0.99 / power)
    base = np.maximum(values / highest[:, None], values.dtype.type(least))
    result = base.copy()
    for bit in bin(power)[3:]:
        result *= result
        if bit == "1":
            result *= base
    return power * np.log(highest) + np.log(np.mean(result, axis=1))


class Spread:
    """The law of numbers n_1, …, n_t with the sum R and probability proportional to Π_i e_{n_i}.

    Args:
        log_each: the logarithms of e_0, …, e_f.
        count: t.

    Attributes:
        log_total: for every R, the logarithm of the sum of Π_i e_{n_i} over all numbers with sum R.
    """

    def __init__(self, log_each: Array, count: int) -> None:
        self._tables: dict[int, Array] = {}
        self._count = count
        self.log_total = self._prepare(log_each, count)

    def _prepare(self, log_each: Array, count: int) -> Array:
        known: dict[int, Array] = {1: log_each}

        def total(size: int) -> Array:
            if size not in known:
                left, right = total(size // 2), total(size - size // 2)
                # terms[R, n] for n in the first half and R - n in the second.
                orders = np.arange(left.size)
                rest = orders[:, None] - orders
                terms = np.where(rest >= 0, left + right[np.maximum(rest, 0)], -np.inf)
                top = np.max(terms, axis=1)
                sums = np.cumsum(np.exp(terms - top[:, None]), axis=1)
                # All rows in one ascending array: row R has values in R + (0, 1].
                self._tables[size] = (orders[:, None] + sums / sums[:, -1:]).reshape(-1)
                known[size] = top + np.log(sums[:, -1])
            return known[size]

        return total(count)

    def draw(self, generator: np.random.Generator, sums: Indices) -> Indices:
        """Draw numbers with these sums: one row for each sum."""
        result = np.empty((sums.size, self._count), dtype=np.int64)
        self._halve(generator, sums, result)
        return result

    def _halve(self, generator: np.random.Generator, sums: Indices, result: Indices) -> None:
        size = result.shape[1]
        if size == 1:
            result[:, 0] = sums
            return
        table = self._tables[size]
        width = math.isqrt(table.size)
        found = np.searchsorted(table, sums + generator.random(sums.size), side="right")
        first = np.clip(found - sums * width, 0, sums)
        self._halve(generator, first, result[:, : size // 2])
        self._halve(generator, sums - first, result[:, size // 2 :])


def best(bins: Bins, sigma: float, epsilon: float) -> tuple[float, ManyFolds] | None:
    """The least log W, with its folds and pattern; ``None`` if there is no pattern.

    The gap between bins is chosen first, then blocks are tried.
    """
    b = bins.num_bins
    gaps = bins.distances(np.geomspace(1.0, max(b // 2, 1), _GAPS))
    alone = [Pattern(b // gap, gap) for gap in gaps if b // gap > 1]
    if not alone:
        return None
    found = min((_least(bins, sigma, epsilon, pattern) for pattern in alone), key=lambda x: x[0])
    gap = found[1].pattern.period
    for points, part in _BLOCKS:
        for wider in _WIDER:
            spacing, period = max(1, round(part * gap)), round(wider * gap)
            period = bins.distances(np.array([period + (points - 1.0) * spacing]))[0]
            if b // period > 1 and period > (points - 1) * spacing:
                pattern = Pattern(b // period, period, points, spacing)
                found = min(found, _least(bins, sigma, epsilon, pattern), key=lambda x: x[0])
    return found


def _least(bins: Bins, sigma: float, epsilon: float, pattern: Pattern) -> tuple[float, ManyFolds]:
    """Approximately log W for the best number of folds, to choose a pattern."""
    own, near, far = _exponents(bins, sigma, pattern)
    # With more folds than this W exceeds 1.
    most = 3.0 + 2.0 * (math.log(bins.num_bins) + epsilon) / max(own + near + far, 1e-9)
    folds = int(min(most, _MOST_FOLDS))
    orders = np.arange(folds + 1)
    inner = log_power(_log_product, _log_own(own, folds), pattern.points)
    log_z = log_power(_log_product, inner + near * _pairs(folds), pattern.blocks)
    log_z += far * _pairs(folds) - orders * math.log(pattern.size)
    log_z += np.concatenate([[0.0], np.cumsum(np.log(orders[1:]))])
    log_w = log_z[2:] + log_worth(orders[2:], epsilon)
    chosen = int(np.argmin(log_w))
    return float(log_w[chosen]), ManyFolds(chosen + 2, pattern)


def _exponents(bins: Bins, sigma: float, pattern: Pattern) -> tuple[float, float, float]:
    """The differences v - g₁ and g₁ - g, and g, over σ²."""
    near, far = pattern.common(bins.by_lag)
    most = max(float(bins.by_lag[0]), near)
    return (most - near) / sigma**2, (near - far) / sigma**2, far / sigma**2


def _pairs(folds: int) -> Array:
    orders = np.arange(folds + 1)
    return orders * (orders - 1) / 2.0


def _log_own(own: float, folds: int) -> Array:
    """The logarithms of e^{n(n-1)v/2}/n!, n = 0, …, f."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, folds + 1)))])
    return own * _pairs(folds) - factorials


def _log_product(left: Array, right: Array) -> Array:
    """An approximate product of power series given by logarithms, faster than that of ``renyi``."""
    # A factor for each degree keeps numbers within the range of float64.
    orders = np.arange(left.size)
    slope = (right[-1] - right[0]) / max(orders[-1], 1)
    a, b = left - slope * orders, right - slope * orders
    tops = np.max(a), np.max(b)
    with np.errstate(divide="ignore"):
        logs = np.log(np.convolve(np.exp(a - tops[0]), np.exp(b - tops[1]))[: left.size])
    return logs + tops[0] + tops[1] + slope * orders
