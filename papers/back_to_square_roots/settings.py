"""What the figures share: three workloads, the methods, and how one of them is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise.mechanisms import ToeplitzMechanism

Row = dict[str, Any]

# α and β of the paper's figures.
WORKLOADS = {
    "prefix sum": {"decay": 1.0, "momentum": 0.0},
    "momentum": {"decay": 1.0, "momentum": 0.9},
    "decay": {"decay": 0.999, "momentum": 0.0},
}
METHODS = {
    "dp_sgd": "DP-SGD",
    "bsr": "BSR",
    "bisr": "BISR",
    "blt": "BLT",
    "band_mf": "Band-MF",
    "band_inv_mf": "Band-Inv-MF",
}


def workload(name: str, num_steps: int) -> cn.Workload:
    """One of the three, for n steps."""
    return cn.workloads.sgd(num_steps, **WORKLOADS[name])


def greek(name: str) -> str:
    """A workload as the paper's captions write it."""
    return f"α = {WORKLOADS[name]['decay']:g}, β = {WORKLOADS[name]['momentum']:g}"


def epochs(num_steps: int, max_participations: int) -> cn.Participation:
    """Participation once in each of k epochs of n/k steps."""
    return cn.Participation(num_steps, num_steps // max_participations, max_participations)


def measure(
    workload: str, participation: cn.Participation, make: Callable[[], ToeplitzMechanism]
) -> Row:
    """Build a mechanism and measure it: its certified error, and what that consists of."""
    began = time.perf_counter()
    mechanism = make()
    sens = mechanism.sensitivity(participation)
    rmse = mechanism.rmse(participation)
    seconds = time.perf_counter() - began
    c = mechanism.strategy_coef
    found = mechanism.optimization
    return {
        "workload": workload,
        "n": participation.num_steps,
        "k": participation.max_participations,
        "method": mechanism.name,
        # Of the matrix that is banded; n where neither is.
        "p": min(mechanism.strategy_bands, mechanism.noising_bands),
        "rmse": rmse,
        "sensitivity": sens.value,
        "gap": sens.gap,
        "converged": found.converged if found else None,
        "positive": bool(np.min(c) > -1e-12 * c[0]),
        "decreasing": bool(np.max(np.diff(c), initial=0.0) <= 1e-12 * c[0]),
        "seconds": round(seconds, 4),
    }


def select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]
