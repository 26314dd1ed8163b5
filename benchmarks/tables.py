"""Plain aligned tables."""

from __future__ import annotations

import math
from collections.abc import Sequence


def render(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """The table as text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [title, "=" * len(title)]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, *([note] if note else []), ""])


def number(value: float | None, digits: int = 3, suffix: str = "") -> str:
    """A number to some significant digits, or a dash where there is none."""
    if value is None:
        return "-"
    whole = math.floor(math.log10(abs(value))) + 1 if value else 1
    decimals = max(digits - whole, 0)
    return f"{value:,.{decimals}f}{suffix}"
