"""The protocol of every factorization A = BC: its sensitivity, its error, and how it is run."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.accounting.bins import Bins
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import errors
from corrnoise.mechanisms.errors import ErrorKind
from corrnoise.participation import Participation
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]

# The names that are accepted from JSON; a name may become that of a folder.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
# The largest entry of C⁻¹ that is accepted from JSON, as the noise runs in float32.
_LARGEST = 1e30


@dataclass(frozen=True)
class Optimization:
    """How the coefficients of an optimised mechanism were found.

    Attributes:
        converged: whether the optimiser met its tolerance; if not, the mechanism is still valid,
            its sensitivity still certified, and its error no larger than at the start.
        message: the message of the optimiser.
        evaluations: the number of evaluations of objective and gradient.
        start: the certified error at the start.
        final: the certified error of the result, never above ``start``.
        participation: the participation that it was optimised for.
    """

    converged: bool
    message: str
    evaluations: int
    start: float
    final: float
    participation: Participation

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Optimization:
        """The inverse of ``dataclasses.asdict``; raises a ``ValueError`` that names what is wrong.

        The record is for information; no guarantee depends on it.
        """
        names = Optimization.__dataclass_fields__
        given = checks.fields("optimization", data, names)
        return Optimization(
            converged=checks.truth("converged", given["converged"]),
            message=checks.text("message", given["message"]),
            evaluations=checks.integer("evaluations", given["evaluations"], 0),
            start=checks.number("start", given["start"], 0.0),
            final=checks.number("final", given["final"], 0.0),
            participation=Participation.from_dict(given["participation"]),
        )


@dataclass(frozen=True)
class Mechanism(ABC):
    """A factorization A = BC of a workload into lower-triangular n×n matrices B and C.

    A run adds row i of C⁻¹z to the gradient of step i, with z independent normals of standard
    deviation σ times the clip norm. Its iterates then have the noise Bz. ``sensitivity`` of C gives
    the privacy, and B the error. Every family returns a ``ToeplitzMechanism``, or a
    ``DenseMechanism`` for small n; other code need not know which one it has.

    Attributes:
        name: the name of its family.
        workload: A.

    >>> import corrnoise as cn
    >>> part = cn.Participation(num_steps=100, min_sep=25, max_participations=4)
    >>> m = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4)
    >>> m.sensitivity(part), round(m.rmse(part), 2), cn.Mechanism.from_json(m.to_json()) == m
    (Sensitivity(2.5496, exact), 6.26, True)
    """

    name: str
    workload: Workload

    # Whether C is a Toeplitz matrix.
    toeplitz: ClassVar[bool] = False
    _kinds: ClassVar[dict[str, type[Mechanism]]] = {}

    def __init_subclass__(cls, *, kind: str) -> None:
        super().__init_subclass__()
        cls._kind = kind
        Mechanism._kinds[kind] = cls

    _kind: ClassVar[str]

    @property
    def num_steps(self) -> int:
        """Number of steps, n."""
        return self.workload.num_steps

    # Sensitivity and error.

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C, exact or a certified upper bound; the result says which.

        It is cached for each participation.
        """
        participation.check_steps(self.num_steps, "mechanism")
        if participation not in self._sensitivities:
            self._sensitivities[participation] = self.certify(participation)
        return self._sensitivities[participation]

    @cached_property
    def _sensitivities(self) -> dict[Participation, Sensitivity]:
        return {}

    @abstractmethod
    def certify(self, participation: Participation) -> Sensitivity:
        """Compute the sensitivity of C; the participation must have the steps of the mechanism."""

    @cached_property
    @abstractmethod
    def step_squares(self) -> Array:
        """‖B[i, :]‖² of each step i; length n."""

    @property
    def decoder_rms(self) -> float:
        """‖B‖_F/√n: the root mean squared error per unit of the noise multiplier."""
        return math.sqrt(errors.reduce_squares(self.step_squares, "mean"))

    @property
    def decoder_norms(self) -> Array:
        """‖B[i, :]‖ of each step i: its error per unit of the noise multiplier; length n."""
        return np.sqrt(self.step_squares)

    def rmse(self, participation: Participation, over: ErrorKind = "mean") -> float:
        """The paper's E(B, C): sens(C)·‖B‖_F/√n, with the certified sensitivity.

        It is the error if the standard deviation of the noise equals the sensitivity. The error at
        the noise of a budget is ``Calibration.error``.

        Args:
            participation: n, b, k.
            over: "mean" over the steps, the "last" step, or the "max" of them.
        """
        square = errors.reduce_squares(self.step_squares, errors.check_kind(over))
        return self.sensitivity(participation).value * math.sqrt(square)

    def rmse_per_step(self, participation: Participation) -> Array:
        """The root of the expected squared error of each step, scaled as in ``rmse``; length n."""
        return self.sensitivity(participation).value * self.decoder_norms

    @property
    @abstractmethod
    def decoder_column(self) -> Array:
        """The first column of B: what remains of the first step's noise at each step; length n."""

    # The strategy matrix, for accountants.

    @property
    @abstractmethod
    def strategy_bands(self) -> int:
        """The number of bands of C, its diagonal counted; n where it is not banded."""

    @property
    @abstractmethod
    def least_entry(self) -> float:
        """The smallest entry of C, divided by the largest absolute value of an entry."""

    @property
    @abstractmethod
    def column_norm(self) -> float:
        """The largest norm of a column of C."""

    @abstractmethod
    def bins(self, num_bins: int) -> Bins:
        """The means m_j = Σ_i C[:, j+ib] of balls-in-bins; entries of C below 0 count as 0."""

    # The noising matrix, for the noise backends.

    @property
    @abstractmethod
    def noising_bands(self) -> int:
        """The number of bands of C⁻¹, its diagonal counted; n where it is not banded."""

    @property
    @abstractmethod
    def recursive(self) -> bool:
        """Whether computing C⁻¹z needs earlier outputs, and not only past values of z."""

    @property
    def num_buffers(self) -> int:
        """The number of past values that the recursion of a series C⁻¹ needs; 0 without one."""
        return 0

    @property
    def independent(self) -> bool:
        """Whether the noise of each step is independent of the others: DP-SGD."""
        return self.noising_bands == 1

    @property
    @abstractmethod
    def largest_noising_entry(self) -> float:
        """The largest absolute value of an entry of C⁻¹."""

    @abstractmethod
    def noising_row(self, step: int) -> Array:
        """Row ``step`` of C⁻¹ up to its diagonal, from its first entry that can differ from 0."""

    @abstractmethod
    def noising_matrix(self, size: int) -> Array:
        """The first ``size`` rows and columns of C⁻¹."""

    @abstractmethod
    def recursion(self, step: int) -> Rational:
        """The series N/D that step ``step`` of C⁻¹z is computed with."""

    @abstractmethod
    def correlate(self, z: Array) -> Array:
        """C⁻¹z for all n rows of z at once."""

    @abstractmethod
    def in_float32(self) -> Mechanism:
        """The mechanism that is run: with the float32 coefficients that the noise uses.

        Near a pole or zero at 1 the rounding to float32 changes the sensitivity considerably, so
        the noise must be calibrated for this mechanism. A second call changes nothing.
        """

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits of a hash of the coefficients of C⁻¹."""

    # Shorter runs, and conversion to plain values.

    @abstractmethod
    def first(self, num_steps: int) -> Mechanism:
        """The same mechanism, stopped after ``num_steps`` steps."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """The data of this kind of mechanism besides its name and workload, as plain values."""

    @classmethod
    @abstractmethod
    def from_fields(cls, name: str, workload: Workload, fields: Mapping[str, Any]) -> Mechanism:
        """The inverse of ``fields``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``from_dict`` restores every coefficient to the last bit."""
        return {
            "kind": self._kind,
            "name": self.name,
            "workload": self.workload.to_dict(),
            **self.fields(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Mechanism:
        """The inverse of ``to_dict``, for every kind of mechanism.

        Raises:
            ValueError: a field is missing, unknown or wrong, or C, C⁻¹ or B = AC⁻¹ is beyond the
                range of floats.
        """
        common = ("kind", "name", "workload")
        fields = checks.fields("mechanism", data, common, data)
        kind, name, workload = (fields.pop(each) for each in common)
        kind = checks.choice("kind of a mechanism", kind, tuple(Mechanism._kinds))
        if not _NAME.fullmatch(checks.text("name of a mechanism", name)):
            raise ValueError(
                "name of a mechanism must be letters, digits, - and _, got " + checks.quoted(name)
            )
        found = Mechanism._kinds[kind].from_fields(name, Workload.from_dict(workload), fields)
        found.check_range()
        return found

    def check_range(self) -> None:
        """Raise a ``ValueError`` unless the noise can be run and its error computed in floats."""
        with np.errstate(all="ignore"):
            try:
                largest = self.largest_noising_entry
                norms = (self.column_norm, self.in_float32().column_norm)
                sizes = (largest, *norms, self.decoder_rms)
            except ArithmeticError as problem:
                raise ValueError(str(problem)) from None
        if not all(0.0 < size < math.inf for size in sizes) or largest > _LARGEST:
            raise ValueError(
                f"mechanism must have coefficients within the range of floats, got {self!r} whose "
                f"C⁻¹ has entries of {largest:g}"
            )

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> Mechanism:
        """The inverse of ``to_json``."""
        return Mechanism.from_dict(checks.parsed("mechanism", text))


def optimization_fields(found: Optimization | None) -> dict[str, Any] | None:
    """An optimization as plain values."""
    return None if found is None else asdict(found)
