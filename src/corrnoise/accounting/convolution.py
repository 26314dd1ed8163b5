r"""Convolutions of masses by Fourier transforms, with bounds of their rounding errors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
_T = TypeVar("_T")

# Of a transform of at most 2^21 numbers, and for each factor 2 of its size.
_TRANSFORM, _STAGE = 1.6e-14, 7.5e-16
# What rounding adds to the masses of a product, relative and for each of its factors, besides the
# transforms: exponents of a tilt of at most 600 have an error of at most 600·2^-53.
FACTOR = 1e-13


class Errors(NamedTuple):
    """Bounds of the rounding errors of masses: the largest, and the root of the sum of squares."""

    largest: float
    norm: float


def rounding(size: int) -> float:
    """The norm of a transform's rounding errors, relative to the norm of the transform: a bound.

    It is log2(size)·6.7·2^-53 for a power of two (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, Theorem 24.2).
    """
    return max(_TRANSFORM, _STAGE * math.log2(size))


def powers(masses: list[tuple[Array, int]], size: int) -> tuple[npt.NDArray[np.complex128], Errors]:
    r"""The transform of a convolution of powers, and the errors of its inverse, in N = 2^m masses.

    A transform f of masses m has an error of root mean square c‖m‖. With A = |f| + c‖m‖√N the error
    of the product Πf_i^{n_i} is at most Σ_i n_i·B_i times that of f_i, B_i = ΠA_j^{n_j}/A_i. An
    error of the inverse is at most the mean of these, for which the inequality of Cauchy and
    Schwarz takes the root mean square of B_i; and by Parseval's theorem the norm of the inverse's
    errors is their root mean square, for which the largest B_i is taken. The error of computing
    powers is relative, and the inverse has that of a transform.
    """
    product, error = np.ones(size // 2 + 1, dtype=complex), rounding(size)
    sizes, norms = list[Array](), list[float]()
    for mass, count in masses:
        transform = np.fft.rfft(mass, size)
        product = product * power(transform, count)
        norms.append(float(np.linalg.norm(mass)))
        sizes.append(np.abs(transform) + error * norms[-1] * math.sqrt(size))
    largest = norm = (sum(count for _, count in masses) + 2.0) * _root_mean_square(product, size)
    for i, (_, times) in enumerate(masses):
        others = np.ones(product.size)
        for j, (_, count) in enumerate(masses):
            others *= sizes[j] ** (count - (i == j))
        largest += times * norms[i] * _root_mean_square(others, size)
        norm += times * norms[i] * float(np.max(others))
    return product, Errors(error * largest, error * norm)


def power(x: npt.NDArray[np.complex128], exponent: int) -> npt.NDArray[np.complex128]:
    """x^exponent by squaring, which takes a third of the time of ``**``.

    The relative error is at most ``exponent`` times that of a product of complex numbers.
    """
    return power_by(operator.mul, x, exponent, np.ones_like(x))


def log_power(multiply: Callable[[Array, Array], Array], coef: Array, exponent: int) -> Array:
    """The coefficients of p(x)^exponent, cut at the degree of p, given those of p: logarithms.

    Args:
        multiply: gives those of a product.
        coef: of p.
        exponent: from 0 on.
    """
    one = np.full_like(coef, -np.inf)
    one[0] = 0.0
    return power_by(multiply, coef, exponent, one)


def power_by(multiply: Callable[[_T, _T], _T], x: _T, exponent: int, one: _T) -> _T:
    """A power by squaring, for any product with this ``one``."""
    result = one
    while exponent:
        if exponent & 1:
            result = multiply(result, x)
        exponent >>= 1
        if exponent:
            x = multiply(x, x)
    return result


def _root_mean_square(x: npt.NDArray[np.number], size: int) -> float:
    """Of a transform of which half is given: an upper bound."""
    return math.sqrt(2.0 * float(np.sum(np.abs(x) ** 2)) / size)


def repeated_sums(law: Array, weight: Array, errors: Errors) -> Array:
    """Upper values of Σ_{j≤i} (i - j)·law_j·weight_j for every i."""

    def twice(x: Array) -> Array:
        return np.append(0.0, np.cumsum(np.cumsum(x[:-1])))

    # (i - j)² ≤ (i - j)(i - j + 1), the coefficients of a sum of such sums, twice.
    with np.errstate(over="ignore"):
        squares = 2.0 * np.cumsum(twice(weight**2))
        error = np.minimum(errors.largest * twice(weight), errors.norm * np.sqrt(squares))
    return twice(law * weight) + error
