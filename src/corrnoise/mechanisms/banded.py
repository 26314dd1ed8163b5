"""Band-MF: a banded Toeplitz C with optimised coefficients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from corrnoise.error import ErrorKind, check_kind
from corrnoise.mechanisms.mechanism import Mechanism
from corrnoise.mechanisms.optimizer import FactorGradients, optimize
from corrnoise.mechanisms.square_root import bands
from corrnoise.participation import Participation
from corrnoise.rational import Rational
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]


class _Banded:
    """C = 1 + v_1 x + … + v_{p-1} x^{p-1}."""

    def series(self, variables: Array) -> Rational:
        return Rational((), (np.concatenate([[1.0], variables]),))

    def pull_back(self, variables: Array, factors: FactorGradients) -> Array:
        return factors.denominator[0][1:]


def band_mf(
    workload: Workload,
    participation: Participation,
    num_bands: int,
    *,
    error: ErrorKind = "mean",
) -> Mechanism:
    """The p-banded Toeplitz C with the least certified error (Band-MF).

    With p ≤ b no two columns of a pattern overlap, and the sensitivity is exact. Started at BSR;
    about ten evaluations of O(n log n). With p > b the sensitivity is certified like any other;
    the start is then the optimum for p = b, which the paper conjectures cannot be improved.

    Args:
        workload: A.
        participation: n, b, k.
        num_bands: p in [1, n].
        error: what to minimise: "mean", "last" or "max".

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.band_mf(cn.workloads.prefix_sum(1024), part, num_bands=256)
    >>> round(m.rmse(part), 3), m.sensitivity(part).exact
    (6.444, True)
    """
    participation.check_steps(workload.num_steps, "workload")
    p = bands(num_bands, workload)
    b = participation.min_sep
    if p > b:
        narrow = band_mf(workload, participation, b, error=error)
        start = narrow.strategy_coef[1:p]
    else:
        coef = workload.sqrt_coef(p)
        start = coef[1:] / coef[0]
    return optimize(
        "band_mf",
        _Banded(),
        (start, np.zeros(p - 1)),
        workload,
        participation,
        check_kind(error),
        radius=1.0,
    )
