"""The results of cifar_wrn.py as Markdown tables, for the documentation."""

from __future__ import annotations

import statistics
from typing import Any

from corrnoise import _tables

_COLUMNS = (
    "ε", "method", "GPU minutes", "averaged weights", "last weights", "mechanism",
    "batch", "views", "epochs", "rate", "average", "seeds",
)  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Accuracy on the test set of what was run."""
    rows: list[list[str]] = []
    for row in found["rows"]:
        accuracies = [each["accuracy"] for each in row]
        shown = f"{statistics.mean(accuracies):.1f}"
        if len(row) > 1:
            shown += f" ± {statistics.stdev(accuracies) / len(row) ** 0.5:.1f}"
        first, recipe = row[0], row[0]["recipe"]
        rows.append(
            [
                f"{first['epsilon']:g}", first["method"],
                f"{statistics.mean(each['gpu_minutes'] for each in row):.1f}", f"{shown} %",
                f"{statistics.mean(each['plain_accuracy'] for each in row):.1f} %",
                f"{first['mechanism']}, {first['sampling']}",
                f"{recipe['batch']}", f"{recipe['views']}", f"{recipe['epochs']}",
                f"{first['rate']:g}", first["average"], str(len(row)),
            ]
        )  # fmt: skip
    return _tables.markdown(_COLUMNS, rows)


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    every = [run for row in found["rows"] for run in row]
    devices = ", ".join(sorted({run["device"] for run in every}))
    dates = ", ".join(sorted({run["date"] for run in every}))
    held_out = "; ".join(
        f"{run['method']}, {run['recipe']['epochs']} epochs, {run['recipe']['views']} views, "
        f"rate {run['rate']:g}: {run['accuracy']:.1f} % in {run['gpu_minutes']:.1f} minutes"
        for run in found["tried"]
    )
    return (
        f"δ = {found['delta']:g}, test accuracy. Tried on 5,000 held-out training images, which is "
        f"not part of ε: {held_out}. {devices}, {dates}."
    )
