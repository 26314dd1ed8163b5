r"""A bound on balls-in-bins from moments of the likelihood ratio, with no random draws.

**Removing, low orders.** With E_jl = exp(⟨m_j, m_l⟩/σ²) the moments

    E_Q[(P/Q)^α] = b^{-α} Σ_{j_1…j_α} Π_{a<c} E_{j_a j_c}

are exact for α = 2, 3 and 4 in O(b²), O(b³) and O(b⁴); the orders that b makes affordable are used.

**Removing, all orders.** Let w ≥ 1 and split the bins by their residue mod w. P is the mixture of
the P_r that use the bins of one residue, and the hockey-stick divergence is jointly convex, so
δ(P‖Q) is at most the average of the δ(P_r‖Q). The t bins of one residue are at least w steps apart.
Their means have inner products of at most g, the largest one at distances of at least w, and
squared norms of at most d = max ‖m_j‖². Every moment

    E_Q[(P_r/Q)^α] = t^{-α} Σ_{j_1…j_α} exp(Σ_{a<c} ⟨m_{j_a}, m_{j_c}⟩/σ²),    α = 2, 3, …

grows with each inner product, so with n_j the number of times that bin j appears in a tuple

    E_Q[(P_r/Q)^α] ≤ e^{α(α-1)g/(2σ²)}
        · t^{-α} Σ_{n_1+…+n_t=α} α!/Π n_j! · exp(Σ_j n_j(n_j-1)(d-g)/(2σ²)),

which is a power of one polynomial, evaluated exactly. Between integers log E is convex in α, so the
chord is an upper bound. Then δ(P_r‖Q) ≤ E_Q[(P_r/Q)^α] e^{-(α-1)ε} (α-1)^{α-1}/α^α for every α. The
best α and w are used; w = b means no amplification.

**Adding.** The bound is that of ``balls_in_bins.add_bound``.

Both directions are at most the unamplified Gaussian with sensitivity ‖m_0‖.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from corrnoise.accounting import convolution, gaussian
from corrnoise.accounting.balls_in_bins import add_bound
from corrnoise.accounting.bins import Bins
from corrnoise.accounting.proposals import log_worth

Array = npt.NDArray[np.float64]

_LARGEST_ORDER = 64
_MOST_TRIPLES = 1000
_MOST_QUADRUPLES = 200
# For exponents x up to this value e^{-6x} does not underflow.
_LARGEST_EXPONENT = 100.0


def delta(bins: Bins, sigma: float, epsilon: float) -> float:
    """An upper bound of δ(ε) in both directions from the moments of the likelihood ratio.

    O(b⁴) for b up to 200, O(b³) for b up to 1000, O(b²) for more.
    """
    plain = gaussian.delta(epsilon, bins.longest / sigma)
    exact, mixtures = _moments(bins, sigma)
    remove = min(plain, _convert(exact, epsilon) if exact is not None else 1.0)
    for parts in mixtures:
        remove = min(remove, sum(weight * _convert(moments, epsilon) for weight, moments in parts))
    return max(remove, min(plain, add_bound(bins, sigma, epsilon)))


@lru_cache(maxsize=4)
def _moments(bins: Bins, sigma: float) -> tuple[Array | None, list[list[tuple[float, Array]]]]:
    """The exact moments of low orders, and those of mixtures; cached, as ε does not change them."""
    return _exact_orders(bins, sigma), _all_orders(bins, sigma)


def _exact_orders(bins: Bins, sigma: float) -> Array | None:
    """The exact moments of orders 1 to at most 4; ``None`` if they would overflow."""
    b = bins.num_bins
    few = b > _MOST_TRIPLES
    exponent = bins.gram[: bins.kinds if few else b] / sigma**2
    scale = float(np.max(exponent))
    if scale > _LARGEST_EXPONENT:
        return None
    E = np.exp(exponent - scale)
    log_b = math.log(b)
    moments = [0.0, 0.0, math.log(float(np.sum(E)) / len(E)) + scale - log_b]
    if not few:
        moments.append(math.log(float(np.sum(E * (E @ E)))) + 3 * scale - 3 * log_b)
    if b <= _MOST_QUADRUPLES:
        total = 0.0
        for i in range(b):
            both = E[i] * E  # both[j, k] = E_ik E_jk
            total += float(E[i] @ np.sum((both @ E) * both, axis=1))
        moments.append(math.log(total) + 6 * scale - 4 * log_b)
    return np.array(moments)


def _all_orders(bins: Bins, sigma: float) -> list[list[tuple[float, Array]]]:
    """For each distance w the mixtures of its residues, as pairs of weight and moments."""
    b = bins.every_square.size
    lags = bins.every_lag / sigma**2
    beyond = np.maximum.accumulate(np.maximum(lags, 0.0)[::-1])[::-1]
    result: list[list[tuple[float, Array]]] = []
    for window in sorted({*range(1, min(b, 8) + 1), *np.geomspace(1, b, 24).astype(int).tolist()}):
        g = float(beyond[window]) if window < b else 0.0
        few, extra = divmod(b, window)
        # ``extra`` residues have one bin more than the others.
        parts: list[tuple[float, Array]] = []
        for bins_of_residue, residues in ((few, window - extra), (few + 1, extra)):
            if residues:
                moments = log_moments(bins_of_residue, float(lags[0]) - g, g)
                parts.append((residues * bins_of_residue / b, moments))
        result.append(parts)
    return result


def log_moments(num_bins: int, own: float, common: float) -> Array:
    """Log E_Q[(P/Q)^α], α = 0, 1, …, for means of squares own + common, inner products common."""
    orders = np.arange(_LARGEST_ORDER + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(orders[1:]))])
    pairs = orders * (orders - 1) / 2.0
    power = convolution.log_power(_log_multiply, pairs * own - factorials, num_bins)
    return power + factorials - orders * math.log(num_bins) + pairs * common


def _convert(moments: Array, epsilon: float) -> float:
    """The least M_α e^{-(α-1)ε} (α-1)^{α-1}/α^α over α in (1, largest]; chords between integers."""
    largest = moments.size - 1
    orders = np.linspace(1.0, float(largest), 1 + 50 * (largest - 1))[1:]
    logs = np.interp(orders, np.arange(moments.size), moments)
    exponents = logs + log_worth(orders, epsilon)
    return math.exp(min(float(np.min(exponents)), 0.0))


def _log_multiply(left: Array, right: Array) -> Array:
    size = left.size
    terms = np.full((size, size), -np.inf)
    for i in range(size):
        terms[i, i:] = left[i] + right[: size - i]
    return np.logaddexp.reduce(terms, axis=0)
