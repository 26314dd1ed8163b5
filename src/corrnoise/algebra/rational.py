"""A power series as a ratio of short polynomials: workloads and mechanisms are built on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.algebra import toeplitz

Array = npt.NDArray[np.float64]

# The most factors of N or D that are read from JSON: each of them is a filter over all steps.
_MOST_FACTORS = 100


@dataclass(frozen=True, eq=False)
class Rational:
    r"""The series N(x)/D(x), with N and D given as products of factors.

    A banded C⁻¹ has one numerator factor of p terms, a banded C one denominator factor; a buffered
    linear Toeplitz mechanism has one factor of two terms per pole and zero. The factors are kept
    apart and filtered one pair at a time, which keeps poles close to 1 accurate in float64.

    Attributes:
        numerator: the factors of N, each a vector with a positive first entry.
        denominator: the factors of D, in the same form.

    >>> half = Rational.of(denominator=[[1.0, -0.5]])
    >>> half.coef(4)
    array([1.   , 0.5  , 0.25 , 0.125])
    >>> (half * half.reciprocal).coef(3)
    array([1., 0., 0.])
    """

    numerator: tuple[Array, ...]
    denominator: tuple[Array, ...]

    @staticmethod
    def of(
        numerator: Iterable[npt.ArrayLike] = (), denominator: Iterable[npt.ArrayLike] = ()
    ) -> Rational:
        """Build a series from factors, which are validated and made read-only."""
        return Rational(
            tuple(checks.coefficients("numerator", f) for f in numerator),
            tuple(checks.coefficients("denominator", f) for f in denominator),
        )

    def apply(self, x: Array) -> Array:
        """The first len(x) coefficients of this series times x: one filter per factor, O(np)."""
        n = x.size
        for factor, divisor in zip_longest(self.numerator, self.denominator):
            if factor is not None:
                x = toeplitz.multiply(x, factor, n)
            if divisor is not None:
                x = toeplitz.divide(x, divisor, n)
        return x

    def coef(self, num_steps: int) -> Array:
        """The first ``num_steps`` coefficients."""
        return self.apply(toeplitz.impulse(num_steps))

    @property
    def reciprocal(self) -> Rational:
        """The reciprocal series D(x)/N(x)."""
        return Rational(self.denominator, self.numerator)

    @property
    def numerator_terms(self) -> int:
        """Number of terms of N."""
        return 1 + sum(f.size - 1 for f in self.numerator)

    @property
    def denominator_terms(self) -> int:
        """Number of terms of D."""
        return 1 + sum(f.size - 1 for f in self.denominator)

    def to_dict(self) -> dict[str, list[list[float]]]:
        """The factors as plain lists, exact to the last bit when written as JSON."""
        return {
            "numerator": [f.tolist() for f in self.numerator],
            "denominator": [f.tolist() for f in self.denominator],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Sequence[Any]]) -> Rational:
        """The inverse of ``to_dict``; raises a ``ValueError`` that names what is wrong."""
        given = checks.fields("a series", data, ("numerator", "denominator"))
        for name in given:
            factors = checks.listed(name, given[name])
            checks.integer(f"the number of factors of {name}", len(factors), 0, _MOST_FACTORS)
            given[name] = [checks.vector(name, factor) for factor in factors]
        return Rational.of(given["numerator"], given["denominator"])

    def __mul__(self, other: Rational) -> Rational:
        return Rational(self.numerator + other.numerator, self.denominator + other.denominator)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rational) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(f.tobytes() for f in self.numerator + self.denominator))
