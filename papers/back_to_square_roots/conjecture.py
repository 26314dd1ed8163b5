"""The paper's conjecture, at small n: does a C with b bands attain the optimum?

"We conjecture that optimal multi-epoch participation can always be achieved on a banded lower
triangular matrix with bandwidth b." (Section 4.)
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise._progress import Progress, tracked

from . import markdown, style
from .any_bands import Problem
from .markdown import Claim
from .settings import Row, select

TITLE = "The conjecture on the bandwidth"
# Decay 0.999, the paper's, is hardly felt in so few steps.
WORKLOADS = {
    "prefix sum": {"decay": 1.0, "momentum": 0.0},
    "momentum": {"decay": 1.0, "momentum": 0.9},
    "decay": {"decay": 0.9, "momentum": 0.0},
}
LOOKS = {"prefix sum": ("#000000", "o"), "momentum": ("#009e73", "^"), "decay": ("#0072b2", "s")}
SWEPT = (16, 4, 4)
WRITTEN_OUT = (8, 2, 4)
CLEAR = 1e-6  # a smaller gain counts as none


def compare(name: str, n: int, b: int, k: int) -> Row:
    """The best C of b bands and the best of any number that were found."""
    began = time.perf_counter()
    participation = cn.Participation(n, b, k)
    A = cn.workloads.sgd(n, **WORKLOADS[name])
    problem = Problem(A, participation)
    dense = cn.mechanisms.dense(A, participation)
    banded = problem.search(dense.strategy, b)
    wide = problem.search(banded, n)
    row = {
        "workload": name,
        "n": n,
        "b": b,
        "k": k,
        "dense": dense.rmse(participation),
        "banded": problem.rmse(banded),
        "banded_bound": problem.bound_for_banded(banded),
        "wide": problem.rmse(wide),
        "seconds": round(time.perf_counter() - began, 2),
    }
    if (n, b, k) == WRITTEN_OUT:
        # Rounded, so that a reader can copy it.
        rounded = (wide / np.max(wide)).round(3)
        row |= {"strategy": (rounded + 0.0).tolist(), "strategy_rmse": problem.rmse(rounded)}
    return row


def sweep(name: str, n: int, b: int, k: int) -> list[Row]:
    """The best C found for each number of bands, and the best Toeplitz one."""
    participation = cn.Participation(n, b, k)
    A = cn.workloads.sgd(n, **WORKLOADS[name])
    problem = Problem(A, participation)
    best, rows = np.eye(n), []
    for p in range(1, n + 1):
        best = problem.search(best, p)
        banded = cn.mechanisms.band_mf(A, participation, num_bands=p).rmse(participation)
        rows.append({"p": p, "workload": name, "rmse": problem.rmse(best), "band_mf": banded})
    return rows


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """All cases, and the sweep over the bands for one of them."""
    pairs = [(2, 2), (2, 4), (2, 8), (2, 16), (4, 2), (4, 4), (4, 8), (8, 2), (8, 3), (8, 4)]
    sizes = [WRITTEN_OUT] if smoke else [(k * b, b, k) for k, b in pairs]
    cases = [(name, *size) for name in WORKLOADS for size in sizes]
    swept = WRITTEN_OUT if smoke else SWEPT
    rows = [compare(*case) for case in tracked(cases, progress)]
    return {"swept": swept, "sweep": sweep("prefix sum", *swept), "rows": rows}


def gain(row: Row) -> float:
    """How far a wider C is below every C of b bands, as a ratio less 1; positive if it is."""
    return row["banded_bound"] / row["wide"] - 1.0


def draw(result: dict[str, Any], folder: Path) -> None:
    """The error against the bands; and what a wider C gains, case by case."""
    data = result["data"]
    with style.sheet(result, folder, 1, 2, (9.4, 3.9)) as (_, axes):
        _draw_sweep(axes[0][0], data)
        _draw_gains(axes[0][1], data)


def _draw_sweep(panel: Any, data: dict[str, Any]) -> None:
    n, b, k = data["swept"]
    best = min(row["rmse"] for row in data["sweep"])
    for key, colour, marker, label in (
        ("band_mf", style.COLOURS["band_mf"], "^", "Toeplitz C (Band-MF)"),
        ("rmse", "#000000", "o", "any lower-triangular C"),
    ):
        rows = [row for row in data["sweep"] if row[key] > best * (1.0 + 1e-6)]
        panel.plot(
            [row["p"] for row in rows],
            [row[key] / best - 1.0 for row in rows],
            color=colour,
            marker=marker,
            label=label,
        )
    style.marked(panel, b, "p = b")
    panel.set(yscale="log", xlabel="bands p of C", ylabel="RMSE above the best C found")
    panel.set_title(f"prefix sum, n = {n}, b = {b}, k = {k}")
    style.percents(panel.yaxis)
    panel.set_xticks(range(1, n + 1, max(1, n // 8)))
    panel.legend()


def _draw_gains(panel: Any, data: dict[str, Any]) -> None:
    dashes = {2: ":", 4: "--", 8: "-"}
    for name, (colour, marker) in LOOKS.items():
        for k, dash in dashes.items():
            rows = [
                row for row in select(data["rows"], workload=name, k=k) if row["n"] == k * row["b"]
            ]
            rows = [row for row in rows if gain(row) > CLEAR]
            x, y = [row["b"] for row in rows], [gain(row) for row in rows]
            panel.plot(x, y, color=colour, marker=marker, linestyle=dash)
    for name, (colour, marker) in LOOKS.items():
        label = f"α = {WORKLOADS[name]['decay']:g}, β = {WORKLOADS[name]['momentum']:g}"
        panel.plot([], [], color=colour, marker=marker, linestyle="", label=label)
    for k, dash in dashes.items():
        panel.plot([], [], color="#555555", linestyle=dash, label=f"k = {k}")
    panel.set(xscale="log", yscale="log", xlabel="separation b, with n = kb steps")
    panel.set_ylim(bottom=CLEAR)
    panel.set_ylabel("what a C wider than b gains")
    panel.set_title("best of b bands against any C")
    style.counts(panel.xaxis, sorted({row["b"] for row in data["rows"]}))
    style.percents(panel.yaxis)
    panel.legend(ncols=2, loc="lower right", fontsize=8)


def report(result: dict[str, Any]) -> str:
    """What was found, with the smallest example written out."""
    data = result["data"]
    rows = data["rows"]
    slack = [row["banded"] / row["banded_bound"] - 1.0 for row in rows]
    wins = [row for row in rows if gain(row) > CLEAR]
    losses = [row for row in rows if gain(row) <= CLEAR]
    most = max(rows, key=gain)
    n, b, k = data["swept"]
    at_b = [row for row in data["sweep"] if row["p"] >= b]
    toeplitz_gain = max(at_b[0]["band_mf"] / row["band_mf"] for row in at_b)
    small = next(row for row in rows if "strategy" in row and row["workload"] == "prefix sum")
    found = [
        Claim(
            "Optimal multi-epoch participation can always be achieved on a banded lower "
            "triangular matrix with bandwidth b (a conjecture)",
            markdown.verdict(not wins, otherwise="differs, by little"),
            f"in {len(wins)} of {len(rows)} cases a wider C is below what any C of b bands can "
            f"reach, by {100 * gain(min(wins, key=gain)):.1g} to {100 * gain(most):.2g} %; the "
            f"best C of b bands is known to {100 * max(slack):.1g} %",
        ),
        Claim(
            "No benefit from a larger bandwidth than b for Band-MF (a Toeplitz C)",
            markdown.verdict(toeplitz_gain < 1.0 + 1e-4),
            f"a search from the optimum of p = b gains {100 * (toeplitz_gain - 1.0):.1g} % with up "
            f"to n bands, at n = {n}, b = {b}, k = {k}",
        ),
    ]
    parts = [
        "Both optima are found numerically, and the one of b bands is bracketed by a bound from "
        "convex duality that holds for every C of at most b bands (its derivation is at the "
        "head of `any_bands.py`). No proof is claimed: the bounds are evaluated in float64.",
        markdown.claims(found),
    ]
    if losses:
        where = ", ".join(
            f"n = {row['n']}, b = {row['b']}, k = {row['k']} ({row['workload']})" for row in losses
        )
        parts.append(f"No wider C was found to gain more than {100 * CLEAR:g} % for {where}.")
    n, b, k = WRITTEN_OUT
    parts += [
        f"A small example, for the prefix sum with n = {n}, b = {b} and "
        f"k = {k}: no C of {b} bands has an RMSE below {small['banded_bound']:.4f}, and this "
        f"wider one has {small['strategy_rmse']:.4f}:",
        "\n".join(
            "    " + "  ".join(f"{entry:6.3f}" if entry else "     ·" for entry in line)
            for line in small["strategy"]
        ),
    ]
    return "\n\n".join(parts)
