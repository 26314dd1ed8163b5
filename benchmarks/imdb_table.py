"""The results of imdb_adamw.py as a Markdown table; the documentation shows it."""

from __future__ import annotations

import statistics
from typing import Any

from corrnoise import _tables

POISSON = "DP-SGD Poisson"
_COLUMNS = ("ε", "trained", "method", "rate", "which", "clip norm", "test accuracy", "seeds")


def table(found: dict[str, Any]) -> str:
    """Mean and standard error of the test accuracy, at the rate and clip norm that were tuned."""
    rows: list[list[str]] = []
    for row in found["rows"]:
        runs = row["runs"]
        accuracies = [run["accuracy"] for run in runs]
        shown = f"{statistics.mean(accuracies):.2f}"
        if len(runs) > 1:
            shown += f" ± {statistics.stdev(accuracies) / len(runs) ** 0.5:.2f}"
        best = runs[0]
        rows.append(
            [
                f"{row['epsilon']:g}",
                row["part"],
                row["method"],
                f"{best['learning_rate']:.2g}",
                best["schedule"],
                f"{best['clip_norm']:g}",
                f"{shown} %",
                str(len(runs)),
            ]
        )
    return _tables.markdown(_COLUMNS, rows)


def leads(found: dict[str, Any]) -> list[str]:
    """For every pair of rows, how far the planner's choice is above DP-SGD with Poisson batches."""
    means = {
        (row["epsilon"], row["part"], *row["method"].split(", ")): statistics.mean(
            run["accuracy"] for run in row["runs"]
        )
        for row in found["rows"]
    }
    return [
        f"{mean - means[epsilon, part, optimizer, POISSON]:+.2f} (ε = {epsilon:g}, {part}, "
        f"{optimizer})"
        for (epsilon, part, optimizer, noise), mean in means.items()
        if noise != POISSON and (epsilon, part, optimizer, POISSON) in means
    ]


def about(found: dict[str, Any]) -> str:
    """What the planner's choice gains, and where the numbers come from."""
    devices = sorted({run["device"] for row in found["rows"] for run in row["runs"]})
    return (
        f"Points of the planner's choice above DP-SGD with Poisson batches: "
        f"{', '.join(leads(found))}. "
        f"δ = {found['delta']:g}; {', '.join(devices)}, {found['date']}."
    )
