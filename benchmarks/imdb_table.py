"""The results of imdb_adamw.py as a Markdown table; the documentation shows it."""

from __future__ import annotations

import statistics
from typing import Any

from corrnoise import _tables

_COLUMNS = ("ε", "trained", "method", "learning rate", "clip norm", "test accuracy", "seeds")


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
                f"{best['clip_norm']:g}",
                f"{shown} %",
                str(len(runs)),
            ]
        )
    return _tables.markdown(_COLUMNS, rows)


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from, in one line."""
    devices = sorted({run["device"] for row in found["rows"] for run in row["runs"]})
    return f"δ = {found['delta']:g}; {', '.join(devices)}, {found['date']}."
