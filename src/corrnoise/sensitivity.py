r"""Sensitivity of a strategy C when one example takes part up to k times, at least b steps apart.

    sens(C)² = max over patterns i_0 < i_1 < … with gaps ≥ b, and over vectors ‖x_m‖ ≤ 1, of
               ‖Σ_m C[:, i_m] x_mᵀ‖_F²  ≤  max over patterns of Σ_{l,m} |⟨C[:, i_l], C[:, i_m]⟩|

with equality where the inner products are non-negative. Every function here that returns a
``Sensitivity`` evaluates a proven upper bound and a value that some pattern attains; where the two
agree, the sensitivity is known exactly. All other functions work with squares.

For a Toeplitz C with coefficients c (O(n) or O(k n log n) time, O(n) memory, never n×n):

* *Attained*: the pattern 0, b, 2b, …
* *Majorant*: |c_t| ≤ max_{s≥t} |c_s|, which is non-increasing, and for a non-increasing sequence
  that pattern is the worst (Theorem 2 of Kalinin and Lampert, 2024). It is exact for monotone c.
* *Autocorrelation*: extending each inner product to the most terms that its later column can have
  only increases it, so with T_m = n - mb and g_m(ℓ) = Σ_{t<T_m} |c_t c_{t+ℓ}|,

      sens² ≤ Σ_m g_m(0) + 2 Σ_{l<m} max_{ℓ ≥ (m-l)b} g_m(ℓ).

  It is exact where the autocorrelation, not c itself, decreases at the lags that matter, and for
  every C with at most b bands, whatever its signs: all the maxima are then 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from corrnoise.algebra import toeplitz
from corrnoise.participation import Participation

Array = npt.NDArray[np.float64]

# Upper and attained value count as equal when they differ by no more than float64 rounding.
ROUNDING = 1e-11
# The autocorrelation bound takes one FFT per participation; beyond this many, neighbouring
# participations share the largest of their bounds, which remains valid.
_MOST_TRANSFORMS = 64


@dataclass(frozen=True)
class Sensitivity:
    """A certified sensitivity: the exact value, or a proven upper bound with its gap.

    Attributes:
        value: the number that the noise is scaled to. It is never below the true sensitivity, up
            to float64 rounding (relative error below 1e-11).
        lower: the largest value that a participation pattern was found to attain.
        exact: whether ``value`` is the sensitivity itself (``value == lower`` up to rounding).
    """

    value: float
    lower: float
    exact: bool

    @property
    def gap(self) -> float:
        """The largest possible relative slack of ``value``; 0 where it is exact."""
        return 0.0 if self.exact else 1.0 - self.lower / self.value

    @staticmethod
    def from_squares(upper: float, lower: float) -> Sensitivity:
        """Build from a proven upper bound and an attained value of the square."""
        return Sensitivity(
            value=math.sqrt(max(upper, lower)),
            lower=math.sqrt(lower),
            exact=bool(upper <= lower * (1.0 + 2.0 * ROUNDING)),
        )

    def __repr__(self) -> str:
        if self.exact:
            return f"Sensitivity({self.value:.6g}, exact)"
        return f"Sensitivity({self.value:.6g}, upper bound, gap {100 * self.gap:.3g} %)"


def of_toeplitz(strategy_coef: Array, participation: Participation) -> Sensitivity:
    """The sensitivity of the lower-triangular Toeplitz C with these coefficients.

    The cheap certificate is tried first: O(n) where c is monotone, O(k n log n) otherwise.

    >>> of_toeplitz(np.array([1.0, 0.5, 0.25, 0.125]), Participation(4, 2, 2))
    Sensitivity(1.78973, exact)
    """
    upper = majorant(strategy_coef, participation)
    lower = attained(strategy_coef, participation)
    result = Sensitivity.from_squares(upper, lower)
    if not result.exact:
        upper = min(upper, autocorrelation_bound(strategy_coef, participation))
        lower = max(lower, _attained_by_search(strategy_coef, participation))
        result = Sensitivity.from_squares(upper, lower)
    return result


def attained(strategy_coef: Array, participation: Participation) -> float:
    """‖Cπ‖² of the pattern π = 0, b, 2b, …, in O(n)."""
    return _square(_comb(strategy_coef, participation))


def attained_gradient(strategy_coef: Array, participation: Participation) -> tuple[float, Array]:
    """``attained`` and its gradient with respect to the coefficients, in O(n)."""
    total = _comb(strategy_coef, participation)
    return _square(total), 2.0 * _comb(total[::-1], participation)[::-1]


def majorant(strategy_coef: Array, participation: Participation) -> float:
    """An upper bound of sens², in O(n): ``attained`` of the least decreasing majorant of |c|."""
    largest = np.maximum.accumulate(np.abs(strategy_coef[::-1]))[::-1]
    return attained(largest, participation)


def autocorrelation(
    strategy_coef: Array, participation: Participation, smoothing: float = 0.0
) -> tuple[float, Array]:
    """The autocorrelation bound of sens² and a (sub)gradient of it, in O(k n log n).

    Args:
        strategy_coef: c, length n.
        participation: n, b, k.
        smoothing: h ≥ 0; |c| is replaced by sqrt(c² + h²), a smooth and larger function, so the
            result remains an upper bound. Optimisers use it.

    Returns:
        The bound and its gradient with respect to c.
    """
    n = participation.num_steps
    size = np.sqrt(strategy_coef**2 + smoothing**2)
    length = toeplitz.fast_length(2 * n)
    whole = np.fft.rfft(size, length)
    bound, gradient, later = 0.0, np.zeros(n), np.zeros_like(whole)
    for group in _groups(size, whole, length, participation):
        bound += group.total
        spectrum = np.fft.rfft(np.bincount(group.lags, group.counts, n), length)
        gradient[: group.terms] += np.fft.irfft(np.conj(spectrum) * whole, length)[: group.terms]
        later += spectrum * group.head
    gradient += np.fft.irfft(later, length)[:n]
    slope = np.divide(strategy_coef, size, out=np.zeros(n), where=size > 0)
    return bound, gradient * slope


def autocorrelation_bound(strategy_coef: Array, participation: Participation) -> float:
    """The bound of ``autocorrelation`` without its gradient: two of five FFTs for each m."""
    size = np.abs(strategy_coef)
    length = toeplitz.fast_length(2 * participation.num_steps)
    whole = np.fft.rfft(size, length)
    return sum(group.total for group in _groups(size, whole, length, participation))


class _Group(NamedTuple):
    """The contribution of some values of m to the autocorrelation bound: Σ counts·g[lags]."""

    terms: int
    head: npt.NDArray[np.complex128]
    lags: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    total: float


def _groups(
    size: Array, whole: npt.NDArray[np.complex128], length: int, participation: Participation
) -> Iterator[_Group]:
    """The parts of the bound for ``size`` = |c|; ``whole`` is the FFT of |c| of this length."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    for group in np.array_split(np.arange(k), min(k, _MOST_TRANSFORMS)):
        # All m of a group use the sum of the group's first m, which has the most terms.
        terms = n - int(group[0]) * b
        head = np.fft.rfft(size[:terms], length) if terms < n else whole
        g = np.fft.irfft(np.conj(head) * whole, length)[:n]
        g[0] = _square(size[:terms])
        # Each j has one lag of at least jb in every m ≥ j of the group, for (l, m) and (m, l).
        last = int(group[-1])
        lags = np.concatenate([[0], _largest_after(g, b, last)])
        counts = group.size - np.searchsorted(group, np.arange(last + 1))
        counts[1:] *= 2
        yield _Group(terms, head, lags, counts, float(counts @ g[lags]))


def of_matrix(strategy: Array, participation: Participation) -> Sensitivity:
    """The sensitivity of any n×n strategy matrix, in O(n² k) time after its Gram matrix.

    Each pattern's sum Σ_{l,m} |G| is at most Σ_m h(i_m), where h(i) is the largest Σ_j |G_ij| that
    a pattern through i can collect; both maxima are found by dynamic programming. The result is
    exact where C has at most b bands, since h is then the squared column norm.
    """
    gram = strategy.T @ strategy
    size = np.abs(gram)
    n, b = participation.num_steps, participation.min_sep
    apart = np.abs(np.subtract.outer(np.arange(n), np.arange(n))) >= b
    through = np.zeros((n + 1, n))
    for _ in range(participation.max_participations - 1):
        through = _one_more(through, np.where(apart, size, 0.0), b)
    weight = np.diag(size) + through[n]
    upper, pattern = heaviest_pattern(weight, participation)
    return Sensitivity.from_squares(upper, _signed_square(gram[np.ix_(pattern, pattern)]))


def heaviest_pattern(
    weight: Array, participation: Participation
) -> tuple[float, npt.NDArray[np.int64]]:
    """The largest total of non-negative weights over patterns, and its pattern, in O(nk)."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    table = [np.zeros(n + 1)]
    for _ in range(k):
        table.append(_one_more(table[-1], weight, b))
    pattern: list[int] = []
    i, j = n, k
    while i > 0 and j > 0:
        if table[j][i] == table[j][i - 1]:
            i -= 1
        else:
            pattern.append(i - 1)
            i, j = max(i - b, 0), j - 1
    chosen = np.array(pattern[::-1], dtype=np.int64)
    return float(weight[chosen].sum()), chosen


def _one_more(table: Array, weights: Array, min_sep: int) -> Array:
    """The table of the largest totals in the first i steps, with one more participation allowed."""
    before = table[np.maximum(np.arange(1, len(table)) - min_sep, 0)]
    totals = np.zeros_like(table)
    totals[1:] = np.maximum.accumulate(weights + before, axis=0)
    return totals


def _attained_by_search(strategy_coef: Array, participation: Participation) -> float:
    """The largest squared norm over a few evenly spaced patterns, with greedily chosen signs."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    if k > _MOST_TRANSFORMS:
        return 0.0
    best = 0.0
    lags = toeplitz.lag_products(strategy_coef, strategy_coef, n)
    farthest = (n - 1) // (k - 1) if k > 1 else b
    wide = b + int(np.argmax(np.abs(lags[b : farthest + 1]))) if farthest > b else b
    for gap in {b, wide}:
        total = np.zeros(n)
        for m in range(k):
            column = np.zeros(n)
            column[m * gap :] = strategy_coef[: n - m * gap]
            total += column if toeplitz.dot(column, total) >= 0 else -column
        best = max(best, _square(total))
    return best


def _largest_after(g: Array, min_sep: int, last: int) -> npt.NDArray[np.int64]:
    """For j = 1, …, last the lag ℓ ≥ jb where g is largest."""
    rows = -(-g.size // min_sep)
    table = np.full(rows * min_sep, -np.inf)
    table[: g.size] = g
    table = table.reshape(rows, min_sep)
    column = np.argmax(table, axis=1)
    peak = table[np.arange(rows), column]
    suffix = np.maximum.accumulate(peak[::-1])[::-1]
    row = np.minimum.accumulate(np.where(peak == suffix, np.arange(rows), rows)[::-1])[::-1]
    best = row * min_sep + column[row]
    return best[1 : last + 1].astype(np.int64)


def _signed_square(gram: Array) -> float:
    """A large value of xᵀGx for a vector x of signs, which are chosen greedily."""
    signs = np.ones(gram.shape[0])
    for m in range(1, gram.shape[0]):
        signs[m] = 1.0 if gram[m, :m] @ signs[:m] >= 0 else -1.0
    return float(signs @ gram @ signs)


def _comb(x: Array, participation: Participation) -> Array:
    """Σ_{j<k} of ``x`` shifted by jb: its series times 1 + x^b + … + x^{(k-1)b}, in O(n)."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    rows = -(-n // b)
    total = np.zeros(rows * b)
    total[:n] = x
    total = np.cumsum(total.reshape(rows, b), axis=0)
    if k < rows:
        total[k:] -= total[:-k].copy()
    return total.reshape(-1)[:n]


def _square(x: Array) -> float:
    return toeplitz.dot(x, x)
