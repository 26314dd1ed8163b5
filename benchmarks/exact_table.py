"""The results of exact.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """Milliseconds of plain noise and of an exact release, and entries that float64 left open."""
    columns = ["parameters", "p", "plain noise, ms", "exact release, ms", "ratio", "undecided"]
    rows = [
        [
            f"{row['parameters']:,}", str(row["bands"]), f"{row['plain_ms']:.0f}",
            f"{row['exact_ms']:.0f}", f"{row['ratio']:.1f}",
            f"{row['undecided']} of {row['entries']:,}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return _tables.markdown(columns, rows)


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    return f"{found['device']}, {found['threads']} threads, torch {found['torch']}."
