"""The results of forgetting.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables

BASE = "DP-SGD, Poisson"


def table(found: dict[str, Any]) -> str:
    """Signal over noise relative to DP-SGD, by the part of the steps that is remembered."""
    parts = [f"{100 * part:g} %" for part in found["parts"]]
    rows = [
        [
            f"{row['epsilon']:g}", str(row["epochs"]), weights, name,
            *(
                f"{ours / theirs:.2f}"
                for ours, theirs in zip(
                    method[weights], row["methods"][BASE][weights], strict=True
                )
            ),
        ]
        for row in found["rows"]
        for weights in ("averaged", "last")
        for name, method in row["methods"].items()
        if name != BASE
    ]  # fmt: skip
    return _tables.markdown(["ε", "epochs", "weights", "method", *parts], rows, left=(2, 3))


def about(found: dict[str, Any]) -> str:
    """What was compared."""
    chosen = "; ".join(
        f"ε = {row['epsilon']:g}, {row['epochs']} epochs: {method['mechanism']}, "
        f"{method['sampling']}"
        for row in found["rows"]
        for name, method in row["methods"].items()
        if name == "planner"
    )
    return (
        f"50,000 examples, batches of {found['batch']:,}, momentum {found['momentum']:g}, "
        f"δ = {found['delta']:g}. Without a stated memory the planner chooses: {chosen}."
    )
