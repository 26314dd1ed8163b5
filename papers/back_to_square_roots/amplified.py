"""What the paper leaves open: coefficients optimised for the noise under amplification.

Band-Inv-MF minimises the error of fixed batches. Here the same p coefficients minimise the error
under balls-in-bins at one budget, and both are priced by the accountant, certified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _tables
from corrnoise._progress import Progress, tracked

from . import markdown, noise_table, style
from .record import SEED
from .settings import METHODS, Row, select

TITLE = "Coefficients optimised under amplification"
BANDS, WIDE = 4, 32
BUDGETS = (0.5, 1.0, 2.0, 4.0, 9.0)
AMPLIFIED = "amplified"
NAMES = METHODS | {AMPLIFIED: "Band-Inv-MF, optimised under amplification"}
# Method and bands, with how each is drawn.
CASES = {
    ("band_inv_mf", BANDS): {},
    ("bisr", BANDS): {},
    ("bisr", WIDE): {"linestyle": "--", "alpha": 0.6},
    (AMPLIFIED, BANDS): {"color": "#000000", "marker": "*", "markersize": 8.0},
}
# α and β: the paper's CIFAR-10 run, and a prefix sum of as many steps.
WORKLOADS = {
    "CIFAR-10": noise_table.DATASETS["CIFAR-10"],
    "prefix sum": {"momentum": 0.0, "decay": 1.0},
}


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """Every case at every budget, for both workloads."""
    part = cn.Participation(120, 30, 4) if smoke else cn.Participation(980, 98, 10)
    budgets = BUDGETS[1:2] if smoke else BUDGETS
    names = list(WORKLOADS)[1:] if smoke else WORKLOADS
    cases = [(name, epsilon) for name in names for epsilon in budgets]
    rows: list[Row] = []
    for name, epsilon in tracked(cases, progress):
        rows += [_row(name, epsilon, part, *case, smoke) for case in CASES]
    return {
        "n": part.num_steps,
        "b": part.min_sep,
        "k": part.max_participations,
        "delta": noise_table.DELTA,
        "rows": rows,
    }


def _row(
    name: str, epsilon: float, part: cn.Participation, method: str, bands: int, smoke: bool
) -> Row:
    own = WORKLOADS[name]
    A = cn.workloads.sgd(part.num_steps, momentum=own["momentum"], decay=own["decay"])
    budget = {"epsilon": epsilon, "delta": noise_table.DELTA}
    if method == AMPLIFIED:
        made = cn.mechanisms.amplified_band_inv_mf(A, part, num_bands=bands, **budget)
    else:
        made = cn.mechanisms.build(method, A, part, bands)
    found = cn.calibrate(
        made.in_float32(),
        part,
        sampling="balls-in-bins",
        seed=SEED,
        samples=100_000 if smoke else None,
        **budget,
    )
    return {
        "workload": name,
        "epsilon": epsilon,
        "method": method,
        "p": bands,
        "noise_multiplier": found.noise_multiplier,
        "error": found.error,
        "kind": found.kind,
        "coefficients": made.noising_matrix(bands)[:, 0].tolist(),
    }


def draw(result: dict[str, Any], folder: Path) -> None:
    """The error over Band-Inv-MF's, against ε."""
    rows = result["data"]["rows"]
    names = list(dict.fromkeys(row["workload"] for row in rows))
    with style.sheet(result, folder, 1, len(names), (8.5, 3.8)) as (figure, axes):
        for panel, name in zip(axes[0], names, strict=True):
            mine = select(rows, workload=name)
            base = select(mine, method="band_inv_mf", p=BANDS)
            for (method, bands), look in CASES.items():
                found = select(mine, method=method, p=bands)
                ratios = [a["error"] / b["error"] for a, b in zip(found, base, strict=True)]
                known = method if method in METHODS else "band_inv_mf"
                style.curve(
                    panel,
                    known,
                    [row["epsilon"] for row in found],
                    ratios,
                    label=f"{NAMES[method]}, p = {bands}",
                    **look,
                )
            panel.set(xscale="log", title=name, xlabel="ε")
            style.plain(panel.xaxis)
        axes[0][0].set_ylabel(f"error over Band-Inv-MF's, p = {BANDS}")
        style.legend(figure, axes[0])


def report(result: dict[str, Any]) -> str:
    """The errors, and what optimising gains."""
    data = result["data"]
    header = ["", *(f"{NAMES[method]}, p = {bands}" for method, bands in CASES)]
    lines: list[list[str]] = []
    gains: list[float] = []
    to_wide: list[float] = []
    for name, epsilon in dict.fromkeys((row["workload"], row["epsilon"]) for row in data["rows"]):
        mine = select(data["rows"], workload=name, epsilon=epsilon)
        error = {(row["method"], row["p"]): row["error"] for row in mine}
        lines.append([f"{name}, ε = {epsilon:g}", *(f"{error[case]:.2f}" for case in CASES)])
        gains.append(error[AMPLIFIED, BANDS] / error["band_inv_mf", BANDS])
        to_wide.append(error[AMPLIFIED, BANDS] / error["bisr", WIDE])
    return "\n\n".join(
        [
            "**The paper's open question**, whether coefficients can be optimised with "
            "amplification accounted for. Expected error under balls-in-bins at "
            f"δ = {data['delta']:g}, n = {data['n']}, b = {data['b']}, k = {data['k']}, certified:",
            _tables.markdown(header, lines, left=(0,)),
            f"The same {BANDS} bands with other coefficients: {markdown.span(gains)} against "
            f"Band-Inv-MF; {markdown.span(to_wide)} against BISR with {WIDE} bands, which takes "
            f"{WIDE // BANDS} times as many draws of noise.",
        ]
    )
