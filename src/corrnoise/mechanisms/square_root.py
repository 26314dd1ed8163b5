"""Closed forms: DP-SGD, the square root, and its two bandings, BSR and BISR."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from corrnoise import checks
from corrnoise.mechanisms.mechanism import Mechanism
from corrnoise.participation import Participation
from corrnoise.rational import Rational
from corrnoise.workloads import Workload


def dp_sgd(workload: Workload) -> Mechanism:
    """Independent noise at each step: C = I.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(16))
    >>> round(m.rmse(cn.Participation(16, 4, 4)), 4)
    5.831
    """
    return Mechanism("dp_sgd", workload, Rational.of())


def square_root(workload: Workload) -> Mechanism:
    """C = A^{1/2}: B = C, no banding. Noise at step i depends on all earlier ones."""
    coef = workload.inverse_sqrt_coef(workload.num_steps)
    return Mechanism("square_root", workload, Rational.of(numerator=[coef]))


def bsr(workload: Workload, num_bands: int) -> Mechanism:
    """Banded square root: the first p diagonals of C = A^{1/2} (Kalinin and Lampert, 2024).

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.bsr(cn.workloads.prefix_sum(1024), num_bands=256)
    >>> round(m.rmse(cn.Participation(1024, 256, 4)), 3)
    6.486
    """
    p = bands(num_bands, workload)
    return Mechanism("bsr", workload, Rational.of(denominator=[workload.sqrt_coef(p)]))


def bisr(
    workload: Workload,
    num_bands: int | Literal["best"],
    participation: Participation | None = None,
) -> Mechanism:
    """Banded inverse square root: the first p diagonals of C⁻¹ = A^{-1/2} (Definition "BISR").

    For the SGD workloads C is then non-negative and decreasing (Lemma "Decreasing values"), so
    its sensitivity is exact.

    Args:
        workload: A.
        num_bands: p, or "best" for the p with the least certified rmse, which needs
            ``participation``. It is found by bracketing, O(log n) evaluations of O(n log n).
        participation: n, b, k; only for "best".

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
        return Mechanism("bisr", workload, Rational.of(numerator=[coef]))
    if participation is None:
        raise ValueError(
            'num_bands="best" needs participation=, got None; '
            "pass the participation whose error is to be least"
        )
    coef = workload.inverse_sqrt_coef(workload.num_steps)

    def banded(p: int) -> Mechanism:
        return Mechanism("bisr", workload, Rational.of(numerator=[coef[:p]]))

    return banded(_least_integer(lambda p: banded(p).rmse(participation), workload.num_steps))


def bands(num_bands: object, workload: Workload) -> int:
    """Return ``num_bands`` if it is in [1, n], or raise."""
    n = workload.num_steps
    if isinstance(num_bands, str):
        raise ValueError(f'num_bands must be in [1, num_steps={n}] or "best", got {num_bands!r}')
    return checks.integer("num_bands", num_bands, 1, n, "lower num_bands or raise num_steps")


def _least_integer(function: Callable[[int], float], high: int) -> int:
    """The argmin on 1..high of a function that falls, then rises.

    Powers of 4 bracket the valley and a golden section narrows it, to 1e-4 of the argument: there
    the valley is flat to ten digits. O(log high) evaluations.
    """
    value = lru_cache(maxsize=None)(function)
    grid = [4**i for i in range(math.ceil(math.log(high, 4)) + 1) if 4**i < high] + [high]
    best = min(range(len(grid)), key=lambda i: value(grid[i]))
    low, up = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    while up - low > max(4, low * 1e-4):
        part = round((up - low) * (3 - math.sqrt(5)) / 2)
        if value(low + part) <= value(up - part):
            up -= part
        else:
            low += part
    near = range(low, up + 1) if up - low <= 4 else (low, (low + up) // 2, up)
    return min(near, key=value)
