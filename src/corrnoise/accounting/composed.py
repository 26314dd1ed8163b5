r"""Random allocation, drawn independently in each epoch: a composition, with no random draws.

An epoch of b steps uses each example once, in a step that is drawn uniformly, independently of
other epochs. The run is the composition of its epochs; the last one may be cut short. Each epoch is
dominated by a discrete pair (``epoch``), and a composition of dominating pairs dominates the
composition (Zhu, Dong and Wang, 2022).

For measures μ on losses with δ_μ(ε) = ∫(1 - e^{ε-ℓ})_+ dμ(ℓ) the proof is short and needs no total
mass of 1. δ of a convolution is the integral of one factor's curve over the other factor's measure.
So replacing one factor by one whose curve is nowhere lower gives a δ that is no lower; the factors
are replaced one at a time.

The convolution is a product of Fourier transforms on the grid of losses, tilted by e^{λℓ}, λ ≥ 0,
so that errors are relative to δ. The window of losses has ε in its middle. Losses below it appear
above it, which raises δ. Three terms are added: E[e^{λℓ}]·e^{-λℓ₁} for losses beyond its end ℓ₁,
the mass of all compositions with an infinite loss, and a bound on the rounding errors at every
point.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from corrnoise.accounting import convolution, epoch, gaussian, roots
from corrnoise.accounting.convolution import Array
from corrnoise.accounting.epoch import Losses
from corrnoise.accounting.lognormal import LognormalSum

# Standard deviations of the composed loss in half a window, and the most points of a window.
_HALF, _MOST_POINTS = 12.0, 1 << 20
# The largest tilt of a loss.
_MOST_TILT = 500.0
# The number of groups of losses in the search for a tilt.
_FEW = 2000
# The relative width of the bracket that a search for noise ends with.
_TOLERANCE = 1e-5
# Relative; far above the rounding errors of all other arithmetic (no transforms, no tilts).
_ARITHMETIC = 1e-9
# The range of variances 1/σ² without cancellation or overflow.
_LEAST_VARIANCE, _MOST_VARIANCE = 1e-8, 100.0


def delta_bound(sigma: float, num_bins: int, num_steps: int, epsilon: float) -> float:
    """An upper bound of δ(ε) of ``num_steps`` steps with noise σ, in epochs of ``num_bins``.

    It is tight up to the grids, and never above that of the Gaussian mechanism that uses an example
    once in each epoch with certainty.

    >>> round(delta_bound(1.0, 5, 5, 1.0), 4)
    0.0138
    >>> round(delta_bound(2.0, 5, 20, 1.0), 4)  # four epochs
    0.0047
    """
    most = gaussian.delta(epsilon, math.sqrt(-(-num_steps // num_bins)) / sigma)
    if num_bins == 1 or not _LEAST_VARIANCE <= sigma**-2 <= _MOST_VARIANCE:
        return most
    whole, rest = divmod(num_steps, num_bins)
    h, parts = 0.0, list[tuple[epoch.Pair, int]]()
    for length, count in ((num_bins, whole), (rest, 1)):
        if length and count:
            h = h or epoch.spacing(sigma**-2, num_bins, length)
            parts.append((_pair(sigma**-2, num_bins, length, h), count))
    return min(delta(parts, h, epsilon), most)


def delta(parts: list[tuple[epoch.Pair, int]], h: float, epsilon: float) -> float:
    """An upper bound of δ(ε), in both directions, of a composition of (pair, count) on one grid."""
    remove = _composed([(found.remove, count) for found, count in parts], h, epsilon)
    add = _composed([(found.add, count) for found, count in parts], h, epsilon)
    return max(remove, add)


def noise(num_bins: int, num_steps: int, epsilon: float, delta: float) -> float:
    """The least σ with which ``num_steps`` steps are (ε, δ)-DP, or slightly more.

    >>> round(noise(5, 20, 1.0, 1e-5), 2), round(gaussian.noise_multiplier(1.0, 1e-5, 2.0), 2)
    (3.41, 7.46)
    """
    high = gaussian.noise_multiplier(epsilon, delta, math.sqrt(-(-num_steps // num_bins)))
    if num_bins == 1:
        return high

    def price(sigma: float) -> float:
        return delta_bound(sigma, num_bins, num_steps, epsilon)

    near = central_limit(1.0 / num_bins, num_steps, epsilon, delta)
    return roots.least(price, delta, (1e-3 * high, high), _TOLERANCE, min(near, high))


def central_limit(probability: float, count: int, epsilon: float, delta: float) -> float:
    """A guess of the noise, no bound: T steps at rate q are about μ-GDP, μ² = q²T(e^{1/σ²} - 1).

    >>> round(central_limit(0.2, 20, 1.0, 1e-5), 1)
    3.4
    """
    ratio = gaussian.mu(epsilon, delta) / probability / math.sqrt(count)
    return 1.0 / math.sqrt(math.log1p(ratio**2))


@lru_cache(maxsize=64)
def _pair(variance: float, num_bins: int, num_steps: int, h: float) -> epoch.Pair:
    return epoch.pair(LognormalSum(variance, num_bins, num_steps), h)


def _composed(parts: list[tuple[Losses, int]], h: float, epsilon: float) -> float:
    """An upper bound of δ(ε) of a composition of (losses, count) in one direction."""
    losses = [h * np.arange(x.first, x.first + x.mass.size, dtype=np.float64) for x, _ in parts]
    tilt = _tilt(parts, losses, epsilon)
    variance, tilted, log_total = 0.0, list[tuple[Array, int]](), 0.0
    for (x, count), loss in zip(parts, losses, strict=True):
        log_mass = _log_total(x, loss, tilt)
        mass = x.mass * np.exp(tilt * loss - log_mass)
        mean = float(mass @ loss)
        variance += count * float(mass @ (loss - mean) ** 2)
        log_total += count * log_mass
        tilted.append((mass, count))
    widest = max(mass.size for mass, _ in tilted)
    half = max(_HALF * math.sqrt(variance) / h, float(widest))
    size = min(1 << math.ceil(math.log2(2.0 * half)), _MOST_POINTS)
    transform, errors = convolution.powers([(_folded(m, size), count) for m, count in tilted], size)
    # Index 0 of the inverse is the sum of the first losses; it is known up to the period.
    start = sum(x.first * count for x, count in parts)
    middle = math.floor(epsilon / h)
    first = middle - size // 2
    law = np.roll(np.fft.irfft(transform, size), start - first)[middle - first :]
    loss = h * np.arange(middle, middle + law.size)
    worth = np.maximum(-np.expm1(epsilon - loss), 0.0)
    found = float(
        (np.maximum(law, 0.0) + errors.largest) @ (worth * np.exp(log_total - tilt * loss))
    )
    end = h * (first + size)
    beyond = _chernoff(parts, losses, _tilt(parts, losses, end), end)
    finite = [float(np.sum(x.mass)) for x, _ in parts]
    logs = sum(c * math.log(f) for f, (_, c) in zip(finite, parts, strict=True))
    more = sum(c * math.log1p(x.infinite / f) for f, (x, c) in zip(finite, parts, strict=True))
    infinite = math.exp(logs) * math.expm1(more)
    rounding = _ARITHMETIC + convolution.FACTOR * sum(count for _, count in parts)
    return min((found + beyond + infinite) * (1.0 + rounding), 1.0)


def _log_total(x: Losses, loss: Array, tilt: float) -> float:
    return math.log(float(x.mass @ np.exp(tilt * loss)))


def _chernoff(
    parts: list[tuple[Losses, int]], losses: list[Array], tilt: float, at: float
) -> float:
    """E[e^{λℓ}]·e^{-λ·at}: an upper bound on the mass beyond ``at``."""
    logs = sum(c * _log_total(x, loss, tilt) for (x, c), loss in zip(parts, losses, strict=True))
    return math.exp(min(logs - tilt * at, 700.0))


def _tilt(parts: list[tuple[Losses, int]], losses: list[Array], target: float) -> float:
    """The λ ≥ 0 at which the tilted losses have approximately the mean ``target``."""
    from scipy.optimize import brentq  # deferred, like all of SciPy, for a quick import

    coarse = [_coarse(x.mass, loss) for (x, _), loss in zip(parts, losses, strict=True)]

    def excess(tilt: float) -> float:
        total = -target
        for (_, count), (mass, loss) in zip(parts, coarse, strict=True):
            tilted = mass * np.exp(tilt * (loss - loss[-1]))
            total += count * float(tilted @ loss) / float(np.sum(tilted))
        return total

    if excess(0.0) >= 0.0:
        return 0.0
    most = _MOST_TILT / max(float(np.max(np.abs(loss))) for loss in losses)
    if excess(most) <= 0.0:
        return most
    return float(brentq(excess, 0.0, most, rtol=1e-3, xtol=1e-3 * most))


def _coarse(mass: Array, loss: Array) -> tuple[Array, Array]:
    """The masses and means of groups of neighbouring losses: few values, for a quick search."""
    starts = np.arange(0, mass.size, -(-mass.size // _FEW))
    total, weighted = np.add.reduceat(mass, starts), np.add.reduceat(mass * loss, starts)
    kept = total > 0.0
    return total[kept], weighted[kept] / total[kept]


def _folded(mass: Array, size: int) -> Array:
    """The masses modulo the period."""
    rows = -(-mass.size // size)
    return np.sum(np.append(mass, np.zeros(rows * size - mass.size)).reshape(rows, size), axis=0)
