"""The means m_j = Σ_i C[:, j+ib] of balls-in-bins, given by their inner products alone."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from corrnoise.algebra import toeplitz
from corrnoise.participation import Participation

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
_Floats = TypeVar("_Floats", npt.NDArray[np.float64], npt.NDArray[np.float32])

# More bins than this are thinned out (see ``toeplitz_bins``).
_MOST = 1000
# A negative entry up to this size, relative to the largest, is the rounding error of an FFT.
_ROUNDING = 1e-12
# A Cholesky factor whose least pivot is below this part of the largest may be inaccurate.
_LEAST_PIVOT = 1e-3
# A product with a triangular matrix leaves out zeros in so many parts; smaller ones take no less.
_PARTS, _LEAST_PART = 4, 64


class Bins:
    """The b means of balls-in-bins, given by their Gram matrix.

    Attributes:
        gram: ⟨m_j, m_l⟩, b×b.
        num_bins: b.
        squares: ‖m_j‖² for every j.
        by_lag: the largest ⟨m_j, m_{j+l}⟩ over j, for every l.
        mean_square: ‖m̄‖² of the average m̄ of the m_j.
        inner_with_mean: ⟨m_j, m̄⟩ for every j.
        every_square: ``squares`` of all bins, before any were left out, without rounding errors.
        every_lag: ``by_lag`` of all bins, or more, without rounding errors.
    """

    def __init__(
        self, gram: Array, every_square: Array | None = None, every_lag: Array | None = None
    ) -> None:
        self.gram = gram
        self.num_bins = len(gram)
        self.squares = np.diag(gram).copy()
        self.by_lag = np.array([np.max(np.diag(gram, lag)) for lag in range(len(gram))])
        self.mean_square = float(np.mean(gram))
        self.inner_with_mean = np.mean(gram, axis=1)
        squares = self.squares if every_square is None else every_square
        lags = self.by_lag if every_lag is None else every_lag
        unit = _ROUNDING * float(np.max(squares))
        self.every_square = np.ceil(squares / unit - 0.5) * unit
        self.every_lag = np.where(lags <= unit, 0.0, lags)

    @cached_property
    def _root(self) -> Array:
        """A root R of the Gram matrix, RᵀR: upper triangular, or symmetric where it is singular.

        Both are unique. Eigenvectors are not where eigenvalues repeat: they, and with them the
        draws, would differ between processors.
        """
        try:
            lower = np.linalg.cholesky(self.gram)
        except np.linalg.LinAlgError:
            pass
        else:
            pivots = np.diag(lower)
            if float(np.min(pivots)) > _LEAST_PIVOT * float(np.max(pivots)):
                return np.ascontiguousarray(lower.T)
        values, vectors = np.linalg.eigh(self.gram)
        return (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T

    @cached_property
    def _rounded_root(self) -> npt.NDArray[np.float32]:
        return self._root.astype(np.float32)

    @property
    def orthogonal(self) -> bool:
        """Whether different means are orthogonal, as those of DP-SGD are."""
        return not np.any(self.every_lag[1:])

    @property
    def longest(self) -> float:
        """The largest ‖m_j‖: the sensitivity without amplification."""
        return math.sqrt(float(np.max(self.squares)))

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """Draw ⟨m_l, z⟩ for every l, with z standard normal: shape (count, b)."""
        return _product(generator.standard_normal((count, self.num_bins)), self._root)

    def draw_rounded(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
        """The same in float32, in half the time: for estimates, which certify nothing."""
        normals = generator.standard_normal((count, self.num_bins)).astype(np.float32)
        return _product(normals, self._rounded_root)


def _product(rows: _Floats, root: _Floats) -> _Floats:
    """``rows`` times ``root``, without the zeros below the diagonal where it is triangular."""
    size = len(root)
    step = max(-(-size // _PARTS), _LEAST_PART)
    if root[-1, 0] != 0.0:
        return rows @ root
    result = np.empty_like(rows)
    for start in range(0, size, step):
        end = min(start + step, size)
        np.matmul(rows[:, :end], root[:end, start:end], out=result[:, start:end])
    return result


def toeplitz_bins(strategy_coef: Array, num_bins: int) -> Bins:
    r"""The bins of a Toeplitz strategy with non-negative coefficients, one per step of an epoch.

    m_0 = C(1 + x^b + x^{2b} + …) =: s, and m_j is s delayed by j and cut at n, so
    ⟨m_j, m_l⟩ = Σ_{u<n-l} s_u s_{u+l-j} for j ≤ l: O(n log n + b²), and no n×b matrix.

    More than 1000 bins are thinned out to every w-th. P is the average over r of the mixtures P_r
    of the bins r, r+w, r+2w, …, each weighted by its number of bins, and divergences are jointly
    convex.

    * If w divides b, (P_r, Q) is (P_0, Q) with r coordinates dropped and r coordinates of pure
      noise put in front. So δ(P, Q) ≤ δ(P_0, Q), and the same holds for (Q, P): a δ computed from
      the bins 0, w, 2w, … is an upper bound.
    * Otherwise some P_r have m = ⌊b/w⌋ bins and others m+1. A mixture of m+1 bins is the average of
      the m+1 mixtures that leave out one of them, so P is an average of mixtures of m bins whose
      j-th bin is at jw or later, and whose distances are those of 0, w, 2w, … or, across the bin
      that is left out, w more. Where the greater distance has the greater inner product, that one
      is taken. The Gram matrix so made is nowhere smaller than any of theirs, and δ grows with
      every entry of it (the comparison in ``allocation``). If it is not positive semidefinite, its
      diagonal is raised until it is.
    """
    n, b = strategy_coef.size, num_bins
    s = first_mean(strategy_coef, b)
    stride = -(-b // _MOST)
    lags = np.arange(0, b, stride)
    every_lag = _fitted(toeplitz.lag_products(s, s, min(b, n)), b)
    # Each row is the previous one, delayed, minus the terms that fall off the end.
    ends = _fitted(s[::-1], max(b + stride, n))
    lost = np.stack([ends[lags + i] for i in range(stride)])  # lost[i, j] = s_{n-1-jw-i}
    gram = np.zeros((lags.size, lags.size))
    gram[0] = every_lag[lags]
    for j in range(1, lags.size):
        gram[j, j:] = gram[j - 1, j - 1 : -1] - lost[:, j - 1] @ lost[:, j - 1 : -1]
    every_square = every_lag[0] - np.concatenate([[0.0], np.cumsum(ends[: b - 1] ** 2)])
    if b % stride:
        gram = _with_one_left_out(gram)
    return Bins(gram + np.triu(gram, 1).T, np.maximum(every_square, 0.0), every_lag)


def _with_one_left_out(gram: Array) -> Array:
    """The upper triangle of ``toeplitz_bins`` for m bins, from that of m+1."""
    m = len(gram) - 1
    farther = np.zeros((m, m))
    farther[0, :] = gram[0, 1:]
    farther[1:, :] = gram[: m - 1, :m]
    np.fill_diagonal(farther, 0.0)
    result = np.triu(np.maximum(gram[:m, :m], farther))
    if not np.array_equal(result, np.triu(gram[:m, :m])):
        least = float(np.linalg.eigvalsh(result, "U")[0])
        result[np.diag_indices(m)] += max(0.0, -least)
    return result


def objection(least_entry: float, participation: Participation) -> str:
    """Why balls-in-bins has no analysis for a strategy, or "" where it has one.

    Args:
        least_entry: the smallest entry of C, divided by the largest absolute value of an entry.
        participation: n, b, k.
    """
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    if least_entry < -_ROUNDING:
        return f"C has negative entries (down to {least_entry:.3g} of the largest)"
    if k != -(-n // b):
        return f"every bin is used {-(-n // b)} times in {n} steps, but max_participations is {k}"
    return ""


def first_mean(strategy_coef: Array, num_bins: int) -> Array:
    """m_0 of a Toeplitz strategy: C(1 + x^b + x^{2b} + …), cut at n."""
    return np.cumsum(_in_rounds(strategy_coef, num_bins), axis=0).reshape(-1)[: strategy_coef.size]


def first_mean_transposed(slope: Array, num_bins: int) -> Array:
    """Turn a gradient in m_0 into a gradient in the coefficients of C."""
    sums = np.cumsum(_in_rounds(slope, num_bins)[::-1], axis=0)[::-1]
    return sums.reshape(-1)[: slope.size]


def matrix_bins(strategy: Array, num_bins: int) -> Bins:
    """The bins of any non-negative n×n strategy."""
    means = np.stack([np.sum(strategy[:, j::num_bins], axis=1) for j in range(num_bins)])
    return Bins(means @ means.T)


def _in_rounds(x: Array, num_bins: int) -> Array:
    rounds = -(-x.size // num_bins)
    return _fitted(x, rounds * num_bins).reshape(rounds, num_bins)


def _fitted(x: Array, size: int) -> Array:
    return np.concatenate([x, np.zeros(size - x.size)])
