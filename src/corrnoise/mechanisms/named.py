"""Mechanisms by their names, for configuration files and command lines."""

from __future__ import annotations

from typing import Literal

from corrnoise import checks
from corrnoise.mechanisms.banded import band_mf
from corrnoise.mechanisms.banded_inverse import band_inv_mf
from corrnoise.mechanisms.buffered import blt
from corrnoise.mechanisms.dense import dense
from corrnoise.mechanisms.mechanism import DenseMechanism, Mechanism
from corrnoise.mechanisms.square_root import bisr, bsr, dp_sgd
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

NAMES = ("dp_sgd", "bsr", "bisr", "band_mf", "band_inv_mf", "blt", "dense")


def named(
    name: str,
    workload: Workload,
    participation: Participation,
    num_bands: int | Literal["best"] | None = None,
) -> Mechanism | DenseMechanism:
    """The mechanism of this name.

    Args:
        name: one of ``NAMES``.
        workload: A.
        participation: n, b, k.
        num_bands: p, or the number of buffers of "blt". By default 4 where C⁻¹ is banded and for
            "blt", as in the paper's experiments, and b where C is. "best" is for "bisr".

    >>> import corrnoise as cn
    >>> part = Participation(num_steps=100, min_sep=10, max_participations=10)
    >>> named("bsr", cn.workloads.prefix_sum(100), part)
    bsr(prefix_sum(100), num_bands=10)
    """
    checks.choice("mechanism", name, NAMES)
    if name in ("dp_sgd", "dense"):
        if num_bands is not None:
            raise ValueError(f"num_bands must be left out for {name!r}, got {num_bands!r}")
        return dp_sgd(workload) if name == "dp_sgd" else dense(workload, participation)
    if num_bands == "best":
        if name != "bisr":
            raise ValueError(f"num_bands='best' is for 'bisr', got {name!r}; give a number")
        return bisr(workload, num_bands="best", participation=participation)
    short = min(4, workload.num_steps)
    if name == "blt":
        return blt(workload, participation, num_buffers=num_bands or 4)
    if name == "bisr":
        return bisr(workload, num_bands=num_bands or short)
    if name == "band_inv_mf":
        return band_inv_mf(workload, participation, num_bands=num_bands or short)
    if name == "bsr":
        return bsr(workload, num_bands=num_bands or participation.min_sep)
    return band_mf(workload, participation, num_bands=num_bands or participation.min_sep)
