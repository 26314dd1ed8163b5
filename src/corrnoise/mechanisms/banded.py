"""Band-MF: a banded Toeplitz C with optimised coefficients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.errors import ErrorKind, check_kind
from corrnoise.mechanisms.fitting import FactorGradients, optimize
from corrnoise.mechanisms.registry import Family
from corrnoise.mechanisms.square_root import bands, strategy_bands
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
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
    *,
    num_bands: int,
    over: ErrorKind = "mean",
) -> ToeplitzMechanism:
    """The p-banded Toeplitz C with the least certified error (Band-MF).

    C(x) = 1 + c_1 x + … + c_{p-1} x^{p-1} minimises sens(C)·‖AC⁻¹‖_F/√n. With p ≤ b no two columns
    of a pattern overlap, and the sensitivity is exact. The search starts at BSR, takes about ten
    evaluations of O(n log n), and never returns a larger error than its start. With p > b the
    sensitivity is certified, exact or a bound. The search then starts at the optimum for p = b,
    which the paper conjectures cannot be improved.

    Args:
        workload: A.
        participation: n, b, k.
        num_bands: p in [1, n], the bands of C.
        over: which rmse to minimise: "mean" over the steps, "last" or "max".

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
        narrow = band_mf(workload, participation, num_bands=b, over=over)
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
        check_kind(over),
        radius=1.0,
    )


BAND_MF = Family(
    name="band_mf",
    label="Band-MF",
    factory=band_mf,
    size="num_bands",
    usual=lambda participation: participation.min_sep,
    sizes=strategy_bands,
)
