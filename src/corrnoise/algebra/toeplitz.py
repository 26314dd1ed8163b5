"""Lower-triangular Toeplitz algebra on coefficient vectors.

A lower-triangular Toeplitz matrix is given by its first column, that is, the first ``num_steps``
coefficients of a power series; the matrix product is the product of the series. No function but
``matrix`` builds an n×n matrix. Vectors shorter than ``num_steps`` are padded with zeros.

Short operands (p terms) use recursions or direct sums in O(np), which keep the relative accuracy
of small tails. Long operands use the FFT in O(n log n), with Newton's iteration for inverse and
roots; the absolute error is a few ulp of the largest entry.
"""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# Above these lengths the FFT is faster. Measured for n from 2^8 to 2^20, where they hardly change.
_LONGEST_FACTOR = 256
_LONGEST_DIVISOR = 96
# How many float64 fit into a cache, and how many entries of a banded system are stored at once.
_CACHED, _SOLVED = 1 << 15, 1 << 20


def impulse(num_steps: int) -> Array:
    """The coefficients of the series 1, which is the identity matrix."""
    one = np.zeros(num_steps)
    one[0] = 1.0
    return one


def dot(left: Array, right: Array) -> float:
    """Σ_t left[t]·right[t], summed pairwise.

    BLAS is avoided: starting its threads for every long vector takes longer than the arithmetic.
    """
    return float(np.sum(left * right))


def multiply(left: Array, right: Array, num_steps: int) -> Array:
    """First ``num_steps`` coefficients of left(x)·right(x).

    >>> multiply(np.array([1.0, 1.0]), np.array([1.0, -1.0]), 4)
    array([ 1.,  0., -1.,  0.])
    """
    left, right = _trim(left[:num_steps]), _trim(right[:num_steps])
    if min(left.size, right.size) <= _LONGEST_FACTOR:
        return _fit(np.convolve(left, right), num_steps)
    size = fast_length(left.size + right.size - 1)
    spectrum = np.fft.rfft(left, size) * np.fft.rfft(right, size)
    return _fit(np.fft.irfft(spectrum, size), num_steps)


def divide(left: Array, right: Array, num_steps: int) -> Array:
    """First ``num_steps`` coefficients of left(x)/right(x); right[0] must not be 0.

    >>> divide(np.array([1.0]), np.array([1.0, -0.5]), 4)
    array([1.   , 0.5  , 0.25 , 0.125])
    """
    right = _trim(right[:num_steps])
    if right.size <= _LONGEST_DIVISOR:
        return _divided(_fit(left, num_steps), right)
    return multiply(left, inverse(right, num_steps), num_steps)


def inverse(coef: Array, num_steps: int) -> Array:
    """First ``num_steps`` coefficients of 1/coef(x); coef[0] must not be 0.

    Newton's iteration h ← h - h·(coef·h - 1) doubles the number of correct coefficients. Only the
    new half of coef·h differs from 1, so each doubling costs four FFTs of 1.5 times the new length.

    >>> inverse(np.array([1.0, -1.0]), 4)
    array([1., 1., 1., 1.])
    """
    coef = _trim(coef[:num_steps])
    if coef.size <= _LONGEST_DIVISOR:
        return divide(np.ones(1), coef, num_steps)
    done = min(num_steps, _LONGEST_DIVISOR)
    result = divide(np.ones(1), coef[:done], done)
    while done < num_steps:
        goal = min(2 * done, num_steps)
        size = fast_length(goal + done)
        spectrum = np.fft.rfft(result, size)
        excess = np.fft.irfft(spectrum * np.fft.rfft(coef[:goal], size), size)[done:goal]
        new = np.fft.irfft(spectrum * np.fft.rfft(excess, size), size)[: goal - done]
        result = np.concatenate([result, -new])
        done = goal
    return result


def inverse_sqrt(coef: Array, num_steps: int) -> Array:
    """First ``num_steps`` coefficients of coef(x)^(-1/2); coef[0] must be positive.

    By Newton's iteration y ← y + y·(1 - coef·y²)/2.

    >>> inverse_sqrt(np.array([1.0, 1.0, 1.0]), 3)
    array([ 1.   , -0.5  , -0.125])
    """
    coef = coef[:num_steps]
    result = np.array([1.0 / np.sqrt(coef[0])])
    while result.size < num_steps:
        done, goal = result.size, min(2 * result.size, num_steps)
        square = multiply(result, result, goal)
        lack = -multiply(coef, square, goal)[done:]
        new = multiply(result, lack, goal - done)
        result = np.concatenate([result, 0.5 * new])
    return result


def sqrt(coef: Array, num_steps: int) -> Array:
    """First ``num_steps`` coefficients of coef(x)^(1/2); coef[0] must be positive.

    >>> sqrt(np.array([1.0, 1.0, 1.0]), 3)
    array([1.   , 0.5  , 0.375])
    """
    return multiply(coef, inverse_sqrt(coef, num_steps), num_steps)


def apply(coef: Array, block: Array) -> Array:
    """Multiply the Toeplitz matrix of ``coef`` with the rows of ``block``, shape (n, ...).

    >>> apply(np.array([1.0, -1.0]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    array([[1., 2.],
           [2., 2.]])
    """
    num_steps = block.shape[0]
    coef = _trim(coef[:num_steps])
    if coef.size <= _LONGEST_FACTOR:
        total = coef[0] * np.asarray(block, dtype=np.float64)
        for delay in range(1, coef.size):
            total[delay:] += coef[delay] * block[:-delay]
        return total
    size = fast_length(coef.size + num_steps - 1)
    result = np.empty_like(block, dtype=np.float64)
    columns, target = block.reshape(num_steps, -1), result.reshape(num_steps, -1)
    spectrum = np.fft.rfft(coef, size)[:, None]
    step = max(1, (1 << 22) // size)  # 32 MiB of columns at a time
    for start in range(0, columns.shape[1], step):
        part = np.fft.rfft(columns[:, start : start + step], size, axis=0)
        target[:, start : start + step] = np.fft.irfft(spectrum * part, size, axis=0)[:num_steps]
    return result


def lag_products(left: Array, right: Array, num_lags: int) -> Array:
    """Σ_t left[t + j]·right[t] for j = 0, …, num_lags - 1; both have the same length."""
    n = left.size
    if num_lags <= _LONGEST_DIVISOR:
        size = _CACHED // n
        if size < 2:
            return np.array([dot(left[j:], right[: n - j]) for j in range(num_lags)])
        # Row j is left[j:] with zeros at its end; as many rows at a time as fit into a cache.
        padded = np.concatenate([left, np.zeros(num_lags - 1)])
        delayed = np.lib.stride_tricks.as_strided(padded, (num_lags, n), padded.strides * 2)
        starts = range(0, num_lags, size)
        return np.concatenate([np.sum(delayed[i : i + size] * right, axis=1) for i in starts])
    size = fast_length(2 * n - 1)
    spectrum = np.fft.rfft(left, size) * np.conj(np.fft.rfft(right, size))
    return np.fft.irfft(spectrum, size)[:num_lags]


def matrix(coef: Array) -> Array:
    """The n×n matrix of a series: for dense linear algebra on small n, and for tests.

    >>> matrix(np.array([1.0, 2.0]))
    array([[1., 0.],
           [2., 1.]])
    """
    steps = np.arange(coef.size)
    lag = np.subtract.outer(steps, steps)
    return np.where(lag >= 0, coef[np.maximum(lag, 0)], 0.0)


def fast_length(least: int) -> int:
    """The smallest length of at least ``least`` for which a real FFT is fast."""
    from scipy.fft import next_fast_len  # deferred, like all of SciPy, for a quick import

    return int(next_fast_len(least, real=True))


def _divided(x: Array, right: Array) -> Array:
    """x(x)/right(x) for a short divisor: a banded triangular system, solved in parts."""
    # Deferred, like all of SciPy. Importing scipy.signal for its lfilter would take a second.
    from scipy.linalg.lapack import dtbtrs

    order, result = right.size - 1, np.empty_like(x)
    size = max(_SOLVED // right.size, right.size)
    bands = np.asfortranarray(np.broadcast_to(right[:, None], (right.size, min(size, x.size))))
    for start in range(0, x.size, size):
        rest = x[start : start + size].copy()
        if start and order:  # the terms of the results before this part
            before = np.convolve(result[start - order : start], right)[order : 2 * order]
            rest[:order] -= before[: rest.size]
        found, _ = dtbtrs(bands[:, : rest.size], rest[:, None], uplo="L")
        result[start : start + size] = found[:, 0]
    return result


def _fit(x: Array, num_steps: int) -> Array:
    if x.size >= num_steps:
        return x[:num_steps]
    return np.concatenate([x, np.zeros(num_steps - x.size)])


def _trim(coef: Array) -> Array:
    used = np.flatnonzero(coef)
    return coef[: used[-1] + 1] if used.size else coef[:1]
