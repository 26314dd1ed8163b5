"""The results of the benchmark of whole steps as a Markdown table; the documentation shows it."""

from __future__ import annotations

from typing import Any

from corrnoise import _tables


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows: list[list[str]] = []
    for name, case in found["models"].items():
        times, memory = case["milliseconds"], case["gibibytes"]
        base = times["plain"]
        stock = [times[v] / base for v in times if v.startswith("Opacus")]
        both = ("ours", "ours, captured")
        ratio = min(times[v] for v in both if v in times) / base
        rows.append([
            name, f"{base:.1f}", f"{min(stock):.2f}" if stock else "none runs",
            *(f"{times[v] / base:.2f}" if v in times else "failed" for v in both),
            f"{case['goal']:.2f}", "met" if ratio <= case["goal"] else f"missed, {ratio:.2f}",
            *(f"{memory[v] / memory['plain']:.2f}" if v in memory else "failed" for v in both),
        ])  # fmt: skip
    headings = [
        "model", "plain, ms", "Opacus, best", "ours", "ours, captured", "goal", "result",
        "memory, ours", "memory, captured",
    ]  # fmt: skip
    return _tables.markdown(headings, rows)
