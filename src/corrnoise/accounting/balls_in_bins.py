r"""Balls-in-bins: an example falls into one of b bins; bin j is used at steps j, j+b, j+2b ….

For a non-negative lower-triangular C the dominating pair for removing an example is

    P = (1/b) Σ_j N(m_j, σ²I),   Q = N(0, σ²I),   m_j = Σ_i C[:, j+ib],

and that for adding one is (Q, P) (Choquette-Choo et al., 2024; Chua et al., 2024). With
x_j = ⟨m_j, y⟩/σ² - ‖m_j‖²/(2σ²) and L = log mean_j e^{x_j},

    δ_remove(ε) = E_P[(1 - e^{ε-L})_+],   δ_add(ε) = E_Q[(1 - e^{ε+L})_+].

Only the b numbers ⟨m_j, y⟩ matter; they are Gaussian, with σ² times the Gram matrix
of the m_j as covariance.

**Removing.** ``few_folds`` draws y from a density with more mass where L is large. With many bins
and a small ε, ``many_folds`` has a smaller largest weight W.

**Adding.** L ≥ mean_j x_j (Jensen), so L < -ε needs ⟨m̄, y⟩/σ² < d̄/2 - ε, with m̄ and d̄ the means.
Hence, with no random draws, δ_add ≤ Φ(-(ε - d̄/2)σ/‖m̄‖), which is often far below the target δ.
Where it is not, y is drawn from N(-τm̄, σ²I). The integrand, including its weight
exp(τ⟨m̄, y⟩/σ² + τ²‖m̄‖²/(2σ²)), is at most

    exp(τL + τd̄/2 + τ²‖m̄‖²/(2σ²))·(1 - e^{ε+L})_+
      ≤  W = exp(-τ(ε - d̄/2) + τ²‖m̄‖²/(2σ²))·τ^τ/(τ+1)^{τ+1}.

With many bins and a large variance of e^{x_j}, ``low_sums`` has a smaller W.

**Certificate.** Let Y_1, …, Y_N be independent draws in [0, W] of expectation δ, φ in (0, 1) and
λ = φ/W. Then E[Π(1 - λY_i)] = (1 - λδ)^N, so by Markov's inequality, with probability 1 - η,

    Nλδ ≤ -N·log(1 - λδ) ≤ log(1/η) - Σ log(1 - λY_i) ≤ log(1/η) + λ·ΣY_i + κλ²·ΣY_i²,

with κ = (-log(1-φ) - φ)/φ². The least value over several φ is taken; they share η equally.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from corrnoise._progress import Progress
from corrnoise._threads import pool
from corrnoise.accounting import few_folds, low_sums, many_folds
from corrnoise.accounting.bins import Bins
from corrnoise.accounting.proposals import Noise, Shape, Tilt, chunks

Array = npt.NDArray[np.float64]
Direction = Literal["remove", "add"]
Values = Callable[[np.random.Generator, Noise], Array]

# Floats that one thread draws at a time.
_BLOCK = 1 << 21
# With more bins than the first number, choosing few folds takes long. It is skipped where
# ``many_folds`` has the least W with more folds than the second number.
_MANY_BINS, _FEW_FOLDS = 400, 8
# A proposal for many bins is taken if the logarithm of its W is less by at least this.
_CLEARLY = math.log(1.5)
# Pairs (φ, κ) of a certificate. The last φ is the best one for 10⁸ draws that are all equal.
_PARTS = [
    (part, (-math.log1p(-part) - part) / part**2) for part in (0.9 * 0.5**i for i in range(12))
]
# An estimate may end early, after at least this fraction of its draws, if its mean minus this many
# standard errors is still too large.
_FEWEST_PART, _HOPELESS = 0.1, 3.0
# The random stream of each direction, for everything that it draws besides the normals.
_STREAMS: dict[Direction, int] = {"remove": 0, "add": 1}
# The limits of log τ of the shift for adding.
_LOG_TAU = (-6.0, 9.0)


@dataclass(frozen=True)
class Estimate:
    """A probability δ estimated from N independent draws in [0, W], with a certified upper bound.

    ``upper`` is at least δ with probability at least 1 - η over the draws (derived in the module's
    docstring).

    Attributes:
        mean: the unbiased estimate.
        standard_error: the standard error of the mean.
        failure_probability: η.
        samples: N, the number of draws.
        largest: W, which no draw exceeds.
        direction: whether δ is that of removing or that of adding an example.
        seed: the seed of the draws; ``None`` where it is not recorded.
        attempt: which confirmation of a search it is, from 1; 0 for a δ that needed no search.

    >>> found = Estimate(mean=1e-6, standard_error=1e-8, failure_probability=1e-9,
    ...                  samples=100_000, largest=1e-4)
    >>> found.mean < found.upper < 1.1e-6
    True
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
        """The failure probability of the whole certificate, of which this estimate is one part.

        Attempt i of a search has the fraction 2^-i of it, and each direction has half of that.
        """
        return self.failure_probability * 2.0 ** (self.attempt + 1)

    @property
    def upper(self) -> float:
        """A value that δ exceeds with probability at most η over the draws."""
        return self.upper_with(self.samples)

    def upper_with(self, samples: int) -> float:
        """What ``upper`` would be for another number of draws with this mean and variance."""
        if self.largest == 0.0:
            return self.mean
        log_term = math.log(len(_PARTS) / self.failure_probability)
        square = self.standard_error**2 * (self.samples - 1) + self.mean**2
        return self.mean + min(
            bend * part * square / self.largest + self.largest * log_term / (part * samples)
            for part, bend in _PARTS
        )


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
    proposal = shape or best_shape(bins, sigma, epsilon, direction)
    (found,) = estimates(
        bins,
        sigma,
        epsilon,
        {direction: proposal},
        samples=samples,
        failure_probability=failure_probability,
        seed=seed,
        progress=progress,
        normals=normals,
    )
    return found


def estimates(
    bins: Bins,
    sigma: float,
    epsilon: float,
    shapes: Mapping[Direction, Shape],
    *,
    samples: int,
    failure_probability: float,
    seed: tuple[int, ...],
    progress: Progress | None = None,
    normals: Normals | None = None,
    wanted: float = math.inf,
) -> list[Estimate]:
    """The result of ``estimate`` for several directions, from the same normals.

    Drawing normals takes most of the time, so the directions share them. Each estimate has the
    given failure probability; the estimates are dependent, which a sum of failure probabilities
    allows. If an upper bound is very likely to end above ``wanted``, the draws end early, and the
    returned upper bound is above ``wanted``.
    """
    tilts = [shape.at(bins, sigma, epsilon) for shape in shapes.values()]
    work = [(tilt.values, _STREAMS[each]) for tilt, each in zip(tilts, shapes, strict=True)]
    sums, done = np.zeros((len(tilts), 2)), 0

    def so_far() -> list[Estimate]:
        found: list[Estimate] = []
        for (total, square), tilt, direction in zip(sums.tolist(), tilts, shapes, strict=True):
            mean = total / done
            variance = max(square - done * mean * mean, 0.0) / (done - 1)
            error = math.sqrt(variance / done)
            found.append(Estimate(mean, error, failure_probability, done, tilt.largest, direction))
        return found

    with closing(_in_blocks(bins, work, samples, seed, normals)) as blocks:
        for count, more in blocks:
            sums, done = sums + more, done + count
            if progress is not None:
                progress(done, samples)
            if wanted < math.inf and _FEWEST_PART * samples <= done < samples:
                found = so_far()
                if any(_hopeless(each, samples, wanted) for each in found):
                    return found
    return so_far()


def _hopeless(found: Estimate, samples: int, wanted: float) -> bool:
    """Whether all draws would very likely not certify ``wanted``, and those so far do not."""
    less = replace(found, mean=max(found.mean - _HOPELESS * found.standard_error, 0.0))
    return min(less.upper_with(samples), found.upper) > wanted


def add_bound(bins: Bins, sigma: float, epsilon: float) -> float:
    """The upper bound Φ(-(ε - d̄/2)σ/‖m̄‖) of δ_add(ε), with no random draws."""
    from scipy.special import ndtr

    margin = epsilon - float(np.mean(bins.squares)) / (2.0 * sigma**2)
    return float(ndtr(-margin * sigma / math.sqrt(bins.mean_square)))


def best_shape(
    bins: Bins,
    sigma: float,
    epsilon: float,
    direction: Direction,
    most_triples: int = few_folds.MOST_TRIPLES,
) -> Shape:
    """The proposal with the least W; one for many bins is taken only if its W is clearly less."""
    if direction == "add":
        shift = Shift()
        usual = shift.at(bins, sigma, epsilon).log_largest - _CLEARLY
        low = low_sums.best(bins, sigma, epsilon)
        if low is None or low[0] > usual:
            return shift
        return low[1] if low[1].at(bins, sigma, epsilon).log_largest <= usual else shift
    many = many_folds.best(bins, sigma, epsilon)
    if many is not None and bins.num_bins > _MANY_BINS and many[1].folds > _FEW_FOLDS:
        return many[1]
    few = few_folds.best(bins, sigma, epsilon, most_triples)
    return many[1] if many is not None and many[0] < few.log_largest - _CLEARLY else few.shape


class Shift(NamedTuple):
    """The shift of y along the average of the means, for adding; τ is chosen at each σ and ε."""

    def at(self, bins: Bins, sigma: float, epsilon: float) -> Tilt:
        """The proposal for adding at this noise and ε, with the least W over τ."""
        from scipy.optimize import minimize_scalar

        d = bins.squares / sigma**2
        margin = epsilon - float(np.mean(d)) / 2.0
        spread = bins.mean_square / sigma**2

        def log_largest(log_tau: float) -> float:
            tau = math.exp(log_tau)
            worth = tau * log_tau - (tau + 1.0) * math.log1p(tau)
            return -tau * margin + tau * tau * spread / 2.0 + worth

        found = minimize_scalar(
            log_largest, bounds=_LOG_TAU, method="bounded", options={"xatol": 1e-3}
        )
        tau = math.exp(float(found.x))
        down = tau * bins.inner_with_mean / sigma**2 + d / 2.0

        def values(generator: np.random.Generator, noise: Noise) -> Array:
            lower, result = down.astype(noise.dtype), np.empty(noise.shape[0])
            for rows in chunks(noise):
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

        return Tilt(values, log_largest(math.log(tau)))


class Normals:
    """A cache of the Gaussian inner products of a seed's draws, in float32, for all σ and ε.

    Args:
        most: the draws of the largest estimate; one with fewer draws takes the first of them.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[tuple[int, ...], tuple[Noise, Any]] = {}

    def draw(
        self, bins: Bins, generator: np.random.Generator, count: int, key: tuple[int, ...]
    ) -> Noise:
        """The next draws of a generator, whose state advances as if they had been drawn."""
        if key not in self._kept:
            noise = bins.draw_rounded(generator, count)
            self._kept[key] = noise, generator.bit_generator.state
        noise, generator.bit_generator.state = self._kept[key]
        return noise


def _in_blocks(
    bins: Bins,
    work: list[tuple[Values, int]],
    samples: int,
    seed: tuple[int, ...],
    normals: Normals | None,
) -> Generator[tuple[int, Array], None, None]:
    """For each block: the number of draws, and sums and sums of squares of the integrands.

    Blocks are computed on all cores. ``work`` has the integrands, each with the random stream of
    everything that it draws besides the normals; stream 0 continues that of the normals.
    """
    most = max(1, _BLOCK // bins.num_bins)
    size = min(samples, most)
    counts = [min(size, samples - start) for start in range(0, samples, size)]

    def block(index: int) -> tuple[int, Array]:
        def generator(*stream: int) -> np.random.Generator:
            key = (index, *stream)
            return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))

        first = generator()
        if normals is None:
            noise = bins.draw(first, counts[index])
        else:
            count = max(counts[index], min(most, normals.most - index * most))
            noise = normals.draw(bins, first, count, (*seed, index, count))[: counts[index]]
        found = [values(generator(stream) if stream else first, noise) for values, stream in work]
        return counts[index], np.array([(np.sum(each), np.sum(each * each)) for each in found])

    if len(counts) == 1:  # starting a thread would take longer
        yield block(0)
        return
    with pool() as threads:
        yield from threads.map(block, range(len(counts)))
