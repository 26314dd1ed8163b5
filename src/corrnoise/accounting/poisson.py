r"""DP-SGD with Poisson sampling: a composition of steps, with no random draws.

A run has ``count`` steps; each takes an example with probability q and adds Gaussian noise of
standard deviation σ times the sensitivity to one example. With v = 1/σ² and X = e^{√v z - v/2} for
a standard normal z under Q, a step is

    P/Q = S = 1 + q(X - 1),

as the first step of an epoch of random allocation with 1/q bins. Its curves (``epoch``) have the
closed forms of Black and Scholes: for s = 1 + q(y - 1),

    H(s) = q·E[(X - y)_+] = q·(Φ(√v - t) - yΦ(-t)),
    K(s) = q·E[(y - X)_+] = q·(yΦ(t) - Φ(t - √v)),

with t = (log y + v/2)/√v. Steps are composed as in ``composed``.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from corrnoise.accounting import composed, epoch, gaussian
from corrnoise.accounting.convolution import Array

# The distance of nodes, relative to the standard deviation of a step's loss, and the most nodes.
# Chords between nodes add a variance of at most a quarter of the squared distance: 0.03 % of the
# loss's variance.
_SPACING, _MOST_NODES = 1.0 / 32.0, 100_000
# The normal beyond which the mass is negligible, and the δ below which a loss counts as infinite.
_LARGEST_NORMAL, _NEGLIGIBLE = 9.7, 1e-21
# The range of variances 1/σ² without cancellation or overflow.
_LEAST_VARIANCE, _MOST_VARIANCE = 1e-8, 500.0
# The rounding errors of a difference, relative to its terms, and of all other arithmetic.
_CANCELLATION, _ARITHMETIC = 1e-13, 1e-9


def delta_bound(probability: float, sigma: float, count: int, epsilon: float) -> float:
    """An upper bound of δ(ε) of ``count`` steps, tight up to the grids.

    It is never above the δ of a run that takes the example in every step.

    >>> round(delta_bound(1.0, 2.0, 4, 1.0), 4), round(delta_bound(0.2, 2.0, 4, 1.0), 6)
    (0.1269, 2.9e-05)
    """
    most = gaussian.delta(epsilon, math.sqrt(count) / sigma)
    if probability >= 1.0 or not _LEAST_VARIANCE <= sigma**-2 <= _MOST_VARIANCE:
        return most
    step, h = _step(probability, sigma**-2)
    return min(composed.delta([(step, count)], h, epsilon), most)


@lru_cache(maxsize=64)
def _step(probability: float, variance: float) -> tuple[epoch.Pair, float]:
    """A discrete pair that dominates a step, and the distance of its nodes."""
    step = Step(probability, variance)
    h = step.spacing()
    return epoch.pair(step, h), h


class Step:
    """The curves H and K of one step, for q = ``probability`` and v = ``variance``."""

    def __init__(self, probability: float, variance: float) -> None:
        self.q, self.variance, self.root = probability, variance, math.sqrt(variance)
        # The largest loss with mass that is not negligible.
        top = variance / 2.0 + _LARGEST_NORMAL * self.root
        self.largest = math.log1p(probability * math.expm1(top))

    def spacing(self) -> float:
        """A suitable distance h of nodes for both curves."""
        deviation = math.sqrt(math.log1p(self.q**2 * math.expm1(self.variance)))
        return max(_SPACING * deviation, self.largest / _MOST_NODES)

    def calls(self, h: float) -> Array:
        """Upper values of H at s = 1, e^h, e^{2h}, … until they are negligible."""
        from scipy.special import ndtr  # deferred, like all of SciPy, for a quick import

        y = 1.0 + np.expm1(h * np.arange(math.ceil(self.largest / h) + 2)) / self.q
        t = (np.log(y) + self.variance / 2.0) / self.root
        first = ndtr(self.root - t)
        found = np.maximum(first - y * ndtr(-t), 0.0) + _CANCELLATION * first
        found *= self.q * (1.0 + _ARITHMETIC)
        return found[: max(2, int(np.count_nonzero(found > _NEGLIGIBLE)) + 1)]

    def puts(self, h: float) -> Array:
        """Upper values of K at s = 1, e^{-h}, e^{-2h}, … until they are 0, where s < 1 - q."""
        from scipy.special import ndtr

        y = 1.0 + np.expm1(-h * np.arange(math.ceil(-math.log1p(-self.q) / h) + 2)) / self.q
        found = np.zeros(y.size)
        y = y[y > 0.0]
        t = (np.log(y) + self.variance / 2.0) / self.root
        first = y * ndtr(t)
        inside = np.maximum(first - ndtr(t - self.root), 0.0) + _CANCELLATION * first
        found[: y.size] = inside * (self.q * (1.0 + _ARITHMETIC))
        return found
