r"""An estimate of the noise that balls-in-bins needs, and its gradient in C, for optimisers.

It certifies nothing.

With the notation of ``balls_in_bins``, y is drawn once as θ(m_{j_1} + … + m_{j_f}) + σz. The tuples
of bins come from the distribution q that suits a first strategy, and z is standard normal. For any
other strategy, with w(j) the weight of a tuple,

    δ ≈ (1/N) Σ_i  w(j_i)/(b^f q(j_i)) · e^{L_i}/(mean_j e^{θx_ij})^f · (1 - e^{ε-L_i})_+ ,

which is unbiased and smooth almost everywhere: it is a function of the inner products of the means
with each other and with the z_i. The cost is O(nbN) in single precision, for two large products:
one with the n×N matrix of the z_i, one for the gradient.

σ solves δ(σ, C) = δ by Newton's method in the logarithms, and its gradient follows from that of δ
by the implicit function theorem. Newton's method begins at the σ that the gradient at the first
strategy predicts.

More than 500 bins are thinned out, as in ``bins``. The noise is infinite for a C with a negative
coefficient, which has no analysis, and for a C so far from the first one that few draws are
effective. Only the removal of an example is considered: adding one is seldom worse.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from corrnoise.accounting import few_folds
from corrnoise.accounting.bins import Bins, first_mean, first_mean_transposed
from corrnoise.participation import Participation

Array = npt.NDArray[np.float64]

_MOST_BINS = 500
# The number of draws is limited so that one product takes about this many operations.
_PRODUCT = 2e9
_NEWTON_STEPS = 30
# Newton's method stops after a step this short: the next one would be about its square.
_SHORT = 1e-4
# A C with fewer effective draws than this fraction of the first C's is too far from it.
_FEWEST = 0.25


@dataclass(frozen=True)
class _Slopes:
    """Log δ and its derivatives with respect to log σ, the Gram matrix, and the products with z.

    ``draws`` is the effective number of draws.
    """

    draws: float
    log_delta: float
    by_log_sigma: float
    by_gram: Array
    by_products: Array


class AmplifiedNoise:
    """Estimates σ² and its gradient for strategies that are near the one that it was built for."""

    def __init__(
        self,
        strategy_coef: Array,
        participation: Participation,
        *,
        epsilon: float,
        delta: float,
        noise_multiplier: float,
        seed: int = 0,
    ) -> None:
        from scipy.sparse import csr_matrix  # deferred, like all of SciPy, for a quick import

        self.participation, self.epsilon, self.delta = participation, epsilon, delta
        n, b = participation.num_steps, participation.min_sep
        self.delays = np.arange(0, b, -(-b // _MOST_BINS))
        draws = int(min(1_000.0, max(500.0, _PRODUCT / (n * self.delays.size))))
        generator = np.random.default_rng(seed)
        means = self._means(strategy_coef)
        gram = means.T @ means
        tuples = few_folds.best(Bins(gram), noise_multiplier, epsilon)
        self.theta, self.folds = tuples.theta, tuples.folds
        self.chosen = tuples.draw(generator, draws)
        self.normals = generator.standard_normal((draws, n)).astype(np.float32)
        # For each fold, the b×N matrix that sums the draws of the same bin.
        b, ones, at = self.delays.size, np.ones(draws), np.arange(draws)
        self.picks = [csr_matrix((ones, (j, at)), (b, draws)) for j in self.chosen]
        # q(j) = w(j)/(b^f Z) for this strategy.
        self.log_base = self._log_weights(gram / noise_multiplier**2) - tuples.log_z
        self.fewest = 0.0
        log_sigma = math.log(noise_multiplier)
        first = self._at(log_sigma, gram, self._products(means))
        self.fewest = _FEWEST * first.draws if first is not None else math.inf
        # The first C, its log σ, and the gradient of log σ there.
        self.first = strategy_coef, log_sigma, np.zeros(n)
        squared, gradient = self(strategy_coef)
        if squared < math.inf:
            slope = gradient / (2.0 * squared)
            self.first = strategy_coef, 0.5 * math.log(squared), slope

    def __call__(self, strategy_coef: Array) -> tuple[float, Array]:
        """The estimated σ² and its gradient in the coefficients of C; σ² is infinite if too far."""
        unknown = math.inf, np.zeros_like(strategy_coef)
        if np.min(strategy_coef) < 0.0:
            return unknown
        means = self._means(strategy_coef)
        gram, products = means.T @ means, self._products(means)
        coef, log_sigma, slope = self.first
        log_sigma += float(slope @ (strategy_coef - coef))
        for _ in range(_NEWTON_STEPS):
            found = self._at(log_sigma, gram, products)
            if found is None:
                return unknown
            change = (math.log(self.delta) - found.log_delta) / found.by_log_sigma
            log_sigma += max(-0.2, min(0.2, change))
            if abs(change) < _SHORT:
                break
        else:
            return unknown
        by_products = found.by_products.astype(self.normals.dtype)
        by_means = self.normals.T @ by_products + means @ (found.by_gram + found.by_gram.T)
        squared = math.exp(2.0 * log_sigma)
        return squared, self._by_coef(by_means) * (-2.0 * squared / found.by_log_sigma)

    def _products(self, means: Array) -> Array:
        """The inner products of each draw of z with the means."""
        return (self.normals @ means.astype(self.normals.dtype)).astype(np.float64)

    def _at(self, log_sigma: float, gram: Array, products: Array) -> _Slopes | None:
        """Log δ and its derivatives; ``None`` where too few draws are effective."""
        sigma, theta, folds, count = math.exp(log_sigma), self.theta, self.folds, len(products)
        scaled = gram / sigma**2
        linear = products / sigma
        shift = sum(scaled[j] for j in self.chosen) * theta
        x = linear + shift - np.diag(scaled) / 2.0
        top = np.max(x, axis=1, keepdims=True)
        share = np.exp(x - top)
        loss = top[:, 0] + np.log(np.mean(share, axis=1))
        share /= np.sum(share, axis=1, keepdims=True)
        tilted = np.exp(theta * (x - top))
        power = theta * top[:, 0] + np.log(np.mean(tilted, axis=1))
        tilted /= np.sum(tilted, axis=1, keepdims=True)
        inside = loss > self.epsilon
        gain = -np.expm1(np.where(inside, self.epsilon - loss, -1.0))
        logs = self._log_weights(scaled) - self.log_base + loss - folds * power + np.log(gain)
        logs = np.where(inside, logs, -np.inf)
        highest = float(np.max(logs))
        if highest == -math.inf:
            return None
        terms = np.exp(logs - highest)
        total = float(np.sum(terms))
        terms /= total
        draws = 1.0 / float(np.sum(terms**2))
        if not draws > self.fewest:
            return None
        # d log term = dw + (1 + (1-gain)/gain)·dL - f·d power; 1 + (1-gain)/gain = 1/gain.
        by_x = (terms / gain)[:, None] * share - (terms * folds * theta)[:, None] * tilted
        b = gram.shape[0]
        by_scaled = np.zeros((b, b))
        for pick in self.picks:
            by_scaled += theta * (pick @ by_x)
        diagonal = -0.5 * np.sum(by_x, axis=0)
        for a, j in enumerate(self.chosen):
            diagonal += (theta**2 - theta) / 2.0 * np.bincount(j, terms, b)
            for k in self.chosen[a + 1 :]:
                by_scaled += theta**2 * np.bincount(j * b + k, terms, b * b).reshape(b, b)
        by_scaled[np.diag_indices(b)] += diagonal
        by_log_sigma = -float(np.sum(by_x * linear)) - 2.0 * float(np.sum(by_scaled * scaled))
        log_delta = highest + math.log(total / count)
        return _Slopes(draws, log_delta, by_log_sigma, by_scaled / sigma**2, by_x / sigma)

    def _log_weights(self, scaled: Array) -> Array:
        """Log w of the chosen tuples, for the Gram matrix over σ²."""
        theta, d = self.theta, np.diag(scaled)
        result = np.zeros(len(self.chosen[0]))
        for a, j in enumerate(self.chosen):
            result += (theta**2 - theta) / 2.0 * d[j]
            for k in self.chosen[a + 1 :]:
                result += theta**2 * scaled[j, k]
        return result

    def _means(self, coef: Array) -> Array:
        """The means m_j of the bins that are used, n×b."""
        n, s = coef.size, first_mean(coef, self.participation.min_sep)
        result = np.zeros((n, self.delays.size))
        for column, delay in enumerate(self.delays):
            result[delay:, column] = s[: n - delay]
        return result

    def _by_coef(self, by_means: Array) -> Array:
        """Apply the transpose of ``_means``."""
        n = len(by_means)
        by_first = np.zeros(n)
        for column, delay in enumerate(self.delays):
            by_first[: n - delay] += by_means[delay:, column]
        return first_mean_transposed(by_first, self.participation.min_sep)
