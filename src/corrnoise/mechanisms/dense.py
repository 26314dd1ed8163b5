r"""The best lower-triangular C of at most b bands, for small n: a reference for Toeplitz families.

C has at most b bands, so no two columns of a pattern overlap and

    sens(C)² = max over patterns of Σ_{i in pattern} ‖C[:, i]‖²          (exact, any signs).

The paper conjectures that no C with more bands does better. Some do, by up to half a percent in the
cases tried, with n up to 32 (``papers/back_to_square_roots``, conjecture). The columns need not
have equal norms: early columns may be longer than late ones, since a pattern takes one column of
each epoch.

The maximum over patterns is smoothed by T·log Σ exp(·/T), a sum over all patterns by dynamic
programming in O(nk), and T is lowered in stages; the reported sensitivity is the maximum itself.

With k = 1 the sensitivity is the norm of the longest column, and some optimum has columns of equal
norm: the error AX⁻¹Aᵀ falls when the diagonal of X = CᵀC grows, and X remains banded. So this case
needs no smoothing.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise import sensitivity
from corrnoise._progress import Progress, Share, resolve
from corrnoise.algebra import toeplitz
from corrnoise.mechanisms.banded import band_mf
from corrnoise.mechanisms.matrix import DenseMechanism
from corrnoise.mechanisms.mechanism import Optimization
from corrnoise.mechanisms.registry import Family, Question
from corrnoise.mechanisms.solver import Solver
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]

LARGEST = 1024
# A planner does not try it with more steps: it would take longer than all other candidates.
_LARGEST_PLANNED = 128
_TEMPERATURES = (1e-2, 1e-3, 1e-4)
_SOLVER = Solver(memory=20, iterations=500, tolerance=1e-9)


def dense(
    workload: Workload,
    participation: Participation,
    *,
    num_bands: int | None = None,
    equal_columns: bool = False,
    over: Literal["mean", "max"] = "mean",
    progress: Progress | bool | None = None,
) -> DenseMechanism:
    """The p-banded lower-triangular C, not Toeplitz, with the least error sens(C)·‖AC⁻¹‖_F/√n.

    The sensitivity is exact, as p ≤ b. The search takes about a thousand evaluations of O(n³):
    seconds at n = 256. At this size several BLAS threads are slower than one, and much slower on a
    busy machine; set OPENBLAS_NUM_THREADS=1.

    Args:
        workload: A, with at most 1024 steps.
        participation: n, b, k.
        num_bands: p in [1, b], the bands of C; b by default.
        equal_columns: give all columns the same norm (column-normalised banded): the error is
            somewhat larger, and every pattern of k steps has the same sensitivity.
        over: which rmse to minimise: "mean" or "max". No invertible C attains the least rmse of
            the "last" step.
        progress: called after each iteration of the optimiser with (iterations done, largest number
            of iterations); True for a bar on the terminal. Most searches end earlier.

    >>> import corrnoise as cn
    >>> part = cn.Participation(16, 4, 4)
    >>> m = cn.mechanisms.dense(cn.workloads.prefix_sum(16), part)
    >>> m.rmse(part) < cn.mechanisms.band_mf(
    ...     cn.workloads.prefix_sum(16), part, num_bands=4).rmse(part)
    True
    """
    participation.check_steps(workload.num_steps, "workload")
    n, b = participation.num_steps, participation.min_sep
    checks.integer("num_steps", n, 1, LARGEST, "use band_mf for longer runs")
    p = b if num_bands is None else checks.integer("num_bands", num_bands, 1, b, "at most min_sep")
    checks.choice("over", over, ("mean", "max"))
    equal = equal_columns or participation.max_participations == 1
    problem = _Problem(workload, participation, p, equal, over)
    share = Share(resolve(progress), _SOLVER.iterations * len(_TEMPERATURES))
    share.advance(0)
    coef = band_mf(workload, participation, num_bands=p).strategy_coef
    start = problem.normalize(toeplitz.matrix(coef))
    best, before = start, problem.squared_error(start)
    least, evaluations, converged, message = before, 0, False, ""
    for stage, temperature in enumerate(_TEMPERATURES, 1):
        result = _SOLVER.minimize(
            partial(problem.objective, temperature),
            best[problem.rows, problem.columns],
            trace=lambda _: share.advance(1),
        )
        share.advance(stage * _SOLVER.iterations - share.done)
        found = problem.matrix(result.point)
        evaluations += result.evaluations
        converged, message = result.converged, result.message
        value = problem.squared_error(found)
        if value < least:
            best, least = found, value
    best = problem.normalize(best)
    best.flags.writeable = False
    record = Optimization(
        converged, message, evaluations, math.sqrt(before), math.sqrt(least), participation
    )
    return DenseMechanism("dense", workload, best, record)


class _Problem:
    def __init__(
        self,
        workload: Workload,
        participation: Participation,
        num_bands: int,
        equal_columns: bool,
        over: str,
    ) -> None:
        n = workload.num_steps
        self.workload = toeplitz.matrix(workload.coef)
        self.participation, self.equal_columns, self.over = participation, equal_columns, over
        rows, columns = np.tril_indices(n)
        inside = rows - columns < num_bands
        self.rows, self.columns = rows[inside], columns[inside]

    def matrix(self, variables: Array) -> Array:
        strategy = np.zeros_like(self.workload)
        strategy[self.rows, self.columns] = variables
        return strategy

    def normalize(self, strategy: Array) -> Array:
        """The band with columns scaled to norm 1 if ``equal_columns``, else to at most 1."""
        banded = self.matrix(strategy[self.rows, self.columns])
        norms = np.linalg.norm(banded, axis=0)
        return banded / (norms if self.equal_columns else norms.max())

    def decoder(self, strategy: Array) -> Array:
        """B = AC⁻¹."""
        return _solve_lower(strategy, self.workload.T, transposed=True).T

    def squared_error(self, strategy: Array) -> float:
        """The squared error with the true sensitivity, not the smoothed one."""
        strategy = self.normalize(strategy)
        columns = np.sum(strategy**2, axis=0)
        sens = sensitivity.heaviest_pattern(columns, self.participation)[0]
        steps = np.sum(self.decoder(strategy) ** 2, axis=1)
        return sens * float(np.mean(steps) if self.over == "mean" else np.max(steps))

    def objective(self, temperature: float, variables: Array) -> tuple[float, Array]:
        """Logarithm of the smoothed squared error, and its gradient."""
        raw = self.matrix(variables)
        if np.min(np.diag(raw)) <= 0.0:
            return 1e3, np.zeros_like(variables)
        norms = np.linalg.norm(raw, axis=0) if self.equal_columns else np.ones(raw.shape[0])
        strategy = raw / norms
        decoder = self.decoder(strategy)
        steps = np.sum(decoder**2, axis=1)
        error, weights = _soft_max(steps, temperature) if self.over == "max" else _mean(steps)
        product = decoder.T @ (weights[:, None] * decoder)
        slope = -2.0 * _solve_lower(strategy, product).T / error
        if self.equal_columns:
            slope -= strategy * np.sum(strategy * slope, axis=0)
            slope /= norms
            return math.log(error), slope[self.rows, self.columns]
        columns = np.sum(strategy**2, axis=0)
        sens, marginals = soft_heaviest(columns, self.participation, temperature)
        slope += strategy * (2.0 / sens * marginals)
        return math.log(error) + math.log(sens), slope[self.rows, self.columns]


def soft_heaviest(
    weight: Array, participation: Participation, temperature: float
) -> tuple[float, Array]:
    """A smooth upper bound of ``sensitivity.heaviest_pattern`` and its gradient, in O(nk).

    T·log Σ_patterns exp(Σ weight/T), with T = temperature·mean(weight) so that it scales like
    the weights.
    """
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    scale = temperature * float(np.mean(weight))
    energy = weight / scale
    ahead = _pattern_sums(energy, b, k)  # exactly j steps among the first i
    behind = _pattern_sums(energy[::-1], b, k)
    log_total = float(np.logaddexp.reduce(ahead[1:, n]))
    at_most = np.logaddexp.accumulate(behind, axis=0)
    steps = np.arange(n)
    left = ahead[:k, np.maximum(steps + 1 - b, 0)]
    right = at_most[k - 1 :: -1, np.maximum(n - steps - b, 0)]
    marginals = np.exp(energy + np.logaddexp.reduce(left + right, axis=0) - log_total)
    return scale * log_total, _with_moving_scale(marginals, energy, log_total, temperature)


def _pattern_sums(energy: Array, min_sep: int, k: int) -> Array:
    n = energy.size
    sums = np.full((k + 1, n + 1), -np.inf)
    sums[0] = 0.0
    before = np.maximum(np.arange(1, n + 1) - min_sep, 0)
    for j in range(1, k + 1):
        sums[j, 1:] = np.logaddexp.accumulate(energy + sums[j - 1, before])
    return sums


def _solve_lower(lower: Array, right: Array, transposed: bool = False) -> Array:
    from scipy.linalg import solve_triangular  # deferred, like all of SciPy, for a quick import

    trans = "T" if transposed else "N"
    return np.asarray(solve_triangular(lower, right, lower=True, trans=trans), dtype=np.float64)


def _mean(steps: Array) -> tuple[float, Array]:
    return float(np.mean(steps)), np.full(steps.size, 1.0 / steps.size)


def _soft_max(steps: Array, temperature: float) -> tuple[float, Array]:
    scale = temperature * float(np.mean(steps))
    energy = steps / scale
    log_total = float(np.logaddexp.reduce(energy))
    shares = np.exp(energy - log_total)
    return scale * log_total, _with_moving_scale(shares, energy, log_total, temperature)


def _with_moving_scale(slope: Array, energy: Array, log_total: float, temperature: float) -> Array:
    """The gradient of T·L(x/T), given that of L, where T = temperature·mean(x) depends on x."""
    return slope + (log_total - toeplitz.dot(slope, energy)) * temperature / slope.size


def _sizes(question: Question) -> list[None]:
    small = question.workload.num_steps <= _LARGEST_PLANNED
    return [None] if small or question.named else []


DENSE = Family(
    name="dense",
    label="Dense",
    factory=dense,
    size="num_bands",
    optional=True,
    sizes=_sizes,
    reports=True,
)
