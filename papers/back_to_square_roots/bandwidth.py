"""Figure 2 of the paper: the error of BSR and BISR against their bandwidth."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise import _tables
from corrnoise._progress import Progress, tracked

from . import markdown, style
from .markdown import Claim
from .settings import METHODS, WORKLOADS, epochs, greek, measure, select, workload

TITLE = "The error against the bandwidth"
MAX_PARTICIPATIONS = 8
NEAR = 16  # every p this close to b is tried


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """The error of both at many p, and BISR's best p by a search."""
    n = 256 if smoke else 16384
    participation = epochs(n, MAX_PARTICIPATIONS)
    b = participation.min_sep
    spread = np.geomspace(1, n, 12 if smoke else 120).round().astype(int)
    bands = sorted({*spread.tolist(), *range(b - NEAR, b + NEAR + 1)})
    rows = []
    for name, p in tracked([(name, p) for name in WORKLOADS for p in bands], progress):
        A = workload(name, n)
        for method in (cn.mechanisms.bsr, cn.mechanisms.bisr):
            make = partial(method, A, num_bands=p)
            rows.append(measure(name, participation, make))
    for name in WORKLOADS:
        A = workload(name, n)
        make = partial(cn.mechanisms.bisr, A, participation, num_bands="best")
        best = measure(name, participation, make)
        if not select(rows, workload=name, method="bisr", p=best["p"]):
            rows.append(best)
    return {"n": n, "k": MAX_PARTICIPATIONS, "b": b, "rows": rows}


def optimum(data: dict[str, Any], name: str, method: str) -> dict[str, Any]:
    """The row with the least error of those tried."""
    rows = select(data["rows"], workload=name, method=method)
    return min(rows, key=lambda row: row["rmse"])


def draw(result: dict[str, Any], folder: Path) -> None:
    """Every p in the first row, the neighbourhood of b in the second; the optima marked."""
    data = result["data"]
    with style.sheet(result, folder, 2, 3, (10.5, 6.0)) as (figure, axes):
        for name, panel, near in zip(WORKLOADS, *axes, strict=True):
            for place in (panel, near):
                style.marked(place, data["b"], "p = b")
                for method in ("bsr", "bisr"):
                    _curve(place, data, name, method)
                place.set_xscale("log")
            panel.set(yscale="log", title=greek(name))
            style.plain(panel.yaxis)
            style.counts(panel.xaxis, [10**i for i in range(len(str(data["n"])))])
            _zoom(near, data, name)
            near.set_xlabel("bandwidth p")
        axes[0][0].set_ylabel("RMSE")
        axes[1][0].set_ylabel("RMSE, near its minimum")
        style.legend(figure, axes[0])


def _zoom(panel: Any, data: dict[str, Any], name: str) -> None:
    n, b = data["n"], data["b"]
    shown = [row["rmse"] for row in select(data["rows"], workload=name) if row["p"] >= b]
    least = min(optimum(data, name, method)["rmse"] for method in ("bsr", "bisr"))
    height = max(shown) - least
    panel.set(xlim=(b / 8, n), ylim=(least - 0.08 * height, max(shown) + 0.4 * height))
    style.counts(panel.xaxis, [b // 8, b // 4, b // 2, b, 2 * b, 4 * b, n])


def _curve(panel: Any, data: dict[str, Any], name: str, method: str) -> None:
    rows = sorted(select(data["rows"], workload=name, method=method), key=lambda row: row["p"])
    style.curve(panel, method, [row["p"] for row in rows], [row["rmse"] for row in rows], marker="")
    best = optimum(data, name, method)
    style.curve(
        panel,
        method,
        [best["p"]],
        [best["rmse"]],
        linestyle="",
        markersize=7,
        markeredgecolor="white",
        markeredgewidth=0.8,
        label=f"optimum of {METHODS[method]}",
    )


def report(result: dict[str, Any]) -> str:
    """The optima, and the two claims about them."""
    data = result["data"]
    b = data["b"]
    lines, bsr_at_b, bisr_below = [], [], []
    for name in WORKLOADS:
        bsr, bisr = optimum(data, name, "bsr"), optimum(data, name, "bisr")
        bsr_at_b.append(bsr["p"] == b)
        bisr_below.append(bisr["p"] < b)
        lines.append(
            (
                greek(name),
                f"{bsr['p']:,}",
                f"{bsr['rmse']:.3f}",
                f"{bisr['p']:,}",
                f"{bisr['rmse']:.3f}",
            )
        )
    tried = len({row["p"] for row in data["rows"]})
    found = [
        Claim(
            "For BSR the choice p = b is numerically optimal",
            markdown.verdict(all(bsr_at_b)),
            f"p = b = {b:,} is the best of {tried} bandwidths in {sum(bsr_at_b)} of "
            f"{len(bsr_at_b)} workloads, all p within {NEAR} of b among them",
        ),
        Claim(
            "For BISR a smaller bandwidth suffices to achieve an optimal value",
            markdown.verdict(all(bisr_below)),
            "p* = " + ", ".join(line[3] for line in lines) + f", all below b = {b:,}",
        ),
    ]
    header = ("workload", "BSR: best p", "RMSE", "BISR: best p", "RMSE")
    setting = f"n = {data['n']:,}, k = {data['k']}, b = {b:,}."
    return "\n\n".join(
        [setting, _tables.markdown(header, lines, left=(0,)), markdown.claims(found)]
    )
