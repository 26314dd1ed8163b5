r"""The best C of any number of bands at small n, and a bound for those of at most b.

In X = CᵀC, which has the bands of C, the squared error is

    tr(AᵀA X⁻¹)/n · max over patterns of Σ_{i,j in pattern} |X_ij|

and both factors are convex; scaling X trades one for the other, so that a local optimum is the
optimum. Where X has at most b bands, the second factor is max Σ X_ii. Then for any random pattern,
of marginals μ_i, and any positive semidefinite M with

    M_ii = μ_i,   M_ij = 0 for 0 < |i-j| < b,   M_ij free beyond,

sens² ≥ Σ μ_i X_ii = ⟨M, X⟩, so that rmse·√n ≥ ‖A M^{1/2}‖_* for *every C of at most b bands*. M is
read off the optimum, X⁻¹AᵀAX⁻¹ up to scale, with the entries that must vanish set to 0. So the best
banded C is known up to the difference of two numbers, and a wider C below the lower one shows that
b bands do not suffice there, up to float64 rounding. The patterns are enumerated: small n only.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import corrnoise as cn
from corrnoise.algebra import toeplitz
from corrnoise.mechanisms.solver import Solver

Array = npt.NDArray[np.float64]

# The maximum and the absolute values are smoothed, less and less.
_TEMPERATURES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
_SMOOTH = 0.1
_SOLVER = Solver(memory=30, iterations=1000, tolerance=1e-13)


class Problem:
    """The error of a strategy, by enumeration of the patterns, and the search for the least."""

    def __init__(self, workload: cn.Workload, participation: cn.Participation) -> None:
        self.workload = toeplitz.matrix(workload.coef)
        self.participation = participation
        patterns = full_patterns(participation)
        self.chosen = np.zeros((len(patterns), workload.num_steps))
        for row, pattern in zip(self.chosen, patterns, strict=True):
            row[list(pattern)] = 1.0

    def rmse(self, strategy: Array) -> float:
        """An upper bound of the error; exact where no entry of CᵀC is negative."""
        squares = self._pattern_squares(np.abs(strategy.T @ strategy))
        return float(np.linalg.norm(self._decoder(strategy))) * math.sqrt(
            float(np.max(squares)) / len(strategy)
        )

    def search(self, start: Array, num_bands: int) -> Array:
        """The best strategy found with this many bands."""
        rows, columns = np.tril_indices(len(start))
        inside = rows - columns < num_bands
        band = rows[inside], columns[inside]
        best = self._matrix(band, start[band])
        for temperature in _TEMPERATURES:
            objective = partial(self._objective, temperature, band)
            found = self._matrix(band, _SOLVER.minimize(objective, best[band]).point)
            best = min(best, found, key=self.rmse)
        return best

    def bound_for_banded(self, strategy: Array) -> float:
        """No C with at most b bands has a smaller error; tight if ``strategy`` is the best."""
        n = len(strategy)
        steps = np.arange(n)
        far = np.abs(np.subtract.outer(steps, steps)) >= self.participation.min_sep
        gram = strategy.T @ strategy
        inverse = np.linalg.inv(gram)
        moment = inverse @ self.workload.T @ self.workload @ inverse
        totals = self.chosen @ np.diag(gram)
        best = 0.0
        for temperature in _TEMPERATURES:
            share = np.exp((totals / totals.max() - 1.0) / temperature)
            marginals = share / share.sum() @ self.chosen
            scaled = moment * (marginals.sum() / np.trace(moment))
            values, vectors = np.linalg.eigh(np.where(far, scaled, np.diag(marginals)))
            if values[0] >= 0.0:
                root = vectors * np.sqrt(values)
                nuclear = np.sum(np.linalg.svd(self.workload @ root, compute_uv=False))
                best = max(best, float(nuclear) / math.sqrt(n))
        return best

    def _matrix(self, band: tuple[Any, Any], variables: Array) -> Array:
        strategy = np.zeros_like(self.workload)
        strategy[band] = variables
        return strategy

    def _decoder(self, strategy: Array) -> Array:
        return np.linalg.solve(strategy.T, self.workload.T).T

    def _pattern_squares(self, size: Array) -> Array:
        return np.sum((self.chosen @ size) * self.chosen, axis=1)

    def _objective(
        self, temperature: float, band: tuple[Any, Any], variables: Array
    ) -> tuple[float, Array]:
        """Logarithm of the squared error, maximum and absolute values smoothed, and gradient."""
        strategy = self._matrix(band, variables)
        if np.min(np.diag(strategy)) <= 0.0:
            return 1e3, np.zeros_like(variables)
        decoder = self._decoder(strategy)
        error = float(np.sum(decoder**2))
        gram = strategy.T @ strategy
        size = np.sqrt(gram**2 + (_SMOOTH * temperature * gram[0, 0]) ** 2)
        squares = self._pattern_squares(size)
        scale = temperature * float(np.max(squares))
        weight = np.exp((squares - np.max(squares)) / scale)
        sens = float(np.max(squares)) + scale * math.log(float(np.sum(weight)))
        weight /= np.sum(weight)
        by_gram = (self.chosen.T * weight) @ self.chosen * (gram / size)
        slope = 2.0 * strategy @ by_gram / sens
        slope -= 2.0 * np.linalg.solve(strategy, decoder.T @ decoder).T / error
        return math.log(error) + math.log(sens), slope[band]


def full_patterns(participation: cn.Participation) -> list[tuple[int, ...]]:
    """The patterns that no step can join; every other one is a part of one of these."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    found: list[tuple[int, ...]] = []

    def extend(pattern: tuple[int, ...]) -> None:
        if len(pattern) == k or max(np.diff((-b, *pattern, n - 1 + b))) < 2 * b:
            found.append(pattern)
        elif len(pattern) < k:
            for step in range(pattern[-1] + b if pattern else 0, n):
                extend((*pattern, step))

    extend(())
    return found
