"""Tables with a title and a note, and numbers for their cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corrnoise import _tables


def titled(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> str:
    """A table as text under its title; the first column to the left, the others to the right."""
    parts = [title, "=" * len(title), _tables.text(columns, rows), *([note] if note else []), ""]
    return "\n".join(parts)


def number(value: float | None, digits: int = 3, suffix: str = "") -> str:
    """A number to some significant digits, or a dash where there is none."""
    if value is None:
        return "-"
    whole = math.floor(math.log10(abs(value))) + 1 if value else 1
    decimals = max(digits - whole, 0)
    return f"{value:,.{decimals}f}{suffix}"
