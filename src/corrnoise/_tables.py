"""The table printer: tables as aligned text or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def text(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table of aligned columns; those in ``left`` are aligned left, the others right.

    >>> print(text(["name", "error"], [["dp_sgd", "7.5"], ["bisr", "12"]]))
    name    error
    ------  -----
    dp_sgd    7.5
    bisr       12
    """
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = [columns, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] | None = None
) -> str:
    """A Markdown table; all columns are aligned left, unless ``left`` names those that are.

    >>> print(markdown(["name", "error"], [["bisr", "12"]], left=(0,)))
    | name | error |
    | --- | ---: |
    | bisr | 12 |
    """
    rule = ["---" if left is None or i in left else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (columns, rule, *rows))
