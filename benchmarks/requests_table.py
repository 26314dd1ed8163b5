"""The results of requests.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables

_COLUMNS = (
    "examples", "batch", "epochs", "ε", "chosen", "error", "Poisson DP-SGD", "priced",
    "best of them", "excess",
)  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """The plan's choice, and the best of what was priced in full."""
    rows = [
        [
            f"{row['num_examples']:,}", f"{row['batch_size']}", f"{row['epochs']}",
            f"{row['epsilon']:g}", row["chosen"], f"{row['error']:.4g}",
            f"{row['priced']['dp_sgd, poisson']:.4g}", f"{len(row['priced'])}", row["least"],
            f"{100 * row['excess']:.2f} %",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return _tables.markdown(_COLUMNS, rows, left=(4, 8))


def about(found: dict[str, Any]) -> str:
    """What the table shows, and when it was made."""
    rows = found["rows"]
    same = sum(row["chosen"] == row["least"] for row in rows)
    return (
        f"In {same} of {len(rows)} requests the plan's choice is the best alternative that was "
        f"priced. Its error is at most {100 * max(row['excess'] for row in rows):.2f} % above the "
        f"smallest error, which was computed with new draws. {found['date']}."
    )
