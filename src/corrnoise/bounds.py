r"""Lower bounds on the error of every factorization, and the bounds of the paper's theorems.

**Lower bounds.** Let u be any random participation: a pattern of at most k steps, b apart, with a
unit vector for each step, and M = E[u uᵀ]. Then for every factorization A = BC

    sens(C)² ≥ E‖Cu‖² = ‖C M^{1/2}‖_F²,
    rmse·√n = ‖B‖_F·sens(C) ≥ ‖B‖_F·‖C M^{1/2}‖_F ≥ ‖A M^{1/2}‖_*,

so each choice of u gives a lower bound. Three are evaluated here. The first two are the parts of
the paper's General Multi-Participation Lower Bound; the vectors of different steps may be
orthogonal, which makes the second twice the bound that Lemma "k_b_lower_bound_new" proves with
subsets.

* ``pattern``: u is the pattern 0, b, 2b, … itself: ‖Aπ‖₂/√n.
* ``nuclear``: u has a uniformly random offset and orthogonal vectors: M = I/s, which gives
  ‖A‖_*/√(ns), with s = max(b, ⌈n/k⌉).
* ``correlated``: the same offsets, with vectors correlated like the columns of A with weight t:
  M_t = (1/s)·P∘((1-t)I + tR), with P_ij = 1 where i ≡ j mod s and R the correlation matrix of AᵀA.
  The best of a few t is kept. It includes ``nuclear`` (t = 0), and attains the optimum for b = 1.
  It is computed for small n only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise import sensitivity
from corrnoise.algebra import toeplitz
from corrnoise.participation import Participation
from corrnoise.workloads import Workload, r

__all__ = [
    "LowerBounds",
    "bisr_upper_bound",
    "lower_bound",
    "lower_bounds",
    "nuclear_norm",
    "two_band_bound",
    "two_band_rmse",
]

Array = npt.NDArray[np.float64]

# Up to this n, dense linear algebra takes about a second.
_LARGEST_DENSE = 512


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds on the rmse of every factorization A = BC; ``value`` is the largest of them.

    Each is proven (the module's docstring has the derivation).

    Attributes:
        pattern: ‖Aπ‖₂/√n, with π the indicator of the steps 0, b, 2b, …
        nuclear: ‖A‖_*/√(ns) with s = max(b, ⌈n/k⌉); ``nuclear_norm`` gives ‖A‖_* or a lower bound.
        correlated: the bound with the best t; ``None`` for n above 512.
    """

    pattern: float
    nuclear: float
    correlated: float | None

    @property
    def value(self) -> float:
        """The largest of the bounds."""
        return max(self.pattern, self.nuclear, self.correlated or 0.0)


def lower_bound(workload: Workload, participation: Participation) -> float:
    """A proven lower bound on the rmse of every factorization A = BC of the workload.

    No mechanism has a smaller ``Mechanism.rmse`` (over the mean) for this participation. The value
    is the largest of ``lower_bounds``, in O(n log n), or in O(n³) for n up to 512.

    >>> import corrnoise as cn
    >>> round(cn.lower_bound(cn.workloads.prefix_sum(64), cn.Participation(64, 1, 64)), 4)
    43.1413
    """
    return lower_bounds(workload, participation).value


def lower_bounds(workload: Workload, participation: Participation) -> LowerBounds:
    """Every part of the lower bound, in O(n log n) time, or in O(n³) for n up to 512.

    >>> import corrnoise as cn
    >>> found = lower_bounds(cn.workloads.prefix_sum(64), cn.Participation(64, 1, 64))
    >>> round(found.pattern, 2), round(found.nuclear, 2), round(found.correlated, 2)
    (37.38, 16.32, 43.14)
    """
    participation.check_steps(workload.num_steps, "workload")
    n = workload.num_steps
    spacing = max(participation.min_sep, -(-n // participation.max_participations))
    return LowerBounds(
        pattern=math.sqrt(sensitivity.attained(workload.coef, participation) / n),
        nuclear=nuclear_norm(workload) / math.sqrt(n * spacing),
        correlated=_correlated(workload, spacing) if n <= _LARGEST_DENSE else None,
    )


def nuclear_norm(workload: Workload) -> float:
    """The nuclear norm ‖A‖_* of the n×n workload matrix, or a lower bound of it.

    It is exact for the prefix sum (closed form, O(n)) and for n up to 512 (O(n³)). Otherwise it is
    a proven lower bound in O(n log n).

    The lower bound is tr(UᵀA) ≤ ‖A‖_* for a U with ‖U‖ ≤ 1: the n×n section of a circulant matrix
    with unimodular eigenvalues. The eigenvalues are the phases of A(r·e^{iω}), for the best of a
    few radii r just below 1. With φ the first column of the circulant matrix, the trace is
    Σ_t (n-t) a_t φ_t. It is about 5 % below ‖A‖_* for the prefix sum, and closer
    with decay.

    >>> import corrnoise as cn
    >>> round(nuclear_norm(cn.workloads.prefix_sum(64)), 2)
    130.57
    """
    n, a = workload.num_steps, workload.coef
    if (workload.decay, workload.momentum) == (1.0, 0.0):
        angles = (2.0 * np.arange(1, n + 1) - 1.0) * (math.pi / (4 * n + 2))
        return float(np.sum(0.5 / np.sin(angles)))
    if n <= _LARGEST_DENSE:
        return _nuclear(toeplitz.matrix(a))
    size = toeplitz.fast_length(4 * n)
    weights = np.arange(n, 0, -1) * a
    best = 0.0
    for drop in (0.25, 0.5, 1.0, 2.0, 4.0):
        damped = a * np.exp(np.arange(n) * math.log1p(-min(drop / n, 0.5)))
        spectrum = np.fft.rfft(damped, size)
        length = np.abs(spectrum)
        phase = np.divide(spectrum, length, out=np.zeros_like(spectrum), where=length > 0)
        best = max(best, float(np.sum(weights * np.fft.irfft(phase, size)[:n])))
    return best


def _correlated(workload: Workload, spacing: int) -> float:
    n = workload.num_steps
    A = toeplitz.matrix(workload.coef)
    gram = A.T @ A
    scale = np.sqrt(np.diag(gram))
    steps = np.arange(n)
    together = np.subtract.outer(steps, steps) % spacing == 0
    related = np.where(together, gram / np.outer(scale, scale), 0.0)

    def bound(weight: float) -> float:
        second_moment = (weight * related + (1.0 - weight) * np.eye(n)) / spacing
        values, vectors = np.linalg.eigh(second_moment)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
        return _nuclear(A @ root) / math.sqrt(n)

    return max(bound(float(weight)) for weight in np.linspace(0.0, 1.0, 9))


def _nuclear(matrix: Array) -> float:
    return float(np.sum(np.linalg.svd(matrix, compute_uv=False)))


def bisr_upper_bound(workload: Workload, participation: Participation, num_bands: int) -> float:
    r"""The upper bound on the rmse of BISR with the constants of its proof (Theorem "BISR").

    With α the larger and β < α the smaller of decay and momentum: for α = 1,

        E² ≤ k(1+β)²/(1-β)⁸ · (1 + log p + (n-p)·r_{p-1}²) · (2 + log p + 54 p/b),

    where (n-p)·r_{p-1}² replaces the proof's (n-p)/(πp), which is not an upper bound of it; for
    α < 1, with S = log(1/(1-α²))/(α-β)² ≥ Σ c_t² and ⟨C_l, C_m⟩ ≤ α^{|l-m|b}·S,

        E² ≤ (S + α^{2p}/(1-α²)) · k·S·(1+α^b)/(1-α^b).

    The bound is loose: it proves the rate, not the value. O(p) time.

    Args:
        workload: an SGD workload whose decay and momentum differ.
        participation: n, b, k.
        num_bands: p in [1, n], the bands of C⁻¹.

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> workload = cn.workloads.prefix_sum(1024)
    >>> bound = bisr_upper_bound(workload, part, num_bands=4)
    >>> bool(cn.mechanisms.bisr(workload, num_bands=4).rmse(part) <= bound)
    True
    """
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    p = checks.integer("num_bands", num_bands, 1, n)
    if workload.decay is None or workload.momentum is None:
        raise ValueError(
            "workload must be an SGD workload, got a general Toeplitz one; use Mechanism.rmse"
        )
    alpha = max(workload.decay, workload.momentum)
    beta = min(workload.decay, workload.momentum)
    if alpha == beta:
        raise ValueError(
            f"decay and momentum must differ, got {alpha} for both; use Mechanism.rmse"
        )
    if alpha == 1.0:
        decoder = 1.0 + math.log(p) + (n - p) * float(r(p)[-1]) ** 2
        sens = 2.0 + math.log(p) + 54.0 * p / b
        return math.sqrt(k * decoder * sens) * (1.0 + beta) / (1.0 - beta) ** 4
    squares = -math.log1p(-(alpha**2)) / (alpha - beta) ** 2
    decoder = squares + alpha ** (2 * p) / (1.0 - alpha**2)
    return math.sqrt(decoder * k * squares * (1.0 + alpha**b) / (1.0 - alpha**b))


def two_band_rmse(num_steps: int, rate: float) -> float:
    """The exact rmse of C⁻¹ = 1 - λx for the prefix sum and one participation (k = 1).

    The closed form is

    E² = (1 + (1-λ)²(n-1)/2)·(1-λ^{2n})/(1-λ²) (Lemma "Optimal Band Inversion Error", corrected).

    Args:
        num_steps: n.
        rate: λ in [0, 1].

    >>> round(two_band_rmse(1024, 0.95), 3)
    4.834
    """
    n = checks.integer("num_steps", num_steps, 1)
    rate = checks.fraction("rate", rate)
    decoder = 1.0 + (1.0 - rate) ** 2 * (n - 1) / 2.0
    squares = float(n) if rate == 1.0 else (1.0 - rate ** (2 * n)) / (1.0 - rate**2)
    return math.sqrt(decoder * squares)


def two_band_bound(num_steps: int) -> float:
    """An upper bound of ``two_band_rmse`` at the best λ: √(3/2)·n^{1/4}; it holds at λ² = 1 - 1/√n.

    >>> round(two_band_bound(1024), 3)
    6.928
    """
    n = checks.integer("num_steps", num_steps, 1)
    return math.sqrt(1.5) * n**0.25
