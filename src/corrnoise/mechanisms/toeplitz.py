"""Toeplitz factorizations, given by their noising series: every family except "dense"."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise import sensitivity as _sensitivity
from corrnoise.accounting.bins import Bins, toeplitz_bins
from corrnoise.algebra import sections, toeplitz
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import errors
from corrnoise.mechanisms.mechanism import Mechanism, Optimization, optimization_fields
from corrnoise.participation import Participation
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ToeplitzMechanism(Mechanism, kind="toeplitz"):
    """A Toeplitz factorization A = BC, given by its noising series C⁻¹(x) = N(x)/D(x).

    Only coefficient vectors of length n are computed, never n×n matrices. With p terms in N and D
    the coefficients of C, C⁻¹ and B take O(np).

    Attributes:
        name: the name of its family.
        workload: A.
        noising: C⁻¹(x), a ratio of short polynomials.
        optimization: how the coefficients were found; ``None`` for closed forms.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.bisr(cn.workloads.prefix_sum(4), num_bands=2)
    >>> m.noising_coef, m.strategy_coef
    (array([ 1. , -0.5,  0. ,  0. ]), array([1.   , 0.5  , 0.25 , 0.125]))
    """

    noising: Rational
    optimization: Optimization | None = None

    toeplitz: ClassVar[bool] = True

    @cached_property
    def noising_coef(self) -> Array:
        """First n coefficients of C⁻¹."""
        return self._finite("C⁻¹", self.noising.coef(self.num_steps))

    @cached_property
    def strategy_coef(self) -> Array:
        """First n coefficients of C."""
        return self._finite("C", self.noising.reciprocal.coef(self.num_steps))

    @cached_property
    def decoder_coef(self) -> Array:
        """First n coefficients of B = AC⁻¹."""
        series = self.noising * self.workload.series
        return self._finite("B", series.coef(self.num_steps))

    def certify(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C, exact or a certified upper bound; the result says which."""
        return _sensitivity.of_toeplitz(self.strategy_coef, participation)

    @cached_property
    def step_squares(self) -> Array:
        """‖B[i, :]‖² of each step i; length n."""
        return errors.step_squares(self.decoder_coef)

    @property
    def decoder_column(self) -> Array:
        """The first column of B."""
        return self.decoder_coef

    @property
    def strategy_bands(self) -> int:
        """The number of bands of C; n where C is not banded."""
        if self.noising.numerator_terms > 1:
            return self.num_steps
        return min(self.num_steps, self.noising.denominator_terms)

    @property
    def noising_bands(self) -> int:
        """The number of bands of C⁻¹; n where C⁻¹ is not banded."""
        return self.num_steps if self.recursive else self._noising_terms

    @property
    def num_buffers(self) -> int:
        """The number of past values that a recursion for C⁻¹ needs; 0 if C⁻¹ is banded."""
        if not self.recursive:
            return 0
        return sum(section.num_past for section in sections.sections(self.noising))

    @property
    def least_entry(self) -> float:
        """The smallest coefficient of C, divided by the largest absolute value of one."""
        return float(np.min(self.strategy_coef) / np.max(np.abs(self.strategy_coef)))

    @property
    def column_norm(self) -> float:
        """The norm of the first column of C, the longest one."""
        return float((self.strategy_coef**2).sum()) ** 0.5

    def bins(self, num_bins: int) -> Bins:
        """The means of balls-in-bins; coefficients of C below 0 count as 0."""
        return toeplitz_bins(np.maximum(self.strategy_coef, 0.0), num_bins)

    @property
    def recursive(self) -> bool:
        """Whether C⁻¹ has a denominator."""
        return self.noising.denominator_terms > 1

    @property
    def largest_noising_entry(self) -> float:
        """The largest absolute value of a coefficient of C⁻¹."""
        return float(np.max(np.abs(self.noising_coef)))

    def noising_row(self, step: int) -> Array:
        """Row ``step`` of C⁻¹: at most p entries where it has p bands, else step + 1."""
        return self.noising_coef[: min(step + 1, self.noising_bands)][::-1]

    def noising_matrix(self, size: int) -> Array:
        """The first ``size`` rows and columns of C⁻¹."""
        return toeplitz.matrix(self.noising_coef[:size])

    def recursion(self, step: int) -> Rational:
        """C⁻¹(x), the same at every step."""
        return self.noising

    def correlate(self, z: Array) -> Array:
        """C⁻¹z, by filter or FFT."""
        return toeplitz.apply(self.noising_coef, z)

    def in_float32(self) -> ToeplitzMechanism:
        """The mechanism that is run, with its coefficients rounded to float32."""
        series = self.noising
        if not self.recursive:  # multiply all factors into one
            series = Rational((self.noising_coef[: self._noising_terms],), ())
        return replace(self, noising=sections.in_float32(series))

    @property
    def fingerprint(self) -> str:
        """16 hex digits of a hash of the coefficients of C⁻¹."""
        parts = [f.tobytes() for f in self.noising.numerator] + [b"/"]
        text = b"|".join(parts + [f.tobytes() for f in self.noising.denominator])
        return hashlib.sha256(text).hexdigest()[:16]

    def first(self, num_steps: int) -> ToeplitzMechanism:
        """The same mechanism, stopped after ``num_steps`` steps."""
        return replace(self, workload=self.workload.first(num_steps))

    def fields(self) -> dict[str, Any]:
        """The series and the record of its optimisation."""
        return {
            "noising": self.noising.to_dict(),
            "optimization": optimization_fields(self.optimization),
        }

    @classmethod
    def from_fields(
        cls, name: str, workload: Workload, fields: Mapping[str, Any]
    ) -> ToeplitzMechanism:
        """The inverse of ``fields``; raises a ``ValueError`` that names what is wrong."""
        given = checks.fields("mechanism", fields, ("noising", "optimization"))
        found = given["optimization"]
        return ToeplitzMechanism(
            name,
            workload,
            Rational.from_dict(given["noising"]),
            None if found is None else Optimization.from_dict(found),
        )

    @property
    def _noising_terms(self) -> int:
        return min(self.num_steps, self.noising.numerator_terms)

    def _finite(self, matrix: str, coef: Array) -> Array:
        # A quarter of the exponent range, so that squares and their sums are finite as well.
        if not np.max(np.abs(coef)) < 1e75:
            raise OverflowError(
                f"the coefficients of {matrix} grow beyond float64 within num_steps="
                f"{self.num_steps} for {self!r}; use another num_bands or mechanism"
            )
        coef.flags.writeable = False
        return coef

    def __repr__(self) -> str:
        size = ""
        if self.noising.numerator_terms > 1 and self.recursive:
            size = f", num_buffers={self.num_buffers}"
        elif (bands := min(self.strategy_bands, self.noising_bands)) < self.num_steps:
            size = f", num_bands={bands}"
        return f"{self.name}({self.workload!r}{size})"
