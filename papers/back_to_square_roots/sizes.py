"""Figure 3 of the paper: the error of every method against the number of steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _tables
from corrnoise._progress import Progress, tracked
from corrnoise.mechanisms import ToeplitzMechanism

from . import markdown, style
from .markdown import Claim
from .settings import METHODS, WORKLOADS, Row, epochs, greek, measure, select, workload

TITLE = "The error against the number of steps"
PARTICIPATIONS = (16, 4)  # the paper's rows
NUM_BUFFERS = 4
NUM_BANDS = 64  # of Band-Inv-MF, or b/4 where that is less
CLOSE = 0.05


def makers(
    A: cn.Workload, participation: cn.Participation
) -> list[Callable[[], ToeplitzMechanism]]:
    """Every method with the bandwidth that it is compared at."""
    m, b = cn.mechanisms, participation.min_sep
    return [
        lambda: m.dp_sgd(A),
        lambda: m.bsr(A, num_bands=b),
        lambda: m.bisr(A, participation, num_bands="best"),
        lambda: m.blt(A, participation, num_buffers=NUM_BUFFERS),
        lambda: m.band_mf(A, participation, num_bands=b),
        lambda: m.band_inv_mf(A, participation, num_bands=max(1, min(NUM_BANDS, b // 4))),
    ]


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """Every method at every size, and the lower bound."""
    sizes = [128, 256] if smoke else [2**i for i in range(10, 17)]
    cases = [(k, name, n) for k in PARTICIPATIONS for name in WORKLOADS for n in sizes]
    rows: list[Row] = []
    bounds: list[Row] = []
    for k, name, n in tracked(cases, progress):
        A, participation = workload(name, n), epochs(n, k)
        rows += [measure(name, participation, make) for make in makers(A, participation)]
        bounds.append({"workload": name, "n": n, "k": k, "rmse": cn.lower_bound(A, participation)})
    return {"rows": rows, "bounds": bounds}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Six panels, each with DP-SGD, on a scale of its own, in a strip above."""
    data = result["data"]
    with style.sheet(result, folder, 4, 3, (10.5, 7.6), heights=(1, 3.4) * 2) as (figure, axes):
        figure.get_layout_engine().set(hspace=0.0, h_pad=0.03)
        for k, strips, line in zip(PARTICIPATIONS, axes[0::2], axes[1::2], strict=True):
            for name, strip, panel in zip(WORKLOADS, strips, line, strict=True):
                _strip(strip, data, k, name)
                _panel(panel, data, k, name)
            line[0].set_ylabel("RMSE")
        for panel in axes[-1]:
            panel.set_xlabel("steps n")
        style.legend(figure, axes.flat)


def _strip(strip: Any, data: dict[str, Any], k: int, name: str) -> None:
    rows = select(data["rows"], workload=name, k=k, method="dp_sgd")
    y = [row["rmse"] for row in rows]
    style.curve(strip, "dp_sgd", [row["n"] for row in rows], y)
    strip.set(xscale="log", yscale="log", ylim=(0.8 * min(y), 1.3 * max(y)))
    strip.set_title(f"k = {k},  {greek(name)}")
    strip.spines["bottom"].set_visible(False)
    style.counts(strip.xaxis, [])
    style.plain(strip.yaxis, at_least=2)


def _panel(panel: Any, data: dict[str, Any], k: int, name: str) -> None:
    bounds = select(data["bounds"], workload=name, k=k)
    sizes = [row["n"] for row in bounds]
    style.below(panel, sizes, [row["rmse"] for row in bounds])
    top = 0.0
    for method in METHODS:
        if method != "dp_sgd":
            y = [row["rmse"] for row in select(data["rows"], workload=name, k=k, method=method)]
            style.curve(panel, method, sizes, y)
            top = max(top, *y)
    low = min(row["rmse"] for row in bounds)
    panel.set(xscale="log", yscale="log", ylim=(0.9 * low, 1.05 * top))
    style.counts(panel.xaxis, [n for n in sizes if n.bit_length() % 2])
    style.plain(panel.yaxis)


def report(result: dict[str, Any]) -> str:
    """The errors at the largest n, and the claims on them."""
    data = result["data"]
    largest = max(row["n"] for row in data["bounds"])
    lines = []
    for bound in select(data["bounds"], n=largest):
        rows = {
            row["method"]: row
            for row in select(data["rows"], n=largest, k=bound["k"], workload=bound["workload"])
        }
        lines.append(
            (
                f"k = {bound['k']}, {greek(bound['workload'])}",
                *(f"{rows[method]['rmse']:,.3f}" for method in METHODS),
                f"{bound['rmse']:,.3f}",
            )
        )
    labels = dict(METHODS)
    labels["bisr"] += " p*"
    labels["blt"] += f" d={NUM_BUFFERS}"
    labels["band_inv_mf"] += f" p={NUM_BANDS}"
    labels["bsr"] += " p=b"
    labels["band_mf"] += " p=b"
    return "\n\n".join(
        [
            f"At n = {largest:,} (Band-Inv-MF has p = {NUM_BANDS}, or b/4 where that is less):",
            _tables.markdown((" ", *labels.values(), "bound"), lines, left=(0,)),
            markdown.claims(_claims(data, largest)),
            _honest(data["rows"]),
        ]
    )


def ratios(data: dict[str, Any], one: str, other: str, **wanted: object) -> list[float]:
    """The error of one method over that of another, in every setting."""
    ones = select(data["rows"], method=one, **wanted)
    others = select(data["rows"], method=other, **wanted)
    return [a["rmse"] / b["rmse"] for a, b in zip(ones, others, strict=True)]


def _claims(data: dict[str, Any], largest: int) -> list[Claim]:
    few, many = min(PARTICIPATIONS), max(PARTICIPATIONS)
    to_bsr = ratios(data, "bisr", "bsr")
    to_bsr_few, to_bsr_many = (ratios(data, "bisr", "bsr", k=k) for k in (few, many))
    wins = [ratio < 1.0 for ratio in to_bsr_many]
    by_workload = ", ".join(
        f"{markdown.percent(ratios(data, 'bisr', 'bsr', k=many, workload=name, n=largest)[0])} "
        f"({greek(name)})"
        for name in WORKLOADS
    )
    to_blt = ratios(data, "bisr", "blt")
    band_mf = ratios(data, "band_mf", "bisr", k=many)
    slowest = max(row["seconds"] for row in select(data["rows"], method="band_mf", n=largest))
    blt = [row for row in select(data["rows"], method="blt") if row["workload"] != "prefix sum"]
    return [
        Claim(
            "BISR consistently matches or exceeds BSR in quality across all regimes",
            markdown.verdict(max(to_bsr) <= 1.0 + 0.01, otherwise="holds in part"),
            f"RMSE of BISR over BSR: {markdown.span(to_bsr_few)} at k = {few}, "
            f"{markdown.span(to_bsr_many)} at k = {many}",
        ),
        Claim(
            f"BISR outperforms BSR for many participations, most at k = {many}",
            markdown.verdict(all(wins), otherwise="holds in part"),
            f"BISR is below BSR in {sum(wins)} of {len(wins)} settings with k = {many}; at "
            f"n = {largest:,}: {by_workload}",
        ),
        Claim(
            "BISR achieves RMSE comparable to that of BLT",
            markdown.verdict(max(abs(r - 1.0) for r in to_blt) <= CLOSE),
            f"RMSE of BISR over BLT: {markdown.span(to_blt)}",
        ),
        Claim(
            f"Band-MF achieves slightly better RMSE at k = {many}",
            markdown.verdict(max(band_mf) < 1.0),
            f"RMSE of Band-MF over BISR at k = {many}: {markdown.span(band_mf)}",
        ),
        Claim(
            "Band-MF is impractical beyond n = 4096",
            markdown.verdict(slowest > 60.0),
            f"at n = {largest:,} it takes {slowest:.1f} s at most",
        ),
        Claim(
            "BLT has only been described, analysed and implemented for prefix sums",
            markdown.verdict(not blt, otherwise="no longer so"),
            f"optimised for momentum and for decay as well, in {len(blt)} settings",
        ),
    ]


def _honest(rows: list[Row]) -> str:
    gaps = [row["gap"] for row in rows if row["gap"] > 0.0]
    text = (
        f"All {len(rows)} errors are certified: the sensitivity is exact in {len(rows) - len(gaps)}"
    )
    if gaps:
        text += f" and an upper bound in {len(gaps)}, with at most {100 * max(gaps):.2g} % of slack"
    for method, label in METHODS.items():
        stopped = [row["converged"] is False for row in select(rows, method=method)]
        if any(stopped):
            text += f"; the optimiser stopped at its limit in {sum(stopped)} of {len(stopped)} "
            text += f"runs of {label}"
    return text + "."
