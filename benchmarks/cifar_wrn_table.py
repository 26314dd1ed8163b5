"""The results of cifar_wrn.py as Markdown tables, for the documentation."""

from __future__ import annotations

import statistics
from typing import Any

from corrnoise import _tables

_COLUMNS = (
    "ε", "method", "GPU minutes", "test accuracy", "with last weights", "mechanism",
    "batch", "views", "epochs", "rate", "average", "seeds",
)  # fmt: skip


_TRIED = (
    "ε", "method", "epochs", "views", "batch", "rate", "GPU minutes", "held-out accuracy",
    "mechanism",
)  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Accuracy on the test set of what was run, and on held-out images of what was tried."""
    return f"{_runs(found)}\n\nTried on 5,000 held-out training images:\n\n{_tried(found)}"


def _runs(found: dict[str, Any]) -> str:
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


def _tried(found: dict[str, Any]) -> str:
    """By ε, the best first."""
    every = sorted(found["tried"], key=lambda run: (-run["epsilon"], -run["accuracy"]))
    return _tables.markdown(
        _TRIED,
        [
            [
                f"{run['epsilon']:g}", run["method"],
                f"{run['recipe']['epochs']}", f"{run['recipe']['views']}",
                f"{run['recipe']['batch']}", f"{run['rate']:g}", f"{run['gpu_minutes']:.1f}",
                f"{run['accuracy']:.1f} %", f"{run['mechanism']}, {run['sampling']}",
            ]
            for run in every
        ],
    )  # fmt: skip


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    every = [run for row in found["rows"] for run in row]
    devices = ", ".join(sorted({run["device"] for run in every}))
    dates = ", ".join(sorted({run["date"] for run in every}))
    return f"δ = {found['delta']:g}; what was tried is not part of ε. {devices}, {dates}."
