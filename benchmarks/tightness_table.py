"""The results of tightness.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """Certified noise, noise that is enough, their ratio, the bound without draws, CPU seconds."""
    columns = ["C", "bins", "ε", "δ", "certified", "enough", "ratio", "without draws", "CPU s"]
    rows = [
        [
            row["mechanism"], f"{row['bins']:,}", f"{row['epsilon']:g}", f"{row['delta']:g}",
            f"{row['certified']:.4g}" + ("" if row["kind"] == "certified" else " (bound)"),
            _with_error(row), f"{row['ratio']:.3f}", f"{row['bound']:.4g}",
            f"{row['cpu_seconds']:.0f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return _tables.markdown(columns, rows, left=(0,))


def _with_error(row: dict[str, Any]) -> str:
    error = row["relative_error"]
    return f"{row['enough']:.4g}" + (f" ± {100 * error:.1f} %" if error else "")


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    worst = max(found["rows"], key=lambda row: row["ratio"])
    slowest = max(row["cpu_seconds"] for row in found["rows"])
    above = sum(row["certified"] > 1.0002 * row["bound"] for row in found["rows"])
    return (
        f"Noise multipliers for prefix sums and {found['epochs']} epochs. The largest ratio is "
        f"{worst['ratio']:.3f} ({worst['mechanism']}, {worst['bins']:,} bins, "
        f"ε = {worst['epsilon']:g}); {above} of {len(found['rows'])} are above the bound without "
        f"draws; the slowest took {slowest:.0f} CPU seconds ({found['machine']})."
    )
