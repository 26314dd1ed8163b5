r"""BLT, buffered linear Toeplitz: C and C⁻¹ are ratios of polynomials of degree d.

    C(x) = Π_i (1 - φ_i x)/(1 - θ_i x),     1 > θ_1 > φ_1 > θ_2 > φ_2 > … > φ_d > 0

Poles and zeros that interlace make c a sum of d decaying exponentials with positive weights after
its first entry, so c is positive and decreasing and its sensitivity exact. Both C and C⁻¹ run with
d buffers. The variables are the logarithms of the gaps in -log(1 - ·), where the poles of a good
approximation to a square root lie evenly; any values of them are feasible.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from corrnoise import checks
from corrnoise.error import ErrorKind, check_kind
from corrnoise.mechanisms.mechanism import Mechanism
from corrnoise.mechanisms.optimizer import FactorGradients, optimize
from corrnoise.participation import Participation
from corrnoise.rational import Rational
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]


class _Interlaced:
    """θ_1, φ_1, θ_2, … = 1 - exp(-position), positions the decreasing sums of exp(variables)."""

    def series(self, variables: Array) -> Rational:
        rates = -np.expm1(-_positions(variables))
        factors = [np.array([1.0, -rate]) for rate in rates]
        return Rational(tuple(factors[0::2]), tuple(factors[1::2]))

    def pull_back(self, variables: Array, factors: FactorGradients) -> Array:
        slopes = np.empty(variables.size)
        slopes[0::2] = [-g[1] for g in factors.numerator]
        slopes[1::2] = [-g[1] for g in factors.denominator]
        by_position = slopes * np.exp(-_positions(variables))
        return np.cumsum(by_position)[::-1] * np.exp(variables)


def _positions(variables: Array) -> Array:
    return np.cumsum(np.exp(variables))[::-1]


def blt(
    workload: Workload,
    participation: Participation,
    num_buffers: int = 4,
    *,
    error: ErrorKind = "mean",
) -> Mechanism:
    """The buffered linear Toeplitz mechanism with the least error (Dvijotham et al., 2024).

    For any workload, momentum and decay included, and any participation. The sensitivity is exact.
    O(nd) an evaluation.

    Args:
        workload: A.
        participation: n, b, k.
        num_buffers: d, the number of model-sized buffers; the error saturates quickly with it.
        error: what to minimise: "mean", "last" or "max".

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.blt(cn.workloads.prefix_sum(1024), part, num_buffers=4)
    >>> round(m.rmse(part), 3), m.sensitivity(part).exact
    (6.669, True)
    """
    participation.check_steps(workload.num_steps, "workload")
    n = workload.num_steps
    d = checks.integer("num_buffers", num_buffers, 1, n, "more buffers than steps gain nothing")
    # The slowest pole forgets within an epoch, or as fast as the workload itself does.
    memory = min(float(participation.min_sep), 1.0 / max(1.0 - (workload.decay or 1.0), 1e-300))
    positions = np.linspace(math.log(memory + 1.0) + 1.0, 0.3, 2 * d)
    start = np.log(np.diff(positions[::-1], prepend=0.0))
    return optimize(
        "blt", _Interlaced(), (start,), workload, participation, check_kind(error), radius=1.0
    )
