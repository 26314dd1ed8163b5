"""The results of forgetting.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """Signal over noise, in thousands, by the part of the steps that is remembered."""
    columns = ["epochs", "batch", "method", *(f"{100 * part:g} %" for part in found["parts"])]
    rows = [
        [
            str(row["epochs"]), f"{row['batch']:,}", row["method"],
            *(f"{value / 1000:.1f}" for value in row["ratios"]),
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return _tables.markdown(columns, rows, left=(2,))


def about(found: dict[str, Any]) -> str:
    """What was compared."""
    chosen = "; ".join(
        f"{row['epochs']} epochs: {row['mechanism']}, {row['sampling']}"
        for row in found["rows"]
        if row["method"] != "DP-SGD, Poisson"
    )
    return f"({found['epsilon']:g}, {found['delta']:g})-DP, 50,000 examples. Planner: {chosen}."
