"""Band-Inv-MF: a banded Toeplitz C⁻¹ with optimised coefficients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.errors import ErrorKind, check_kind
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


class _BandedInverse:
    """C⁻¹ = 1 + v_1 x + … + v_{p-1} x^{p-1}."""

    def series(self, variables: Array) -> Rational:
        return Rational((np.concatenate([[1.0], variables]),), ())

    def pull_back(self, variables: Array, factors: FactorGradients) -> Array:
        return factors.numerator[0][1:]


def band_inv_mf(
    workload: Workload,
    participation: Participation,
    *,
    num_bands: int,
    over: ErrorKind = "mean",
    trace: Trace | None = None,
) -> ToeplitzMechanism:
    """The p-banded Toeplitz C⁻¹ with the least certified error (Band-Inv-MF).

    The search starts at BISR, as in the paper's listing. The optimum is seldom monotone; its
    sensitivity is certified by the autocorrelation bound (``corrnoise.sensitivity``), which is
    exact in nearly all cases.

    Args:
        workload: A.
        participation: n, b, k.
        num_bands: p in [1, n], the bands of C⁻¹.
        over: which rmse to minimise: "mean" over the steps, "last" or "max".
        trace: called with the error that is minimised, at the start and after each step of the
            optimiser. Its sensitivity is that of the pattern 0, b, 2b, … until this is found not to
            be the worst pattern, and then the certified bound.

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.band_inv_mf(cn.workloads.prefix_sum(1024), part, num_bands=4)
    >>> round(m.rmse(part), 3), m.sensitivity(part).exact
    (7.964, True)
    """
    participation.check_steps(workload.num_steps, "workload")
    p = bands(num_bands, workload)
    coef = workload.inverse_sqrt_coef(p)
    start = coef[1:] / coef[0]
    return optimize(
        "band_inv_mf",
        _BandedInverse(),
        (start, np.zeros(p - 1)),
        workload,
        participation,
        check_kind(over),
        radius=0.01,
        trace=trace,
    )


def repriced(
    mechanism: ToeplitzMechanism, participation: Participation, square: SquaredSensitivity
) -> ToeplitzMechanism:
    """A banded C⁻¹ with less error than this one, with ``square`` as the squared sensitivity."""
    (coef,) = mechanism.noising.numerator
    return descend(
        "band_inv_mf",
        _BandedInverse(),
        coef[1:] / coef[0],
        mechanism.workload,
        participation,
        square,
    )
