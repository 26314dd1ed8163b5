r"""Importance sampling for adding an example, with many bins: T = mean_j e^{x_j} is made small.

The shift along the mean of ``balls_in_bins`` bounds T from below by Jensen's inequality, which is
loose if e^{x_j} has a large variance. Here t bins that are far apart are drawn one by one, with the
weight e^{-λe^{x_j}/t}; the other bins are drawn given these.

With A_r and T_r as in ``many_folds``, let K_r be the covariance of u_j = x_j + d_j/2 over A_r under
Q, and D_r its diagonal, the d_j. Let κ be at least every eigenvalue of every correlation matrix
D_r^{-1/2} K_r D_r^{-1/2}. For a number λ > 0 and c = λ/t let ω be a step function,
ω(s) ≥ exp(-c·e^s), and

    ℓ_j = E[ω(√(κd_j)·z - d_j/2)],    z a standard normal.

Let C_r = Π_{j∈A_r} ℓ_j·√(κ^t det D_r/det K_r), and C the mean of C_r over r. Draw r with
probability C_r/(bC), the x_j of A_r independently with the density ω(x_j)/ℓ_j against that of
N(-d_j/2, κd_j), and all other x_j from their law under Q given these. Then

    Y = C·(1 - e^ε T)_+ · Π_{j∈A_r} e^{-c·e^{x_j}}/ω(x_j)
          · exp(-½ u^T(K_r^{-1} - (κD_r)^{-1})u) / mean_r e^{-λT_r}

has the expectation δ_add(ε), and is at most

    W = C·exp(λe^{-ε} + ε - 1)/λ,

because K_r^{-1} - (κD_r)^{-1} is positive semidefinite and mean_r e^{-λT_r} ≥ e^{-λT}.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from corrnoise.accounting.bins import Bins, Indices
from corrnoise.accounting.proposals import LARGEST_EXPONENT, Noise, Pattern, Tilt, chunks

Array = npt.NDArray[np.float64]

# How many distances are tried.
_DISTANCES = 12
# The number of steps of ω, and the range ±this of a normal that they cover.
_STEPS, _QUANTILE = 512, 7.0
# How many entries of matrices are processed at once.
_ENTRIES = 1 << 18
# The largest λ, as a multiple of the number of bins that are drawn one by one.
_LARGEST_RATE = 1e3
# The most bins that are drawn one by one.
_MOST = 256
# κ exceeds the largest eigenvalue by this relative margin, for rounding errors.
_ROUNDING = 1e-9
# Correlation matrices with a larger row sum are not used. So every eigenvalue is at least 2 minus
# this.
_LARGEST_SUM = 1.9


@dataclass(frozen=True)
class LowSums:
    """The pattern of bins that are drawn one by one, and λ."""

    pattern: Pattern
    rate: float

    def at(self, bins: Bins, sigma: float, epsilon: float) -> Tilt:
        """The proposal at this noise and ε."""
        parts = _parts(bins, self.pattern)
        if parts is None:
            return Tilt(_none, math.inf)
        pattern, rate, b, t = self.pattern, self.rate, bins.num_bins, self.pattern.size
        d, kinds = bins.squares / sigma**2, bins.kinds
        variance = parts.most * d
        steps = _Steps(d[:kinds], np.sqrt(variance[:kinds]), rate / t)
        log_mass = np.broadcast_to(steps.log_mass, (1, b))
        log_constant = pattern.sums(log_mass)[0] + parts.log_penalty
        places, constant = pattern.bins, np.exp(log_constant - np.max(log_constant))
        log_mean_constant = float(np.max(log_constant)) + math.log(float(np.mean(constant)))
        of_first = np.cumsum(constant) / np.sum(constant)

        def values(generator: np.random.Generator, noise: Noise) -> Array:
            count = noise.shape[0]
            first = np.searchsorted(of_first, generator.random(count), side="right")
            first = np.minimum(first, b - 1)
            chosen = (first[:, None] + places) % b
            x, log_excess = steps.draw(generator, chosen % kinds)
            u = x + d[chosen] / 2.0
            rows = np.arange(count)[:, None]
            away, bend = np.zeros((count, b)), -np.sum(u * u / variance[chosen], axis=1)
            for part in _groups(count, t):
                pair = np.stack([u[part], u[part] - noise[rows[part], chosen[part]] / sigma], 2)
                solved = _solved(parts.inverse, first[part], pair * sigma**2)
                bend[part] += np.sum(solved[:, :, 0] * u[part], axis=1)
                away[rows[part], chosen[part]] = solved[:, :, 1]
            log_weight = log_mean_constant + log_excess - np.maximum(bend, 0.0) / 2.0
            shift = bins.inner(away) / sigma**2
            result = np.empty(count)
            for part in chunks(noise):
                ratio = np.exp(noise[part] * (1.0 / sigma) + shift[part] - d / 2.0)
                mean = np.mean(ratio, axis=1)
                sums = pattern.different_sums(ratio) * (rate / t)
                least = np.min(sums, axis=1)
                log_mean = np.log(np.mean(np.exp(least[:, None] - sums), axis=1)) - least
                weight = np.exp(np.minimum(log_weight[part] - log_mean, LARGEST_EXPONENT))
                result[part] = weight * np.maximum(1.0 - math.exp(epsilon) * mean, 0.0)
            return result

        return Tilt(values, log_mean_constant + _log_worth(rate, epsilon))


class _Steps:
    """ω on equal steps of x, and the law of each x_j that is weighted by it.

    Args:
        d: ‖m_j‖²/σ² for every bin.
        root: √(κd_j) for every bin.
        rate: c.
    """

    def __init__(self, d: Array, root: Array, rate: float) -> None:
        from scipy.special import ndtr

        high = _QUANTILE * float(np.max(root))
        low = -high - float(np.max(d)) / 2.0
        self.ends, self.rate, self.root = np.linspace(low, high, _STEPS - 1), rate, root
        # The exponent of e^{-ce^x} at the left end of each step.
        self.log_weight = np.append(0.0, -rate * np.exp(self.ends))
        z = (self.ends + d[:, None] / 2.0) / root[:, None]
        zero, one = np.zeros((d.size, 1)), np.ones((d.size, 1))
        self.below = np.hstack([zero, ndtr(z), one])
        with np.errstate(divide="ignore"):
            logs = np.log(np.diff(self.below, axis=1)) + self.log_weight
        # Relative to the largest of a row: with a small d all of them may underflow.
        top = np.max(logs, axis=1, keepdims=True)
        sums = np.cumsum(np.exp(logs - top), axis=1)
        self.log_mass = top[:, 0] + np.log(sums[:, -1])
        # All rows in one ascending array: the row of bin j has values in j + (0, 1].
        self.table = (np.arange(d.size)[:, None] + sums / sums[:, -1:]).reshape(-1)
        self.half = d / 2.0

    def draw(
        self, generator: np.random.Generator, bins: npt.NDArray[np.int64]
    ) -> tuple[Array, Array]:
        """The x_j of some bins, and for each row the sum of log(e^{-ce^{x_j}}/ω(x_j))."""
        from scipy.special import ndtri

        found = np.searchsorted(self.table, bins + generator.random(bins.shape), side="right")
        count = self.log_weight.size
        step = np.clip(found - bins * count, 0, count - 1)
        low, high = self.below[bins, step], self.below[bins, step + 1]
        z = ndtri(low + (high - low) * generator.random(bins.shape))
        x = np.clip(z, -38.0, 38.0) * self.root[bins] - self.half[bins]
        # Rounding must not move x out of its step to the left, where ω is larger.
        x = np.maximum(x, np.append(-np.inf, self.ends)[step])
        log_excess = -self.rate * np.exp(x) - self.log_weight[step]
        return x, np.sum(log_excess, axis=1)


def _none(generator: np.random.Generator, noise: Noise) -> Array:
    raise AssertionError("a proposal with an infinite W must not be drawn from")


@dataclass(frozen=True)
class _Parts:
    """What does not depend on σ: κ, K_r^{-1} and log √(κ^t det D_r/det K_r), for σ = 1.

    They are given for every r, or only for r = 0 if all bins are alike.
    """

    most: float
    inverse: Array
    log_penalty: Array


@lru_cache(maxsize=4)
def _parts(bins: Bins, pattern: Pattern) -> _Parts | None:
    """The parts of a pattern; ``None`` if a correlation matrix may be nearly singular."""
    chosen = (np.arange(bins.kinds)[:, None] + pattern.bins) % bins.num_bins
    found = _correlations(bins, chosen)
    if found is None:
        return None
    matrices, most = found
    roots = np.sqrt(bins.squares[chosen])
    _, log_det = np.linalg.slogdet(matrices)
    inverse: Array = np.linalg.inv(matrices) / (roots[:, :, None] * roots[:, None, :])
    return _Parts(most, inverse, (pattern.size * math.log(most) - log_det) / 2.0)


def _correlations(
    bins: Bins, chosen: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], float] | None:
    """The correlation matrices of some bins and κ; ``None`` if one may be nearly singular."""
    squares = bins.squares[chosen]
    if float(np.min(squares)) <= 0.0:
        return None
    matrices = bins.gram[chosen[..., :, None], chosen[..., None, :]]
    matrices /= np.sqrt(squares[..., :, None] * squares[..., None, :])
    # Every eigenvalue differs from 1 by at most the sum of a row's other entries (Gershgorin).
    most = float(np.max(np.sum(np.abs(matrices), axis=-1))) * (1.0 + _ROUNDING)
    return (matrices, most) if most <= _LARGEST_SUM else None


def _solved(inverse: Array, first: Indices, pair: Array) -> Array:
    """K_r^{-1} times two columns, with the r of each row."""
    if len(inverse) > 1:
        return inverse[first] @ pair
    # All rows have one symmetric matrix: a single product.
    rows = np.swapaxes(pair, 1, 2)
    return np.swapaxes((rows.reshape(-1, len(inverse[0])) @ inverse[0]).reshape(rows.shape), 1, 2)


def _groups(count: int, size: int) -> Iterator[slice]:
    """Parts of the rows whose matrices K_r^{-1} fit into a cache."""
    step = max(1, _ENTRIES // size**2)
    for start in range(0, count, step):
        yield slice(start, start + step)


def best(bins: Bins, sigma: float, epsilon: float) -> tuple[float, LowSums] | None:
    """Approximately the least log W, with its pattern and λ; ``None`` if no pattern is usable."""
    b = bins.num_bins
    distances = bins.distances(np.geomspace(1.0, max(b // 2, 1), _DISTANCES))
    patterns = [Pattern(b // distance, distance) for distance in distances]
    each = (_least(bins, sigma, epsilon, x) for x in patterns if 1 < x.size <= _MOST)
    found = [pair for pair in each if pair is not None]
    return min(found, key=lambda pair: pair[0]) if found else None


def _least(
    bins: Bins, sigma: float, epsilon: float, pattern: Pattern
) -> tuple[float, LowSums] | None:
    """Log W for the best λ, estimated from the bins in the middle, to choose a pattern."""
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    middle, t = bins.num_bins // 2, pattern.size
    correlations = _correlations(bins, (middle + pattern.bins) % bins.num_bins)
    if correlations is None:
        return None
    matrix, most = correlations
    penalty = (t * math.log(most) - float(np.linalg.slogdet(matrix)[1])) / 2.0
    d = float(bins.squares[middle]) / sigma**2
    z = np.linspace(-_QUANTILE, _QUANTILE, _STEPS)
    mass = np.exp(-z * z / 2.0)
    mass /= np.sum(mass)
    each = np.exp(math.sqrt(most * d) * z - d / 2.0)

    def log_largest(log_rate: float) -> float:
        rate = math.exp(log_rate)
        mean = float(mass @ np.exp(-rate / t * each))
        # At small ε and δ all of it may underflow.
        log_mean = math.log(mean) if mean else float(logsumexp(-rate / t * each, b=mass))
        return t * log_mean + penalty + _log_worth(rate, epsilon)

    limits = (-2.0, math.log(_LARGEST_RATE * t))
    found = minimize_scalar(log_largest, bounds=limits, method="bounded", options={"xatol": 1e-2})
    return float(found.fun), LowSums(pattern, math.exp(float(found.x)))


def _log_worth(rate: float, epsilon: float) -> float:
    """The logarithm of an upper bound of e^{λT}(1 - e^ε T) for T < e^{-ε}."""
    return rate * math.exp(-epsilon) + epsilon - 1.0 - math.log(rate)
