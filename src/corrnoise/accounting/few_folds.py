r"""Importance sampling for removing an example, with few folds and a bounded weight.

For a number of folds f and θ > 0 let τ = fθ, and draw y from the density proportional to
(mean_j e^{θx_j})^f under Q. Expanding the power gives a mixture over f-tuples of bins of
N(θ(m_{j_1} + … + m_{j_f}), σ²I), in which a tuple has the weight

    Π_a exp((θ²-θ)d_{j_a}/2) · Π_{a<c} exp(θ²⟨m_{j_a}, m_{j_c}⟩/σ²),    d_j = ‖m_j‖²/σ²,

and Z, b^{-f} times the sum of all weights, is the normalising constant. By the power mean
inequality, mean_j e^{θx_j} ≥ e^{θL}·min(1, b^{θ-1}), so the integrand, including its weight
Z·e^L/(mean_j e^{θx_j})^f, is at most

    Z·max(1, b^{(1-θ)f})·e^{-(τ-1)L} (1 - e^{ε-L})_+
      ≤  W = Z·max(1, b^{(1-θ)f})·e^{-(τ-1)ε} (τ-1)^{τ-1}/τ^τ

and its second moment is at most W·δ. So the relative error after N draws is about √(W/(δN)). With
θ = 1, W is the bound on δ that the Rényi divergence of order f gives. f and θ are chosen for the
least W, with f up to 3 where b is small. (f = 1 alone leaves a slack of up to
b^{τ-1}.) With many bins and a small ε, ``many_folds`` has a smaller W.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corrnoise.accounting.bins import Bins, Indices
from corrnoise.accounting.proposals import Noise, Tilt, chunks, log_worth

Array = npt.NDArray[np.float64]

# Triples of bins, which take b³ operations, are used up to this many bins.
MOST_TRIPLES = 400
# When θ is chosen, about this many bins represent all as the first bin of a tuple.
_ROWS = 60
# Rows of weights from which bins are chosen at once; they fit into a cache.
_ROWS_AT_ONCE = 256


class FewFolds(NamedTuple):
    """The number of folds f, at most 3, and θ."""

    folds: int
    theta: float

    def at(self, bins: Bins, sigma: float, epsilon: float) -> Tilt:
        """The proposal for removing at this noise and ε."""
        theta, folds = self.theta, self.folds
        half = bins.squares / (2.0 * sigma**2)
        chosen = Tuples(bins, sigma, epsilon, theta, folds)

        def values(generator: np.random.Generator, noise: Noise) -> Array:
            scaled = bins.scaled(theta / sigma**2, noise.dtype)
            down, bins_of = half.astype(noise.dtype), chosen.draw(generator, noise.shape[0])
            result = np.empty(noise.shape[0])
            for rows in chunks(noise):
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

        return Tilt(values, chosen.log_largest)


def best(bins: Bins, sigma: float, epsilon: float, most_triples: int = MOST_TRIPLES) -> Tuples:
    """The distribution of tuples with the least W, over the number of folds and θ."""
    folds = (1, 2, 3) if bins.num_bins <= most_triples else (1, 2)
    found = (_best(bins, sigma, epsilon, each) for each in folds)
    return min(found, key=lambda t: t.log_largest)


def _best(bins: Bins, sigma: float, epsilon: float, folds: int) -> Tuples:
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

    With a ``stride`` above 1 only every stride-th bin is the first of a tuple: this gives about the
    same Z and W, for the choice of θ. If all bins are alike, the first bin of a pair is bin 0, and
    the pair is shifted by a uniform number of bins.
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
        self.theta, self.folds, self.num_bins = theta, folds, bins.num_bins
        self.alike = bins.kinds == 1 and folds == 2
        d, b = bins.squares / sigma**2, bins.num_bins
        single = (theta * theta - theta) * d / 2.0
        if folds == 1:
            from scipy.special import logsumexp  # deferred, like all of SciPy

            log_sum = float(logsumexp(single))
            self.first = np.cumsum(np.exp(single - log_sum))
        else:
            if self.alike:
                stride = b
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
            + float(log_worth(tau, epsilon))
        )

    @property
    def shape(self) -> FewFolds:
        """The number of folds and θ."""
        return FewFolds(self.folds, self.theta)

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
        if self.alike:
            first = generator.integers(self.num_bins, size=count)
            return [(each + first) % self.num_bins for each in chosen]
        return chosen


def _choose(parts: Array, totals: Callable[[slice], Array]) -> Indices:
    """For each row the first column whose cumulative weight reaches this part of the row's total.

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
