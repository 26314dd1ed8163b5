"""The results of plans.py as a Markdown table, for the documentation."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """Errors per unit of clip norm, as Markdown."""
    names = list(found["rows"][0]["samplings"])
    rows: list[list[str]] = []
    for each in found["rows"]:
        cells = [
            f"{each['epsilon']:g}",
            f"{each['error']:.4g} ({each['label']}, {each['sampling']})",
        ]
        for name in names:
            own = each["samplings"][name]
            stored = f", {own['vectors']} stored" if own["vectors"] else ""
            cells.append(f"{own['error']:.4g} ({own['label']}{stored})")
        rows.append([*cells, f"{each['seconds']:.1f}", f"{each['busy_seconds']:.1f}"])
    columns = [
        "ε",
        "planner, nothing stored",
        *(f"{name}, any memory" for name in names),
        "seconds",
        "seconds on a busy machine",
    ]
    return _tables.markdown(columns, rows)


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from."""
    return (
        f"Time of the planner on {found['cores']} idle cores, and beside {found['busy']} busy "
        f"processes. {found['date']}."
    )
