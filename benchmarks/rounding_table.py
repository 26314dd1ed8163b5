"""What counting rounding costs, as a Markdown table; the documentation shows it."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """The results as Markdown: median and worst example for each precision."""
    kinds = list(next(iter(found["models"].values())))
    rows = [
        [name, *(" / ".join(map(_percent, (case[k]["median"], case[k]["worst"]))) for k in kinds)]
        for name, case in found["models"].items()
    ]
    return _tables.markdown(["model", *kinds], rows)


def about(found: dict[str, Any]) -> str:
    """Where the numbers come from, in one line."""
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    return f"Median / worst of {found['examples']} examples; {versions}, {found['date']}."


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share >= 1e-4 else "< 0.01 %"
