"""Every family under the name that users know it by."""

from __future__ import annotations

from typing import Literal, cast, get_args

from corrnoise import checks
from corrnoise.mechanisms.banded import band_mf
from corrnoise.mechanisms.banded_inverse import band_inv_mf
from corrnoise.mechanisms.buffered import blt
from corrnoise.mechanisms.dense import dense
from corrnoise.mechanisms.mechanism import DenseMechanism, Mechanism
from corrnoise.mechanisms.square_root import bisr, bsr, dp_sgd
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

Name = Literal["dp_sgd", "bsr", "band_mf", "bisr", "band_inv_mf", "blt", "dense"]
NAMES: tuple[Name, ...] = get_args(Name)
BANDED: tuple[Name, ...] = ("bsr", "band_mf", "bisr", "band_inv_mf")


def build(
    name: str,
    workload: Workload,
    participation: Participation,
    size: int | Literal["best"] | None = None,
) -> Mechanism | DenseMechanism:
    """The mechanism of this name: for what is chosen at run time.

    Args:
        name: one of ``NAMES``.
        workload: A.
        participation: n, b, k; the closed forms do not look at it.
        size: p of the banded families ("best" for BISR alone) and of "dense", where it may be
            left out; the number of buffers of "blt"; nothing for "dp_sgd".

    >>> import corrnoise as cn
    >>> build("bisr", cn.workloads.prefix_sum(100), cn.Participation(100, 25, 4), 4)
    bisr(prefix_sum(100), num_bands=4)
    """
    checks.choice("mechanism", name, NAMES)
    if size is None and name in (*BANDED, "blt"):
        what = "num_buffers" if name == "blt" else "num_bands"
        raise ValueError(f"{what} must be given for {name}, got None; try 4")
    if name == "dp_sgd":
        if size not in (None, 1):
            raise ValueError(f"num_bands of dp_sgd must be 1, got {size}; leave it out")
        return dp_sgd(workload)
    if name == "bisr":
        return bisr(workload, cast("int | Literal['best']", size), participation)
    number = cast(int, size)
    if name == "bsr":
        return bsr(workload, number)
    if name == "dense":
        return dense(workload, participation, size if size is None else number)
    family = {"band_mf": band_mf, "band_inv_mf": band_inv_mf, "blt": blt}[name]
    return family(workload, participation, number)
