"""Factorizations with any lower-triangular C, as n×n matrices, for small n."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise import sensitivity as _sensitivity
from corrnoise.accounting.bins import Bins, matrix_bins
from corrnoise.algebra import sections, toeplitz
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.mechanism import Mechanism, Optimization, optimization_fields
from corrnoise.participation import Participation
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class DenseMechanism(Mechanism, kind="dense"):
    """A factorization A = BC with any lower-triangular C, stored as an n×n matrix.

    Its operations take O(n²) memory and up to O(n³) time, so it is for small n. The sensitivity is
    exact if C has at most b bands, else certified.

    Attributes:
        name: the name of its family.
        workload: A.
        strategy: C, n×n, read-only.
        optimization: how C was found; ``None`` if it was not optimised.
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

    def certify(self, participation: Participation) -> Sensitivity:
        """The sensitivity of C: exact where C has at most b bands."""
        return _sensitivity.of_matrix(self.strategy, participation)

    @cached_property
    def step_squares(self) -> Array:
        """‖B[i, :]‖² of each step i; length n."""
        return np.sum(self.decoder**2, axis=1)

    @property
    def decoder_column(self) -> Array:
        """The first column of B."""
        return self.decoder[:, 0]

    @property
    def strategy_bands(self) -> int:
        """The number of bands of C."""
        return self._bands

    @cached_property
    def _bands(self) -> int:
        rows, columns = np.nonzero(self.strategy)
        return int(np.max(rows - columns)) + 1

    @property
    def noising_bands(self) -> int:
        """The number of bands of C⁻¹: 1 where C is diagonal, else n, since the inverse is full."""
        return self.num_steps if self.strategy_bands > 1 else 1

    @property
    def least_entry(self) -> float:
        """The smallest entry of C, divided by the largest absolute value of an entry."""
        return float(np.min(self.strategy) / np.max(np.abs(self.strategy)))

    @property
    def column_norm(self) -> float:
        """The largest norm of a column of C."""
        return float(np.max(np.linalg.norm(self.strategy, axis=0)))

    def bins(self, num_bins: int) -> Bins:
        """The means of balls-in-bins; entries of C below 0 count as 0."""
        return matrix_bins(np.maximum(self.strategy, 0.0), num_bins)

    @property
    def recursive(self) -> bool:
        """True: the noise of a step is computed from earlier outputs."""
        return True

    @property
    def largest_noising_entry(self) -> float:
        """The largest absolute value of an entry of C⁻¹."""
        return float(np.max(np.abs(self.noising)))

    def noising_row(self, step: int) -> Array:
        """Row ``step`` of C⁻¹ up to its diagonal."""
        return self.noising[step, : step + 1]

    def noising_matrix(self, size: int) -> Array:
        """The first ``size`` rows and columns of C⁻¹."""
        return self.noising[:size, :size]

    def recursion(self, step: int) -> Rational:
        """The reciprocal of the row of C for this step, padded with zeros to the bands of C."""
        past = min(step, self.strategy_bands - 1)
        row = self.strategy[step, step - past : step + 1][::-1]
        return Rational((), (np.concatenate([row, np.zeros(self.strategy_bands - row.size)]),))

    def correlate(self, z: Array) -> Array:
        """C⁻¹z."""
        return self.noising @ z

    def in_float32(self) -> DenseMechanism:
        """The mechanism that is run: each row of C with the coefficients of its recursion."""
        most = self.strategy_bands - 1
        strategy = np.zeros_like(self.strategy)
        for step in range(self.num_steps):
            (section,) = sections.sections(self.recursion(step))
            past = min(step, most)
            strategy[step, step] = 1.0
            strategy[step, step - past : step] = -section.feedback[most - past :]
            strategy[step] /= np.float32(section.gain)
        return replace(self, strategy=_read_only(strategy))

    @property
    def fingerprint(self) -> str:
        """16 hex digits of a hash of C."""
        return hashlib.sha256(b"dense" + self.strategy.tobytes()).hexdigest()[:16]

    def first(self, num_steps: int) -> DenseMechanism:
        """The same mechanism, stopped after ``num_steps`` steps."""
        part = _read_only(self.strategy[:num_steps, :num_steps].copy())
        return replace(self, workload=self.workload.first(num_steps), strategy=part)

    def fields(self) -> dict[str, Any]:
        """The matrix and the record of its optimisation."""
        return {
            "strategy": self.strategy.tolist(),
            "optimization": optimization_fields(self.optimization),
        }

    @classmethod
    def from_fields(
        cls, name: str, workload: Workload, fields: Mapping[str, Any]
    ) -> DenseMechanism:
        """The inverse of ``fields``; raises a ``ValueError`` that names what is wrong."""
        given = checks.fields("mechanism", fields, ("strategy", "optimization"))
        rows = [
            checks.vector("strategy", row) for row in checks.listed("strategy", given["strategy"])
        ]
        n = workload.num_steps
        if len(rows) != n or any(row.size != n for row in rows):
            raise ValueError(f"strategy must be a matrix of num_steps={n} rows and columns")
        strategy = np.stack(rows)
        if np.any(np.triu(strategy, 1)) or not np.all(np.diag(strategy) > 0.0):
            raise ValueError(
                "strategy must be lower-triangular, with a positive diagonal, got one that is not"
            )
        optimization = Optimization.from_dict(given["optimization"])
        return DenseMechanism(name, workload, _read_only(strategy), optimization)

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


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array
