"""What every factorization A = BC is: a strategy, its inverse, its sensitivity and its error."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import error as _error
from corrnoise import sensitivity as _sensitivity
from corrnoise import toeplitz
from corrnoise.error import ErrorKind
from corrnoise.participation import Participation
from corrnoise.rational import Rational
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Optimization:
    """How the coefficients of an optimised mechanism were found.

    Attributes:
        converged: whether the optimiser met its tolerance; if not, the mechanism is still valid,
            its sensitivity still certified, and its error no larger than at the start.
        message: the optimiser's own words.
        evaluations: how often objective and gradient were computed.
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
        """The inverse of ``dataclasses.asdict``."""
        fields: dict[str, Any] = dict(data)
        fields["participation"] = Participation.from_dict(fields["participation"])
        return Optimization(**fields)


@dataclass(frozen=True)
class _Factorization(ABC):
    """What Toeplitz and dense factorizations share: errors in units of the noise per clip norm."""

    name: str
    workload: Workload

    @property
    def num_steps(self) -> int:
        """Number of steps, n."""
        return self.workload.num_steps

    @cached_property
    @abstractmethod
    def _step_squares(self) -> Array: ...

    @abstractmethod
    def sensitivity(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C: exact or a certified upper bound, and it says which."""

    @property
    def decoder_rms(self) -> float:
        """‖B‖_F/√n: the error for each unit of the noise multiplier."""
        return math.sqrt(_error.reduce_squares(self._step_squares, "mean"))

    @property
    def decoder_norms(self) -> Array:
        """‖B[i, :]‖ of each step i: its error for each unit of the noise multiplier; length n."""
        return np.sqrt(self._step_squares)

    def rmse(self, participation: Participation) -> float:
        """The paper's E(B, C) with unit noise: sens(C)·‖B‖_F/√n, with the certified sensitivity."""
        return self.error(participation, "mean")

    def error(self, participation: Participation, kind: ErrorKind = "mean") -> float:
        """Root of the mean, last or largest squared error over the steps, with unit noise."""
        square = _error.reduce_squares(self._step_squares, _error.check_kind(kind))
        return self.sensitivity(participation).value * math.sqrt(square)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""

    def to_json(self) -> str:
        """``to_dict`` as JSON; every coefficient comes back to the last bit."""
        return json.dumps(self.to_dict())

    def error_per_step(self, participation: Participation) -> Array:
        """Root of the expected squared error of each step, with unit noise; length n."""
        return self.sensitivity(participation).value * self.decoder_norms


@dataclass(frozen=True)
class Mechanism(_Factorization):
    """A Toeplitz factorization A = BC, given by its noising series C⁻¹(x) = N(x)/D(x).

    Attributes:
        name: the family, as users call it.
        workload: A.
        noising: C⁻¹(x), a ratio of short polynomials.
        optimization: how the coefficients were found; ``None`` for closed forms.
    """

    noising: Rational
    optimization: Optimization | None = None

    @property
    def num_bands(self) -> int:
        """p: the number of bands of C⁻¹, or of C where that is the banded one; n if neither is."""
        if self.noising.denominator_terms == 1:
            return self.noising.numerator_terms
        if self.noising.numerator_terms == 1:
            return self.noising.denominator_terms
        return self.num_steps

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

    @cached_property
    def _step_squares(self) -> Array:
        return _error.step_squares(self.decoder_coef)

    def _finite(self, matrix: str, coef: Array) -> Array:
        # A quarter of the exponent range, so that squares and their sums are finite as well.
        if not np.max(np.abs(coef)) < 1e75:
            raise OverflowError(
                f"the coefficients of {matrix} grow beyond float64 within num_steps="
                f"{self.num_steps} for {self!r}; use another num_bands or mechanism"
            )
        return _read_only(coef)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C: exact or a certified upper bound, and it says which."""
        participation.check_steps(self.num_steps, "mechanism")
        return _sensitivity.of_toeplitz(self.strategy_coef, participation)

    def first(self, num_steps: int) -> Mechanism:
        """The same mechanism, stopped after ``num_steps`` steps."""
        return Mechanism(self.name, self.workload.first(num_steps), self.noising, self.optimization)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``from_dict`` gives back every coefficient to the last bit."""
        return {
            "name": self.name,
            "workload": self.workload.to_dict(),
            "noising": self.noising.to_dict(),
            "optimization": asdict(self.optimization) if self.optimization else None,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Mechanism:
        """The inverse of ``to_dict``."""
        found = data["optimization"]
        return Mechanism(
            data["name"],
            Workload.from_dict(data["workload"]),
            Rational.from_dict(data["noising"]),
            Optimization.from_dict(found) if found else None,
        )

    @staticmethod
    def from_json(text: str) -> Mechanism:
        """The inverse of ``to_json``."""
        return Mechanism.from_dict(json.loads(text))

    def __repr__(self) -> str:
        bands = "" if self.num_bands == self.num_steps else f", num_bands={self.num_bands}"
        return f"{self.name}({self.workload!r}{bands})"


@dataclass(frozen=True, eq=False)
class DenseMechanism(_Factorization):
    """A factorization A = BC with any lower-triangular C: the exception, for small n.

    Attributes:
        name: the family.
        workload: A.
        strategy: C, n×n, read-only.
        optimization: how it was found.
    """

    strategy: Array
    optimization: Optimization

    @cached_property
    def noising(self) -> Array:
        """C⁻¹, n×n."""
        return _read_only(np.tril(np.linalg.inv(self.strategy)).astype(np.float64))

    @cached_property
    def decoder(self) -> Array:
        """B = AC⁻¹, n×n."""
        return _read_only(toeplitz.matrix(self.workload.coef) @ self.noising)

    @cached_property
    def _step_squares(self) -> Array:
        return np.sum(self.decoder**2, axis=1)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C: exact where C has at most b bands."""
        participation.check_steps(self.num_steps, "mechanism")
        return _sensitivity.of_matrix(self.strategy, participation)

    def first(self, num_steps: int) -> DenseMechanism:
        """The same mechanism, stopped after ``num_steps`` steps."""
        workload = self.workload.first(num_steps)
        part = _read_only(self.strategy[:num_steps, :num_steps].copy())
        return DenseMechanism(self.name, workload, part, self.optimization)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``from_dict`` gives back every entry to the last bit."""
        return {
            "name": self.name,
            "workload": self.workload.to_dict(),
            "strategy": self.strategy.tolist(),
            "optimization": asdict(self.optimization),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> DenseMechanism:
        """The inverse of ``to_dict``."""
        return DenseMechanism(
            data["name"],
            Workload.from_dict(data["workload"]),
            _read_only(np.array(data["strategy"])),
            Optimization.from_dict(data["optimization"]),
        )

    @staticmethod
    def from_json(text: str) -> DenseMechanism:
        """The inverse of ``to_json``."""
        return DenseMechanism.from_dict(json.loads(text))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DenseMechanism) and (
            (self.name, self.workload, self.optimization)
            == (other.name, other.workload, other.optimization)
            and np.array_equal(self.strategy, other.strategy)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.workload, self.strategy.tobytes()))

    def __repr__(self) -> str:
        return f"{self.name}({self.workload!r})"


def from_dict(data: Mapping[str, Any]) -> Mechanism | DenseMechanism:
    """The inverse of ``to_dict``, of either kind."""
    kind = DenseMechanism if "strategy" in data else Mechanism
    return kind.from_dict(data)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
