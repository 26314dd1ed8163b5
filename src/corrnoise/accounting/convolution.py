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

# The relative error of a transform of at most 2^21 numbers, and its part for each doubling of size.
_TRANSFORM, _STAGE = 1.6e-14, 7.5e-16
# The relative rounding error of the masses of a product, for each of its factors and besides the
# transforms: exponents of a tilt of at most 600 have an error of at most 600·2^-53.
FACTOR = 1e-13


class Errors(NamedTuple):
    """Bounds on the rounding errors of masses: the largest error, and the Euclidean norm."""

    largest: float
    norm: float


def rounding(size: int) -> float:
    """An upper bound on the norm of a transform's rounding errors, relative to the norm of it.

    It is log2(size)·6.7·2^-53 for a power of two (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, Theorem 24.2).
    """
    return max(_TRANSFORM, _STAGE * math.log2(size))


def powers(masses: list[tuple[Array, int]], size: int) -> tuple[npt.NDArray[np.complex128], Errors]:
    r"""The transform of a convolution of powers, and the errors of its inverse, in N = 2^m masses.

    A transform f of masses m has an error with root mean square c‖m‖. With A = |f| + c‖m‖√N and
    B_i = ΠA_j^{n_j}/A_i, the error of the product Πf_i^{n_i} is at most Σ_i n_i·B_i times the error
    of f_i. The error of an entry of the inverse is at most the mean of these; by the inequality of
    Cauchy and Schwarz it is bounded through the root mean square of B_i. By Parseval's theorem the
    norm of the inverse's errors is their root mean square, bounded through the largest B_i.
    Computing powers adds a relative error, and the inverse adds that of a transform.
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
    """The logarithms of the coefficients of p(x)^exponent, up to the degree of p.

    Args:
        multiply: from the log coefficients of two series to those of their product.
        coef: the logarithms of the coefficients of p.
        exponent: at least 0.
    """
    one = np.full_like(coef, -np.inf)
    one[0] = 0.0
    return power_by(multiply, coef, exponent, one)


def power_by(multiply: Callable[[_T, _T], _T], x: _T, exponent: int, one: _T) -> _T:
    """A power by squaring, for any associative product with the unit ``one``."""
    result = one
    while exponent:
        if exponent & 1:
            result = multiply(result, x)
        exponent >>= 1
        if exponent:
            x = multiply(x, x)
    return result


def _root_mean_square(x: npt.NDArray[np.number], size: int) -> float:
    """An upper bound on a transform's root mean square, from the half that ``rfft`` returns."""
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
