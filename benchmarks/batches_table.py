"""The results of batches.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables

BASE, CHOICE = "DP-SGD, Poisson", "planner's choice"


def table(found: dict[str, Any]) -> str:
    """Signal over noise, relative to DP-SGD with the smallest batches at the same budget."""
    every = found["rows"]
    sizes = sorted({row["batch"] for row in every})
    steps = {row["batch"]: row["steps"] for row in every}
    values = {
        (row["epsilon"], row["batch"], name): method["signal_over_noise"]
        for row in every
        for name, method in row["methods"].items()
    }
    rows = [
        [
            f"{epsilon:g}",
            name,
            *(f"{values[epsilon, b, name] / values[epsilon, sizes[0], BASE]:.2f}" for b in sizes),
        ]
        for epsilon in sorted({row["epsilon"] for row in every})
        for name in (BASE, CHOICE)
    ]
    columns = [f"batch {size}, {steps[size]} steps" for size in sizes]
    return _tables.markdown(["ε", "method", *columns], rows, left=(1,))


def about(found: dict[str, Any]) -> str:
    """What was compared."""
    return (
        f"{found['examples']:,} examples, {found['epochs']} epochs, momentum "
        f"{found['momentum']:g}, decay {found['decay']:g}, δ = {found['delta']:g}; the average of "
        "the last tenth of the weights (`benchmarks/batches.py`)."
    )
