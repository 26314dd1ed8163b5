"""The means m_j = Σ_i C[:, j+ib] of balls-in-bins, given by their inner products alone."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from corrnoise.algebra import toeplitz
from corrnoise.participation import Participation

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
_Floats = TypeVar("_Floats", npt.NDArray[np.float64], npt.NDArray[np.float32])

# More bins than this are put on a circle or thinned out (see ``toeplitz_bins``).
_MOST = 1000
# More bins than this on a circle are thinned out.
_MOST_ON_CIRCLE = 5000
# The number of bins that remain is a multiple of this, which has many divisors.
_MULTIPLE = 12
# The most that a circle may add to ‖m_j‖² and ‖m̄‖², relative; the noise grows by half of it.
_EXCESS = 0.01
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
        kinds: how many of the first bins represent all: b, or 1 where all bins are alike.
        squares: ‖m_j‖² for every j.
        by_lag: the largest ⟨m_j, m_{j+l}⟩ over j, for every l.
        mean_square: ‖m̄‖² of the average m̄ of the m_j.
        inner_with_mean: ⟨m_j, m̄⟩ for every j.
        every_square: ``squares`` of all bins, before any were left out, without rounding errors.
        every_lag: an upper bound of ``by_lag`` of all bins, without rounding errors.
    """

    def __init__(
        self, gram: Array, every_square: Array | None = None, every_lag: Array | None = None
    ) -> None:
        self.gram = gram
        self.num_bins = self.kinds = len(gram)
        self.squares = np.diag(gram).copy()
        self.by_lag = np.array([np.max(np.diag(gram, lag)) for lag in range(len(gram))])
        self.mean_square = float(np.mean(gram))
        self.inner_with_mean = np.mean(gram, axis=1)
        self._set_every(
            self.squares if every_square is None else every_square,
            self.by_lag if every_lag is None else every_lag,
        )

    def _set_every(self, squares: Array, lags: Array) -> None:
        unit = _ROUNDING * float(np.max(squares))
        self.every_square = np.ceil(squares / unit - 0.5) * unit
        self.every_lag = np.where(lags <= unit, 0.0, lags)

    @cached_property
    def _root(self) -> Array:
        """A root R of the Gram matrix, RᵀR: upper triangular, or symmetric where it is singular.

        Both are unique. Eigenvectors are not unique where eigenvalues repeat: they, and so the
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
    def _rounded_gram(self) -> npt.NDArray[np.float32]:
        return self.gram.astype(np.float32)

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
        """As ``draw``, in float32 and half the time: for estimates, which certify nothing."""
        normals = generator.standard_normal((count, self.num_bins)).astype(np.float32)
        return _product(normals, self._rounded_root)

    def at_most(self, most: int) -> Bins:
        """Fewer bins whose δ is no smaller, if there are more than ``most`` and all are alike."""
        del most
        return self

    def distances(self, wanted: Array) -> list[int]:
        """Usable distances between bins of a pattern, near the wanted ones, in ascending order."""
        return sorted(set(wanted.astype(int).tolist()))

    def inner(self, weights: Any) -> Any:
        """The inner products of Σ_j w_j m_j with every mean, for rows w, dense or sparse."""
        rounded = weights.dtype == np.float32
        return np.asarray(weights @ (self._rounded_gram if rounded else self.gram))

    def scaled(self, factor: float, dtype: Any) -> Any:
        """The Gram matrix times a factor; the caller must not write to it."""
        return (self.gram * factor).astype(dtype, copy=False)


class CircularBins(Bins):
    """Bins that are all alike: ⟨m_j, m_l⟩ depends on l - j mod b alone.

    A draw takes O(b log b), and the Gram matrix is not stored.

    Args:
        by_lag: ⟨m_0, m_l⟩ for every l, with by_lag[l] = by_lag[b-l].
        every_square: ‖m_j‖² of all bins that these represent.
        every_lag: an upper bound of their inner products at every distance.
    """

    def __init__(self, by_lag: Array, every_square: Array, every_lag: Array) -> None:
        from scipy import fft  # deferred, like all of SciPy, for a quick import

        b = by_lag.size
        spectrum: Array = np.asarray(fft.rfft(by_lag)).real
        lack = max(0.0, -float(np.min(spectrum)))
        self._spectrum = spectrum + lack
        self.by_lag = by_lag + np.where(np.arange(b) == 0, lack, 0.0)
        self.num_bins, self.kinds = b, 1
        self.gram = _circular(self.by_lag)
        self.squares = np.full(b, self.by_lag[0])
        self.mean_square = float(np.mean(self.by_lag))
        self.inner_with_mean = np.full(b, self.mean_square)
        self._set_every(every_square, every_lag)

    @property
    def longest(self) -> float:
        """The largest ‖m_j‖ of the bins that these represent."""
        return math.sqrt(float(np.max(self.every_square)))

    @cached_property
    def _scale(self) -> Array:
        # The transform of b independent normals has 2 real parts of variance b/2 at each frequency,
        # but one of variance b where it is real: at 0, and at the last one if b is even.
        scale = np.sqrt(self._spectrum * (self.num_bins / 2.0))
        scale[0] *= math.sqrt(2.0)
        if self.num_bins % 2 == 0:
            scale[-1] *= math.sqrt(2.0)
        return scale

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """As in ``Bins``, by an FFT; imaginary parts at its real frequencies are ignored."""
        from scipy import fft

        normals = generator.standard_normal((count, 2 * self._scale.size)).view(np.complex128)
        normals *= self._scale
        return np.asarray(fft.irfft(normals, self.num_bins), dtype=np.float64)

    def draw_rounded(self, generator: np.random.Generator, count: int) -> npt.NDArray[np.float32]:
        """As in ``Bins``, in float32."""
        from scipy import fft

        shape = (count, 2 * self._scale.size)
        normals = generator.standard_normal(shape).astype(np.float32).view(np.complex64)
        normals *= self._scale.astype(np.float32)
        return np.asarray(fft.irfft(normals, self.num_bins), dtype=np.float32)

    def distances(self, wanted: Array) -> list[int]:
        """As in ``Bins``, but only divisors of the number of bins, so that pattern sums repeat."""
        half = np.arange(1, max(self.num_bins // 2, 1) + 1)
        there = half[self.num_bins % half == 0]
        nearest = np.argmin(np.abs(np.log(there) - np.log(wanted)[:, None]), axis=1)
        return sorted(set(there[nearest].tolist()))

    def at_most(self, most: int) -> Bins:
        """As in ``Bins``: the first t = ⌊b/w⌋, w = 1, 2, …, rounded down, that is at most ``most``.

        If ``most`` is below 1000, it is the first t that is at most 1000. The t bins
        r + ⌊ib/t⌋ mod b, 0 ≤ i < t, are taken. Over all r every bin is taken t times, so P is the
        average of these mixtures, and by symmetry all of them have the same δ. Bins i and i + l of
        them are ⌊lb/t⌋ or ⌈lb/t⌉ apart; the larger inner product is used. If the resulting matrix
        is not positive semidefinite, its diagonal is raised until it is.
        """
        b, most = self.num_bins, max(most, _MOST)
        stride = max(1, b // most)
        while (t := _rounded(b // stride)) > most:
            stride += 1
        if t == b:
            return self
        lags = np.arange(t) * b
        by_lag = np.maximum(self.by_lag[lags // t], self.by_lag[-(-lags // t) % b])
        return CircularBins(by_lag, self.every_square, self.every_lag)

    def inner(self, weights: Any) -> Any:
        """As in ``Bins``, as a product of transforms."""
        from scipy import fft

        products = np.asarray(
            fft.rfft(weights if isinstance(weights, np.ndarray) else weights.toarray())
        )
        products *= self._spectrum.astype(weights.dtype, copy=False)
        return np.asarray(fft.irfft(products, self.num_bins))

    def scaled(self, factor: float, dtype: Any) -> Any:
        """As in ``Bins``, as a view that takes no memory."""
        return _circular((self.by_lag * factor).astype(dtype))


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


def _rounded(number: int) -> int:
    """A number of bins, rounded down to one with many divisors unless it is small."""
    return number - number % _MULTIPLE if number > 10 * _MULTIPLE else number


def _circular(by_lag: Any) -> Any:
    """The matrix of by_lag[(l - j) mod b], as a view of 2b numbers."""
    twice = np.concatenate([by_lag[1:], by_lag])
    return np.lib.stride_tricks.sliding_window_view(twice, by_lag.size)[::-1]


def toeplitz_bins(strategy_coef: Array, num_bins: int, most: int | None = None) -> Bins:
    r"""The bins of a Toeplitz strategy with non-negative coefficients, one per step of an epoch.

    m_0 = C(1 + x^b + x^{2b} + …) =: s, and m_j is s delayed by j and cut at n, so
    ⟨m_j, m_l⟩ = Σ_{u<n-l} s_u s_{u+l-j} for j ≤ l: O(n log n + b²), and no n×b matrix.

    More than ``most`` bins (1000 by default) are put on a circle (``_on_circle``) if that costs
    little, for example if the coefficients of C are small long before step b. Otherwise, for
    example if C changes little from one step to the next, only every w-th bin is kept. P is the
    average over r of the mixtures P_r of the bins r, r+w, r+2w, …, each weighted by its number of
    bins, and divergences are jointly convex.

    * If w divides b, (P_r, Q) is (P_0, Q) with r coordinates dropped and r coordinates of pure
      noise put in front. So δ(P, Q) ≤ δ(P_0, Q), and the same holds for (Q, P): a δ computed from
      the bins 0, w, 2w, … is an upper bound.
    * Otherwise some P_r have m = ⌊b/w⌋ bins and others m+1. A mixture of m+1 bins is the average of
      the m+1 mixtures that leave out one of them. So P is an average of mixtures of m bins. The
      j-th bin of each is at jw or later. Distances are those of 0, w, 2w, …, or w more across the
      bin that is left out; the larger of the two inner products is used. The resulting Gram matrix
      is nowhere smaller than that of any of the mixtures, and δ grows with every entry of it (the
      comparison in ``allocation``). If it is not positive semidefinite, its diagonal is raised
      until it is.
    """
    n, b = strategy_coef.size, num_bins
    s = first_mean(strategy_coef, b)
    stride = -(-b // (most or _MOST))
    lags = np.arange(0, b, stride)
    every_lag = _fitted(toeplitz.lag_products(s, s, min(b, n)), b)
    if stride > 1:
        found = _on_circle(s, b, every_lag)
        if found is not None:
            return found
    # Each row is the previous one, delayed, minus the terms that are cut off at its end.
    ends = _fitted(s[::-1], max(b + stride, n))
    lost = np.stack([ends[lags + i] for i in range(stride)])  # lost[i, j] = s_{n-1-jw-i}
    gram = np.zeros((lags.size, lags.size))
    gram[0] = every_lag[lags]
    for j in range(1, lags.size):
        gram[j, j:] = gram[j - 1, j - 1 : -1] - lost[:, j - 1] @ lost[:, j - 1 : -1]
    if b % stride:
        gram = _with_one_left_out(gram)
    return Bins(gram + np.triu(gram, 1).T, _every_square(s, b), every_lag)


def _every_square(first: Array, num_bins: int) -> Array:
    """‖m_j‖² for every j, from m_0."""
    lost = np.cumsum(_fitted(first[::-1], max(num_bins, first.size))[: num_bins - 1] ** 2)
    return np.maximum(float(first @ first) - np.concatenate([[0.0], lost]), 0.0)


def _on_circle(first: Array, num_bins: int, every_lag: Array) -> Bins | None:
    r"""Bins that are all alike, for m_0 = ``first``; ``None`` if they would add too much to δ.

    Let s_i(q) be entry ib + q of m_0, 0 ≤ q < b: entry q of round i. As C ≥ 0, s_i ≥ s_{i-1}. Entry
    q of round i of m_j is s_i(q - j) where q ≥ j and s_{i-1}(q - j + b) elsewhere, so it is at most
    m'_j = s_i((q - j) mod b). All ⟨m'_j, m'_l⟩ ≥ ⟨m_j, m_l⟩, and they depend on l - j mod b alone.

    More than 5000 of these are thinned out (``CircularBins.at_most``).
    """
    from scipy import fft

    b = num_bins
    # An incomplete last round is filled up from the round before it.
    rounds = np.maximum.accumulate(_in_rounds(first, b), axis=0)
    spectrum = np.sum(np.abs(np.asarray(fft.rfft(rounds))) ** 2, axis=0)
    by_lag = np.maximum(np.asarray(fft.irfft(spectrum, b)), 0.0)
    squares = _every_square(first, b)
    sums = np.cumsum(first)
    sums[b:] -= sums[:-b].copy()  # b·m̄
    costs = by_lag[0] / np.mean(squares), np.sum(by_lag) * b / float(sums @ sums)
    if max(costs) > 1.0 + _EXCESS:
        return None
    return CircularBins(by_lag, squares, every_lag).at_most(_MOST_ON_CIRCLE)


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
    """Why balls-in-bins has no analysis for a strategy; "" if it has one.

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
