"""Workloads: what the optimizer does to the gradients, as a lower-triangular Toeplitz matrix A.

    prefix_sum(n)                          A = 1/(1 - x)
    sgd(n, momentum=β, decay=α)            A = 1/((1 - αx)(1 - βx))
    toeplitz(coef)                         any first column with a positive diagonal

The closed forms of the square roots of the SGD workload (the paper's r_k, r̃_k, c_k, c̃_k) are
here too, each computed by a recurrence of two or three terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.algebra import toeplitz as _toeplitz
from corrnoise.algebra.rational import Rational

__all__ = [
    "Workload",
    "prefix_sum",
    "r",
    "r_tilde",
    "sgd",
    "sgd_inverse_sqrt",
    "sgd_sqrt",
    "toeplitz",
]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """A lower-triangular Toeplitz workload: the n×n matrix A with A[i, j] = a_{i-j}.

    A maps the gradients of n steps to the iterates of the optimizer; a mechanism factors A = BC.
    ``prefix_sum``, ``sgd`` and ``toeplitz`` build workloads.

    Attributes:
        num_steps: n.
        series: A(x) = Σ_t a_t x^t.
        decay: α of an SGD workload; ``None`` for any other workload.
        momentum: β of an SGD workload; ``None`` for any other workload.

    >>> sgd(3, momentum=0.5).first(2).coef
    array([1. , 1.5])
    """

    num_steps: int
    series: Rational
    decay: float | None = None
    momentum: float | None = None

    @cached_property
    def coef(self) -> Array:
        """The first column of A, float64, length num_steps."""
        return _frozen(self.series.coef(self.num_steps))

    def first(self, num_steps: int) -> Workload:
        """The same workload with fewer steps, at most its own."""
        n = checks.integer("num_steps", num_steps, 1, self.num_steps)
        return Workload(n, self.series, self.decay, self.momentum)

    def sqrt_coef(self, num_terms: int) -> Array:
        """First ``num_terms`` coefficients of A^{1/2}."""
        if self.decay is None or self.momentum is None:
            return _toeplitz.sqrt(self.coef, num_terms)
        return sgd_sqrt(num_terms, self.decay, self.momentum)

    def inverse_sqrt_coef(self, num_terms: int) -> Array:
        """First ``num_terms`` coefficients of A^{-1/2}."""
        if self.decay is None or self.momentum is None:
            return _toeplitz.inverse_sqrt(self.coef, num_terms)
        return sgd_inverse_sqrt(num_terms, self.decay, self.momentum)

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        if self.decay is None or self.momentum is None:
            return {"num_steps": self.num_steps, "series": self.series.to_dict()}
        return {"num_steps": self.num_steps, "decay": self.decay, "momentum": self.momentum}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Workload:
        """The inverse of ``to_dict``; raises a ``ValueError`` that names what is wrong."""
        given = checks.fields("workload", data, ("num_steps",), ("series", "decay", "momentum"))
        if "series" in given:
            checks.fields("workload", given, ("num_steps", "series"))
            num_steps = checks.steps("num_steps", given["num_steps"])
            return Workload(num_steps, Rational.from_dict(given["series"]))
        checks.fields("workload", given, ("num_steps", "decay", "momentum"))
        return sgd(given["num_steps"], momentum=given["momentum"], decay=given["decay"])

    def __repr__(self) -> str:
        if self.decay is None or self.momentum is None:
            return f"toeplitz(num_steps={self.num_steps})"
        if (self.decay, self.momentum) == (1.0, 0.0):
            return f"prefix_sum({self.num_steps})"
        return f"sgd({self.num_steps}, momentum={self.momentum}, decay={self.decay})"


def prefix_sum(num_steps: int) -> Workload:
    """The prefix sum A(x) = 1/(1 - x), a matrix of ones: SGD with neither momentum nor decay.

    >>> prefix_sum(3).coef
    array([1., 1., 1.])
    """
    return sgd(num_steps)


def sgd(num_steps: int, *, momentum: float = 0.0, decay: float = 1.0) -> Workload:
    """SGD with momentum and weight decay: A(x) = 1/((1 - αx)(1 - βx)), the paper's A_{α,β}.

    Row i of A maps the noisy gradients x̂ to iterate i of m ← β·m + x̂, θ ← α·θ - m, up to the sign
    and for a learning rate of 1. Building it is O(1); its coefficients are computed on first use.

    Args:
        num_steps: n.
        momentum: β in [0, 1].
        decay: α in [0, 1], the factor that the weights keep in one step; 1 is no decay.

    >>> sgd(4, momentum=0.5).coef
    array([1.   , 1.5  , 1.75 , 1.875])
    """
    num_steps = checks.steps("num_steps", num_steps)
    momentum = checks.fraction("momentum", momentum)
    decay = checks.fraction(
        "decay", decay, "decay is the factor that the weights keep in one step; 1 is no decay"
    )
    series = Rational.of(denominator=[[1.0, -rate] for rate in (decay, momentum) if rate > 0])
    return Workload(num_steps, series, decay, momentum)


def toeplitz(coef: npt.ArrayLike) -> Workload:
    """The Toeplitz workload whose first column is ``coef``; n is its length.

    The entries must be finite and the first one, the diagonal, positive.

    >>> toeplitz([1, 0.5, 0.25]).num_steps
    3
    """
    column = checks.coefficients("coef", coef)
    return Workload(column.size, Rational.of(numerator=[column]))


def r(num_terms: int) -> Array:
    """The coefficients r_k = |binom(-1/2, k)| of (1 - x)^{-1/2}, for 0 ≤ k < num_terms, in O(n).

    The recurrence is r_k = (k - 1/2)/k · r_{k-1}.

    >>> r(4)
    array([1.    , 0.5   , 0.375 , 0.3125])
    """
    k = np.arange(1, num_terms)
    return np.concatenate([[1.0], np.cumprod((k - 0.5) / k)])


def r_tilde(num_terms: int) -> Array:
    """The coefficients r̃_k = (-1)^k binom(1/2, k) of (1 - x)^{1/2}, k < num_terms, in O(n).

    The recurrence is r̃_k = (k - 3/2)/k · r̃_{k-1}.

    >>> r_tilde(4)
    array([ 1.    , -0.5   , -0.125 , -0.0625])
    """
    k = np.arange(1, num_terms)
    return np.concatenate([[1.0], np.cumprod((k - 1.5) / k)])


def sgd_sqrt(num_terms: int, decay: float, momentum: float) -> Array:
    """The first coefficients c_k of A_{α,β}^{1/2}, in O(num_terms).

    The recurrence (k+1)·c_{k+1} = (α+β)(k+1/2)·c_k - αβ·k·c_{k-1} follows from the differential
    equation of ((1-αx)(1-βx))^{-1/2}, by comparing coefficients of x^k. c is its dominant solution,
    so running it forward is stable (paper: Theorem 1 of Kalinin and Lampert).

    >>> sgd_sqrt(4, decay=1.0, momentum=0.0)
    array([1.    , 0.5   , 0.375 , 0.3125])
    """
    return _legendre(num_terms, decay, momentum, 0.5)


def sgd_inverse_sqrt(num_terms: int, decay: float, momentum: float) -> Array:
    """The first coefficients c̃_k of A_{α,β}^{-1/2}, in O(num_terms).

    The recurrence is (k+1)·c̃_{k+1} = (α+β)(k-1/2)·c̃_k - αβ(k-2)·c̃_{k-1} (paper: Lemma "Inverse
    Square Root of the Matrix A_{α,β}").

    >>> sgd_inverse_sqrt(4, decay=1.0, momentum=0.0)
    array([ 1.    , -0.5   , -0.125 , -0.0625])
    """
    return _legendre(num_terms, decay, momentum, -0.5)


def _legendre(num_terms: int, decay: float, momentum: float, power: float) -> Array:
    """Coefficients of ((1-αx)(1-βx))^{-power}, for power ±1/2."""
    if 0.0 in (decay, momentum):
        k = np.arange(1, num_terms)
        return np.concatenate([[1.0], np.cumprod((k - 1 + power) / k * max(decay, momentum))])
    total, product = decay + momentum, decay * momentum
    coef = [1.0, total * power]
    for k in range(1, num_terms - 1):
        upper = total * (k + power) * coef[k] - product * (k - 1 + 2 * power) * coef[k - 1]
        coef.append(upper / (k + 1))
    return np.array(coef[:num_terms])


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
