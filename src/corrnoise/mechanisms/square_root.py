"""Closed forms: DP-SGD, the square root, and its two banded versions, BSR and BISR."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

from corrnoise import _checks as checks
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms.registry import Family, Question
from corrnoise.mechanisms.searching import least_integer
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

# Without stored state each band of C⁻¹ costs a draw for each parameter and step. So a planner tries
# at most this many bands unless the user asks for more.
MOST_BANDS = 32
_BISR_BANDS = (2, 4, 8, 11, 16, 23, MOST_BANDS)


def dp_sgd(workload: Workload, participation: Participation | None = None) -> ToeplitzMechanism:
    """Independent noise at each step: C = I, B = A (DP-SGD).

    The sensitivity is exactly √k.

    Args:
        workload: A.
        participation: not used; every family is called with a workload and a participation.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(16))
    >>> round(m.rmse(cn.Participation(16, 4, 4)), 4)
    5.831
    """
    return ToeplitzMechanism("dp_sgd", workload, Rational.of())


def square_root(
    workload: Workload, participation: Participation | None = None
) -> ToeplitzMechanism:
    """The square root factorization C = B = A^{1/2}, which is not banded.

    The noise of a step depends on all earlier steps, so it costs n draws for each parameter and
    step. The sensitivity is certified, and exact if C decreases. Building it takes O(n log n) time
    at most.

    Args:
        workload: A.
        participation: not used.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.square_root(cn.workloads.prefix_sum(1024))
    >>> round(m.rmse(cn.Participation(1024, 256, 4)), 3)
    7.543
    """
    coef = workload.inverse_sqrt_coef(workload.num_steps)
    return ToeplitzMechanism("square_root", workload, Rational.of(numerator=[coef]))


def bsr(
    workload: Workload, participation: Participation | None = None, *, num_bands: int
) -> ToeplitzMechanism:
    """Banded square root: the first p diagonals of C = A^{1/2} (BSR; Kalinin and Lampert, 2024).

    The sensitivity is exact if p ≤ b or if C decreases, else certified.

    Args:
        workload: A.
        participation: not used.
        num_bands: p in [1, n], the bands of C.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.bsr(cn.workloads.prefix_sum(1024), num_bands=256)
    >>> round(m.rmse(cn.Participation(1024, 256, 4)), 3)
    6.486
    """
    p = bands(num_bands, workload)
    return ToeplitzMechanism("bsr", workload, Rational.of(denominator=[workload.sqrt_coef(p)]))


def bisr(
    workload: Workload,
    participation: Participation | None = None,
    *,
    num_bands: int | Literal["best"],
) -> ToeplitzMechanism:
    """Banded inverse square root: the first p diagonals of C⁻¹ = A^{-1/2} (Definition "BISR").

    For an SGD workload C is then non-negative and decreasing (Lemma "Decreasing values"), so its
    sensitivity is exact; for any other workload it is certified. Building it takes O(p) time for an
    SGD workload.

    Args:
        workload: A.
        participation: n, b, k; used only for "best".
        num_bands: p in [1, n], the bands of C⁻¹, or "best" for the p with the least certified rmse.
            It is found by bracketing, in O(log n) evaluations of O(n log n).

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.bisr(cn.workloads.prefix_sum(1024), num_bands=4)
    >>> m.noising_coef[:5]
    array([ 1.    , -0.5   , -0.125 , -0.0625,  0.    ])
    >>> round(m.rmse(cn.Participation(1024, 256, 4)), 3)
    18.219
    """
    if num_bands != "best":
        p = bands(num_bands, workload)
        coef = workload.inverse_sqrt_coef(p)
        return ToeplitzMechanism("bisr", workload, Rational.of(numerator=[coef]))
    if participation is None:
        raise ValueError(
            'num_bands="best" needs participation=, got None; '
            "pass the participation whose error is to be least"
        )
    coef = workload.inverse_sqrt_coef(workload.num_steps)

    def banded(p: int) -> ToeplitzMechanism:
        return ToeplitzMechanism("bisr", workload, Rational.of(numerator=[coef[:p]]))

    n = workload.num_steps
    grid = [4**i for i in range(math.ceil(math.log(n, 4)) + 1) if 4**i < n] + [n]
    # To a relative 1e-4 of p, where the rmse is constant to ten digits.
    return banded(least_integer(lambda p: banded(p).rmse(participation), grid, relative=1e-4))


def bands(num_bands: object, workload: Workload) -> int:
    """Return ``num_bands`` if it is in [1, n], or raise."""
    n = workload.num_steps
    if isinstance(num_bands, str):
        raise ValueError(f'num_bands must be in [1, num_steps={n}] or "best", got {num_bands!r}')
    return checks.integer("num_bands", num_bands, 1, n, "lower num_bands or raise num_steps")


def strategy_bands(question: Question) -> list[int]:
    """Sizes of a banded C for a planner: b, the largest that fits into memory, and smaller ones.

    More bands give less error, but less amplification if the sampling depends on the bands.
    """
    b, memory = question.participation.min_sep, question.memory
    sizes = {b}
    if memory is not None and 1 <= memory < b - 1:
        sizes.add(int(memory) + 1)
    if question.amplification == "bands":
        sizes |= {2**i for i in range(1, b.bit_length()) if 2**i < b}
    return sorted(sizes)


@lru_cache(maxsize=16)
def _best_bands(workload: Workload, participation: Participation) -> int:
    """The best size of BISR; cached, since a planner asks for it for every sampling."""
    return bisr(workload, participation, num_bands="best").noising_bands


def _bisr_sizes(question: Question) -> list[int]:
    best = _best_bands(question.workload, question.participation)
    return sorted({*(p for p in _BISR_BANDS if p <= question.workload.num_steps), best})


DP_SGD = Family(
    name="dp_sgd",
    label="DP-SGD",
    factory=dp_sgd,
    sizes=lambda question: [1],
)
BSR = Family(
    name="bsr",
    label="BSR",
    factory=bsr,
    size="num_bands",
    usual=lambda participation: participation.min_sep,
    sizes=strategy_bands,
)
BISR = Family(
    name="bisr",
    label="BISR",
    factory=bisr,
    size="num_bands",
    usual=lambda participation: min(4, participation.num_steps),
    sizes=_bisr_sizes,
)
