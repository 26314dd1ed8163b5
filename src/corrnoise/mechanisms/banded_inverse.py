"""Band-Inv-MF: a banded Toeplitz C⁻¹ with optimised coefficients."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from corrnoise._once import Once
from corrnoise._threads import one_blas_thread
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.errors import ErrorKind, check_kind, coefficient_weights
from corrnoise.mechanisms.fitting import (
    FactorGradients,
    SquaredSensitivity,
    Trace,
    descend,
    optimize,
)
from corrnoise.mechanisms.square_root import bands
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]
# A cache: a planner asks for the same mechanism more than once.
_FITTED: Once[ToeplitzMechanism] = Once(32)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_FITTED.clear)
# With more derivatives than the first number, or more products of two than the second, coordinates
# are not transformed, only scaled by the third.
_MOST_NUMBERS, _MOST_PRODUCTS, _SMALL = 2 * 10**7, 5 * 10**9, 0.01


class _BandedInverse:
    """C⁻¹ = 1 + q_1 x + … + q_{p-1} x^{p-1} with q = center + directions·v.

    The directions are chosen so that the error and the first column of C change at about the same
    rate in all directions of v, and a search needs few steps. With u = AC⁻¹, weighted as in the
    error, directions·directionsᵀ is the inverse of the sum of the squared derivatives of u/‖u‖ and
    c/‖c‖ at the center.
    """

    def __init__(self, center: Array, workload: Workload, over: ErrorKind) -> None:
        self.center, self.directions = center, None
        n, p = workload.num_steps, center.size
        if p > 0 and n * p <= _MOST_NUMBERS and n * p * p <= _MOST_PRODUCTS:
            metric = _metric_at(center, workload, over)
            if np.all(np.isfinite(metric)):
                metric[np.diag_indices(p)] += 1e-10 * np.max(np.diag(metric))
                self.directions = np.linalg.inv(np.linalg.cholesky(metric)).T

    def variables(self, coef: Array) -> Array:
        change = coef - self.center
        if self.directions is None:
            return change / _SMALL
        return np.asarray(np.linalg.solve(self.directions, change), np.float64)

    def series(self, variables: Array) -> Rational:
        change = _SMALL * variables if self.directions is None else self.directions @ variables
        coef = np.concatenate([[1.0], self.center + change])
        coef.setflags(write=False)  # a cached mechanism is shared by its users
        return Rational((coef,), ())

    def pull_back(self, variables: Array, factors: FactorGradients) -> Array:
        slope = factors.numerator[0][1:]
        return _SMALL * slope if self.directions is None else self.directions.T @ slope


def _metric_at(center: Array, workload: Workload, over: ErrorKind) -> Array:
    """The sum of the squared derivatives of u/‖u‖ and c/‖c‖."""
    n, p = workload.num_steps, center.size
    noising = Rational((np.concatenate([[1.0], center]),), ())
    weights = np.sqrt(coefficient_weights(n, over))
    with np.errstate(over="ignore", invalid="ignore"):
        u, c = weights * (noising * workload.series).coef(n), noising.reciprocal
        of_error = _metric(u, workload.coef, weights, p)
        return of_error + _metric(c.coef(n), (c * c).coef(n), np.ones(n), p)


def _metric(value: Array, slope: Array, weights: Array, p: int) -> Array:
    """The sum of the squared derivatives of value/‖value‖.

    The derivative of value by the j-th of p coefficients is slope, delayed by j, times weights.
    """
    n = value.size
    delayed = np.zeros((n, p))
    for j in range(min(p, n - 1)):
        delayed[j + 1 :, j] = slope[: n - j - 1]
    delayed *= weights[:, None]
    length = np.sqrt(np.sum(np.square(value)))
    value, delayed = value / length, delayed / length
    along = delayed.T @ value
    return delayed.T @ delayed - np.outer(along, along)


def band_inv_mf(
    workload: Workload,
    participation: Participation,
    *,
    num_bands: int,
    over: ErrorKind = "mean",
    trace: Trace | None = None,
) -> ToeplitzMechanism:
    """The p-banded Toeplitz C⁻¹ with the least certified error (Band-Inv-MF).

    C⁻¹(x) = 1 + q_1 x + … + q_{p-1} x^{p-1} minimises sens(C)·‖AC⁻¹‖_F/√n. The search starts at
    BISR, as in the paper's listing, and never returns a larger error than BISR's. The optimum is
    seldom monotone. Its sensitivity is certified by the autocorrelation bound
    (``corrnoise.sensitivity``), which is exact in nearly all cases.

    Args:
        workload: A.
        participation: n, b, k.
        num_bands: p in [1, n], the bands of C⁻¹.
        over: which rmse to minimise: "mean" over the steps, "last" or "max".
        trace: called with the error that is minimised, at the start and after each step of the
            optimiser. This error has the sensitivity of the pattern 0, b, 2b, … first, and the
            certified bound if that turns out not to be the worst pattern.

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.band_inv_mf(cn.workloads.prefix_sum(1024), part, num_bands=4)
    >>> round(m.rmse(part), 3), m.sensitivity(part).exact
    (7.964, True)
    """
    participation.check_steps(workload.num_steps, "workload")
    p, kind = bands(num_bands, workload), check_kind(over)

    @one_blas_thread()  # so that sums do not depend on the number of cores
    def fitted() -> ToeplitzMechanism:
        coef = workload.inverse_sqrt_coef(p)
        parameters = _BandedInverse(coef[1:] / coef[0], workload, kind)
        starts = np.zeros(p - 1), parameters.variables(np.zeros(p - 1))
        return optimize(
            "band_inv_mf",
            parameters,
            starts,
            workload,
            participation,
            kind,
            radius=0.1,
            trace=trace,
        )

    if trace is not None:
        return fitted()
    key = workload.coef.tobytes(), workload.decay, workload.momentum, participation, p, kind
    return _FITTED.get(key, fitted)


def repriced(
    mechanism: ToeplitzMechanism, participation: Participation, square: SquaredSensitivity
) -> ToeplitzMechanism:
    """A banded C⁻¹ with less error than this one, with ``square`` as the squared sensitivity."""
    (coef,) = mechanism.noising.numerator
    parameters = _BandedInverse(coef[1:] / coef[0], mechanism.workload, "mean")
    start = np.zeros(coef.size - 1)
    return descend("band_inv_mf", parameters, start, mechanism.workload, participation, square)
