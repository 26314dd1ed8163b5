r"""Balls-in-bins: an example falls into one of b bins; bin j is used at steps j, j+b, j+2b ….

For a non-negative lower-triangular C the dominating pair for removing an example is

    P = (1/b) Σ_j N(m_j, σ²I),   Q = N(0, σ²I),   m_j = Σ_i C[:, j+ib],

and that for adding one is (Q, P) (Choquette-Choo et al., 2024; Chua et al., 2024). With
x_j = ⟨m_j, y⟩/σ² - ‖m_j‖²/(2σ²) and L = log mean_j e^{x_j},

    δ_remove(ε) = E_P[(1 - e^{ε-L})_+],   δ_add(ε) = E_Q[(1 - e^{ε+L})_+].

Only the b numbers ⟨m_j, y⟩ matter; they are Gaussian, with σ² times the Gram matrix
of the m_j as covariance.

**Removing: importance sampling with a bounded weight.** For a number of folds f and θ > 0 let
τ = fθ and draw y from the density proportional to (mean_j e^{θx_j})^f under Q. Expanding the power
gives a mixture over f-tuples of bins of N(θ(m_{j_1} + … + m_{j_f}), σ²I), in which a tuple has the
weight

    Π_a exp((θ²-θ)d_{j_a}/2) · Π_{a<c} exp(θ²⟨m_{j_a}, m_{j_c}⟩/σ²),    d_j = ‖m_j‖²/σ²,

and Z, b^{-f} times the sum of all weights, is the normalising constant. By the power mean
inequality, mean_j e^{θx_j} ≥ e^{θL}·min(1, b^{θ-1}), so the integrand, including its weight
Z·e^L/(mean_j e^{θx_j})^f, is at most

    Z·max(1, b^{(1-θ)f})·e^{-(τ-1)L} (1 - e^{ε-L})_+
      ≤  W = Z·max(1, b^{(1-θ)f})·e^{-(τ-1)ε} (τ-1)^{τ-1}/τ^τ

and its second moment is at most W·δ: for every δ, the relative error after N draws is about
√(W/(δN)). With θ = 1, W is the bound on δ that the Rényi divergence of order f gives; f and θ are
chosen for the least W, with f up to 3 where b is small. (f = 1 alone leaves a slack of up to
b^{τ-1}.)

**Adding.** L ≥ mean_j x_j (Jensen), so L < -ε needs ⟨m̄, y⟩/σ² < d̄/2 - ε, with m̄ and d̄ the means.
Hence, with no random draws, δ_add ≤ Φ(-(ε - d̄/2)σ/‖m̄‖), which is often far below any target. Where
it is not, y is drawn from N(-τm̄, σ²I), and the weight is at most
exp(-τ(ε - d̄/2) + τ²‖m̄‖²/(2σ²)).

**Certificate.** The expectation of N independent draws in [0, W] is bounded from above by Maurer
and Pontil's empirical Bernstein inequality (2009): with probability 1 - η over the draws,

    δ ≤ mean + √(2·var·log(2/η)/N) + 7·W·log(2/η)/(3(N-1)).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from corrnoise._progress import Progress
from corrnoise.accounting.bins import Bins, Indices

Array = npt.NDArray[np.float64]
# Float64 in a certificate; float32 where a search keeps its draws.
Noise = npt.NDArray[np.float64] | npt.NDArray[np.float32]
Direction = Literal["remove", "add"]

# Triples of bins, which take b³ operations, are used up to this many bins.
_MOST_TRIPLES = 400
# About so many bins stand for all as the first of a tuple when θ is chosen.
_ROWS = 60
# Floats that one thread draws at a time, and those that it then works on: they fit into a cache.
_BLOCK, _CHUNK = 1 << 21, 1 << 15
# Rows of weights from which bins are chosen at a time, for the same reason.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class Estimate:
    """A probability δ estimated from independent draws.

    Attributes:
        mean: the unbiased estimate.
        standard_error: the standard error of the mean.
        failure_probability: η.
        samples: N, the number of draws.
        largest: W, which no draw exceeds.
        direction: whether δ is that of removing or that of adding an example.
        seed: the seed of the draws; ``None`` where it is not recorded.
        attempt: which confirmation of a search it is, from 1; 0 for a δ that needed no search.
    """

    mean: float
    standard_error: float
    failure_probability: float
    samples: int
    largest: float
    direction: Direction = "remove"
    seed: int | None = None
    attempt: int = 0

    @property
    def whole_failure_probability(self) -> float:
        """The failure probability of the certificate that this estimate is one part of.

        Attempt i of a search has the part 2^-i of it, and each direction has half of that.
        """
        return self.failure_probability * 2.0 ** (self.attempt + 1)

    @property
    def upper(self) -> float:
        """A value that δ exceeds with probability at most η over the draws."""
        return self.upper_with(self.samples)

    def upper_with(self, samples: int) -> float:
        """The value of ``upper`` for another number of draws with this mean and variance."""
        log_term = math.log(2.0 / self.failure_probability)
        deviation = self.standard_error * math.sqrt(2.0 * log_term * self.samples / samples)
        return self.mean + deviation + 7.0 * self.largest * log_term / (3.0 * (samples - 1))


def estimate(
    bins: Bins,
    sigma: float,
    epsilon: float,
    direction: Direction,
    *,
    samples: int,
    failure_probability: float,
    seed: tuple[int, ...],
    progress: Progress | None = None,
    shape: Shape | None = None,
    normals: Normals | None = None,
) -> Estimate:
    """Estimate δ(ε) of one direction, with a certified upper bound.

    The random numbers depend on ``seed`` alone, not on σ, ε or the number of cores. A search at
    many σ or ε saves time by a fixed ``shape`` and by keeping its ``normals``.
    """
    tilt = (
        _tilt_remove(bins, sigma, epsilon, shape)
        if direction == "remove"
        else _tilt_add(bins, sigma, epsilon)
    )
    total = square = 0.0
    done = 0
    for count, first, second in _in_blocks(bins, tilt.values, samples, seed, normals):
        total, square, done = total + first, square + second, done + count
        if progress is not None:
            progress(done, samples)
    mean = total / samples
    variance = max(square - samples * mean * mean, 0.0) / (samples - 1)
    error = math.sqrt(variance / samples)
    return Estimate(mean, error, failure_probability, samples, tilt.largest, direction)


def add_bound(bins: Bins, sigma: float, epsilon: float) -> float:
    """The upper bound Φ(-(ε - d̄/2)σ/‖m̄‖) of δ_add(ε), with no random draws."""
    from scipy.special import ndtr

    margin = epsilon - float(np.mean(bins.squares)) / (2.0 * sigma**2)
    return float(ndtr(-margin * sigma / math.sqrt(bins.mean_square)))


@dataclass(frozen=True)
class _Tilt:
    """An integrand on draws (generator, Gaussian inner products), and its largest value."""

    values: Callable[[np.random.Generator, Noise], Array]
    largest: float


def _tilt_remove(bins: Bins, sigma: float, epsilon: float, shape: Shape | None = None) -> _Tilt:
    half = bins.squares / (2.0 * sigma**2)
    if shape is None:
        chosen = tuples(bins, sigma, epsilon)
    else:
        chosen = Tuples(bins, sigma, epsilon, shape.theta, shape.folds)
    theta, folds = chosen.theta, chosen.folds

    def values(generator: np.random.Generator, noise: Noise) -> Array:
        scaled = (bins.gram * (theta / sigma**2)).astype(noise.dtype, copy=False)
        down, bins_of = half.astype(noise.dtype), chosen.draw(generator, noise.shape[0])
        result = np.empty(noise.shape[0])
        for rows in _chunks(noise):
            x = noise[rows] * (1.0 / sigma)
            x -= down
            for bin_ in bins_of:
                x += scaled[bin_[rows]]
            top = np.max(x, axis=1)
            x -= top[:, None]
            top = top.astype(np.float64)
            loss = top + np.log(np.mean(np.exp(x), axis=1))
            x *= theta
            power = folds * (theta * top + np.log(np.mean(np.exp(x, out=x), axis=1)))
            weight = np.exp(np.minimum(loss - power + chosen.log_z, 700.0))
            result[rows] = weight * -np.expm1(np.minimum(epsilon - loss, 0.0))
        return result

    # The weights are capped at e^700 too; a W that large certifies nothing.
    return _Tilt(values, math.exp(min(chosen.log_largest, 700.0)))


class Shape(NamedTuple):
    """The number of folds f and θ."""

    folds: int
    theta: float


def tuples(bins: Bins, sigma: float, epsilon: float, most_triples: int = _MOST_TRIPLES) -> Tuples:
    """The distribution of tuples with the least W, over the number of folds and θ."""
    folds = (1, 2, 3) if bins.num_bins <= most_triples else (1, 2)
    found = (_best_tuples(bins, sigma, epsilon, each) for each in folds)
    return min(found, key=lambda t: t.log_largest)


def _best_tuples(bins: Bins, sigma: float, epsilon: float, folds: int) -> Tuples:
    """The distribution of tuples with the least W over θ, for this number of folds."""
    from scipy.optimize import minimize_scalar

    # Some of the rows are enough to choose θ; W is that of all rows.
    stride = max(1, bins.num_bins // _ROWS)

    def log_largest(log_excess: float) -> float:
        theta = (1.0 + math.exp(log_excess)) / folds
        return Tuples(bins, sigma, epsilon, theta, folds, stride).log_largest

    found = minimize_scalar(
        log_largest, bounds=(-4.0, 6.0), method="bounded", options={"xatol": 1e-2}
    )
    return Tuples(bins, sigma, epsilon, (1.0 + math.exp(float(found.x))) / folds, folds)


class Tuples:
    """The distribution of f-tuples of bins, f = 1, 2 or 3, and the constants Z and W.

    With a ``stride`` above 1 the first bin is one of every so many: about the same Z and W, to look
    for a good θ.
    """

    def __init__(
        self,
        bins: Bins,
        sigma: float,
        epsilon: float,
        theta: float,
        folds: int,
        stride: int = 1,
    ) -> None:
        self.theta, self.folds = theta, folds
        d, b = bins.squares / sigma**2, bins.num_bins
        single = (theta * theta - theta) * d / 2.0
        if folds == 1:
            from scipy.special import logsumexp  # deferred, like all of SciPy

            log_sum = float(logsumexp(single))
            self.first = np.cumsum(np.exp(single - log_sum))
        else:
            gram = bins.gram if folds == 3 else bins.gram[::stride]
            pair = gram * (theta / sigma) ** 2
            scale = float(np.max(pair))
            self.pair = np.exp(pair - scale)
            scale_single = float(np.max(single))
            self.single = np.exp(single - scale_single)
            some = self.pair[::stride] if folds == 3 else self.pair
            joint = some * np.outer(self.single[::stride], self.single)
            log_scale = scale + 2.0 * scale_single + math.log(b / len(some))
            if folds == 3:
                joint *= (some * self.single) @ self.pair
                log_scale += 2.0 * scale + scale_single
            rows = np.sum(joint, axis=1)
            total = float(np.sum(rows))
            # With very little noise the weights underflow; such tuples must never be chosen.
            log_sum = log_scale + math.log(total) if total > 1e-250 else 1e300
            self.first = np.cumsum(rows) / (total or 1.0)
            self.joint = joint
        self.log_z = log_sum - folds * math.log(b)
        tau = folds * theta
        self.log_largest = (
            self.log_z
            + max(0.0, (1.0 - theta) * folds * math.log(b))
            - (tau - 1.0) * epsilon
            + (tau - 1.0) * math.log(tau - 1.0)
            - tau * math.log(tau)
        )

    @property
    def shape(self) -> Shape:
        """The number of folds and θ."""
        return Shape(self.folds, self.theta)

    def draw(self, generator: np.random.Generator, count: int) -> list[Indices]:
        """Draw ``count`` tuples: one array of bins for each fold."""
        last = self.first.size - 1
        first = np.minimum(np.searchsorted(self.first, generator.random(count)), last)
        chosen = [first]
        if self.folds >= 2:
            totals = np.cumsum(self.joint, axis=1)
            chosen.append(_choose(generator.random(count), lambda rows: totals[first[rows]]))
        if self.folds == 3:

            def third(rows: slice) -> Array:
                weights = self.pair[first[rows]]
                weights *= self.pair[chosen[1][rows]]
                weights *= self.single
                return np.cumsum(weights, axis=1, out=weights)

            chosen.append(_choose(generator.random(count), third))
        return chosen


def _choose(parts: Array, totals: Callable[[slice], Array]) -> Indices:
    """For each row the first column whose total is at least this part of the row's last total.

    Args:
        parts: in [0, 1), one for each row.
        totals: the cumulative sums of the weights of some rows.
    """
    result = np.empty(parts.size, dtype=np.int64)
    for start in range(0, parts.size, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        found = totals(rows)
        result[rows] = np.argmax(found >= (parts[rows] * found[:, -1])[:, None], axis=1)
    return result


def _tilt_add(bins: Bins, sigma: float, epsilon: float) -> _Tilt:
    d = bins.squares / sigma**2
    margin = epsilon - float(np.mean(d)) / 2.0
    spread = bins.mean_square / sigma**2
    tau = max(margin / spread, 0.0)
    down = tau * bins.inner_with_mean / sigma**2 + d / 2.0

    def values(generator: np.random.Generator, noise: Noise) -> Array:
        lower, result = down.astype(noise.dtype), np.empty(noise.shape[0])
        for rows in _chunks(noise):
            x = noise[rows] * (1.0 / sigma)
            along = np.mean(x, axis=1, dtype=np.float64) - tau * spread  # ⟨m̄, y⟩/σ²
            x -= lower
            top = np.max(x, axis=1)
            x -= top[:, None]
            loss = top.astype(np.float64) + np.log(np.mean(np.exp(x, out=x), axis=1))
            inside = loss < -epsilon
            weight = np.exp(np.where(inside, tau * along + tau * tau * spread / 2.0, -np.inf))
            result[rows] = weight * -np.expm1(np.minimum(epsilon + loss, 0.0))
        return result

    return _Tilt(values, math.exp(-tau * margin + tau * tau * spread / 2.0))


def _chunks(noise: Noise) -> Iterator[slice]:
    """Parts of the rows that fit into a cache."""
    size = max(1, _CHUNK // noise.shape[1])
    for start in range(0, noise.shape[0], size):
        yield slice(start, start + size)


class Normals:
    """The Gaussian inner products of a seed's draws, which σ and ε do not change, in float32.

    Args:
        most: the draws of the largest estimate; one with fewer draws takes the first of them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[tuple[int, ...], tuple[Noise, Any]] = {}

    def draw(
        self, bins: Bins, generator: np.random.Generator, count: int, key: tuple[int, ...]
    ) -> Noise:
        """The next draws of a generator, which is left in the state that it has after them."""
        if key not in self._kept:
            noise = bins.draw_rounded(generator, count)
            self._kept[key] = noise, generator.bit_generator.state
        noise, generator.bit_generator.state = self._kept[key]
        return noise


def _in_blocks(
    bins: Bins,
    values: Callable[[np.random.Generator, Noise], Array],
    samples: int,
    seed: tuple[int, ...],
    normals: Normals | None,
) -> Iterator[tuple[int, float, float]]:
    """Counts, sums and sums of squares of the integrand, block by block, on all cores."""
    most = max(1, _BLOCK // bins.num_bins)
    size = min(samples, most)
    counts = [min(size, samples - start) for start in range(0, samples, size)]

    def block(index: int) -> tuple[int, float, float]:
        generator = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
        if normals is None:
            noise = bins.draw(generator, counts[index])
        else:
            count = max(counts[index], min(most, normals.most - index * most))
            noise = normals.draw(bins, generator, count, (*seed, index, count))[: counts[index]]
        found = values(generator, noise)
        return counts[index], float(np.sum(found)), float(np.sum(found * found))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(block, range(len(counts)))
