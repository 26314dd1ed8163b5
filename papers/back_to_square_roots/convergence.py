"""Figure 6 of the paper: the objective of Band-Inv-MF, step by step of its optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise._progress import Progress, tracked

from . import markdown, style
from .markdown import Claim
from .settings import WORKLOADS, Row, epochs, greek, select, workload

TITLE = "The convergence of Band-Inv-MF"
PARTICIPATIONS = (4, 16)
BANDS = {4: "-", 16: (0, (3, 1.5))}
SHADES = ("#f2b48a", "#d55e00", "#6e2f00")  # lighter and darker than the colour of Band-Inv-MF
STEPS = 20  # what the paper's listing takes
SHOWN = 60
FLOOR = 1e-5


def run(*, smoke: bool, progress: Progress | None) -> dict[str, Any]:
    """The error that is minimised, at the start and after each step."""
    sizes = [128, 256] if smoke else [1024, 4096, 16384]
    bands = [4] if smoke else list(BANDS)
    cases = [
        (k, name, n, p) for k in PARTICIPATIONS for name in WORKLOADS for p in bands for n in sizes
    ]
    rows: list[Row] = []
    for k, name, n, p in tracked(cases, progress):
        participation = epochs(n, k)
        objective: list[float] = []
        m = cn.mechanisms.band_inv_mf(
            workload(name, n), participation, num_bands=p, trace=objective.append
        )
        rows.append(
            {
                "workload": name,
                "n": n,
                "k": k,
                "p": p,
                "final": m.rmse(participation),
                "gap": m.sensitivity(participation).gap,
                "steps": len(objective) - 1,
                "objective": [float(f"{value:.10g}") for value in objective],
            }
        )
    return {"sizes": sizes, "rows": rows}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Six panels; how far the objective is above the final error."""
    data = result["data"]
    with style.sheet(result, folder, 2, 3, (10.5, 6.0)) as (figure, axes):
        for k, line in zip(PARTICIPATIONS, axes, strict=True):
            for name, panel in zip(WORKLOADS, line, strict=True):
                _panel(panel, data, k, name)
            line[0].set_ylabel("excess over the final RMSE")
        for panel in axes[-1]:
            panel.set_xlabel("steps of the optimiser")
        style.legend(figure, axes.flat)


def _panel(panel: Any, data: dict[str, Any], k: int, name: str) -> None:
    style.marked(panel, STEPS, f"{STEPS} steps")
    for row in select(data["rows"], workload=name, k=k):
        excess = [max(value / row["final"] - 1.0, FLOOR / 10) for value in row["objective"]]
        panel.plot(
            excess[: SHOWN + 1],
            color=SHADES[data["sizes"].index(row["n"])],
            linestyle=BANDS[row["p"]],
            label=f"n = {row['n']:,}, p = {row['p']}",
        )
    panel.set(yscale="log", ylim=(FLOOR, 10.0), xlim=(0, SHOWN))
    style.percents(panel.yaxis)
    panel.set_title(f"k = {k},  {greek(name)}")


def after(row: Row, steps: int) -> float:
    """The objective after this many steps, over the final error."""
    return row["objective"][min(steps, row["steps"])] / row["final"]


def needed(row: Row, excess: float) -> int:
    """After how many steps the objective stays this close to the final error."""
    far = [i for i, value in enumerate(row["objective"]) if abs(value / row["final"] - 1) > excess]
    return far[-1] + 1 if far else 0


def report(result: dict[str, Any]) -> str:
    """How close 20 steps come."""
    rows = result["data"]["rows"]
    at = [after(row, STEPS) for row in rows]
    excess = 0.01
    found = [
        Claim(
            f"In general {STEPS} steps are sufficient for the procedure to converge",
            markdown.verdict(max(abs(ratio - 1.0) for ratio in at) < excess),
            f"after {STEPS} steps the objective is {markdown.span(at, 2)} from the final RMSE in "
            f"{len(rows)} settings; to stay within 1 % takes "
            f"{min(needed(r, excess) for r in rows)} to {max(needed(r, excess) for r in rows)} "
            f"steps, within 0.1 % up to {max(needed(r, excess / 10) for r in rows)}",
        )
    ]
    bands, sizes = (sorted({row[key] for row in rows}) for key in ("p", "n"))
    setting = (
        f"p = {', '.join(map(str, bands))}; n = {', '.join(f'{n:,}' for n in sizes)}. The "
        "optimiser is SciPy's L-BFGS with analytic gradients, started at BISR like the paper's; "
        "its steps are not those of the paper's listing, but of the same method."
    )
    return "\n\n".join([setting, markdown.claims(found)])
