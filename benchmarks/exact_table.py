"""The results of exact.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """Milliseconds of plain noise and of an exact release, and entries that float64 left open."""
    columns = ["parameters", "p", "plain noise, ms", "exact release, ms", "ratio", "undecided"]
    rows = [
        [
            f"{row['parameters']:,}", str(row["bands"]), _digits(row["plain_ms"]),
            _digits(row["exact_ms"]), f"{row['ratio']:.1f}",
            f"{row['undecided']} of {row['entries']:,}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return _tables.markdown(columns, rows)


def _digits(milliseconds: float) -> str:
    """Three of them, or all before the point."""
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    return f"{found['device']}, {found['threads']} threads, torch {found['torch']}."
