r"""BLT, buffered linear Toeplitz: C and C⁻¹ are ratios of polynomials of degree d.

    C(x) = Π_i (1 - φ_i x)/(1 - θ_i x),     1 > θ_1 > φ_1 > θ_2 > φ_2 > … > φ_d > 0

As poles and zeros interlace, c is a sum of d decaying exponentials with positive weights after its
first entry. So c is positive and decreasing, and its sensitivity is exact. Both C and C⁻¹ run with
d buffers. The variables are the logarithms of the gaps between poles and zeros on the scale
-log(1 - ·), on which the poles of a good approximation to a square root are evenly spaced. All
values of the variables are feasible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.errors import ErrorKind, check_kind
from corrnoise.mechanisms.fitting import FactorGradients, optimize
from corrnoise.mechanisms.registry import Candidate, Family, Question
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Array = npt.NDArray[np.float64]

# The numbers of buffers that a planner tries; more of them hardly lower the error.
_BUFFERS = (1, 2, 4)


class _Interlaced:
    """θ_1, φ_1, θ_2, … = 1 - exp(-position); positions are decreasing sums of exp(variables)."""

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
    *,
    num_buffers: int = 4,
    over: ErrorKind = "mean",
) -> ToeplitzMechanism:
    """The buffered linear Toeplitz mechanism with the least error (Dvijotham et al., 2024).

    C(x) = Π_i (1 - φ_i x)/(1 - θ_i x) with d poles θ_i and d zeros φ_i minimises
    sens(C)·‖AC⁻¹‖_F/√n. Any workload, with momentum and decay too, and any participation are
    allowed. The sensitivity is exact. An evaluation takes O(nd).

    Args:
        workload: A.
        participation: n, b, k.
        num_buffers: d, the number of model-sized buffers; the error saturates quickly with it.
        over: which rmse to minimise: "mean" over the steps, "last" or "max".

    >>> import corrnoise as cn
    >>> part = cn.Participation(1024, 256, 4)
    >>> m = cn.mechanisms.blt(cn.workloads.prefix_sum(1024), part, num_buffers=4)
    >>> round(m.rmse(part), 3), m.sensitivity(part).exact
    (6.669, True)
    """
    participation.check_steps(workload.num_steps, "workload")
    n = workload.num_steps
    d = checks.integer("num_buffers", num_buffers, 1, n, "more buffers than steps gain nothing")
    # The slowest pole decays within an epoch, or as fast as the workload itself.
    memory = min(float(participation.min_sep), 1.0 / max(1.0 - (workload.decay or 1.0), 1e-300))
    positions = np.linspace(math.log(memory + 1.0) + 1.0, 0.3, 2 * d)
    start = np.log(np.diff(positions[::-1], prepend=0.0))
    return optimize(
        "blt", _Interlaced(), (start,), workload, participation, check_kind(over), radius=1.0
    )


def _sizes(question: Question) -> list[int]:
    return [d for d in _BUFFERS if d <= question.workload.num_steps]


def _tuned_for_less(question: Question) -> Iterator[Candidate]:
    """Candidates optimised for shorter separations.

    Amplification by bins favours a C that decays faster, as optimising for a shorter separation
    gives.
    """
    if question.amplification != "bins" or question.memory == 0:
        return
    n, b = question.participation.num_steps, question.participation.min_sep
    for shorter in (b // share for share in (2, 4) if b >= share):
        tuned = Participation(n, shorter, -(-n // shorter))
        for size in _sizes(question):
            yield Candidate(
                size,
                lambda tuned=tuned, size=size: blt(question.workload, tuned, num_buffers=size),
                f", tuned for b={shorter}",
            )


BLT = Family(
    name="blt",
    label="BLT",
    factory=blt,
    size="num_buffers",
    usual=lambda participation: min(4, participation.num_steps),
    sizes=_sizes,
    extra=_tuned_for_less,
)
