"""Markdown for the README: tables, and what became of a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """What the paper says, whether it held here, and the numbers."""

    text: str
    verdict: str
    evidence: str


def verdict(holds: bool, *, otherwise: str = "differs") -> str:
    """In words."""
    return "holds" if holds else otherwise


def claims(found: Sequence[Claim]) -> str:
    """The claims as a table."""
    return table(
        ("the paper", "here", "numbers"),
        [(claim.text, f"**{claim.verdict}**", claim.evidence) for claim in found],
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    """A Markdown table; with ``numbers`` all columns but the first go to the right."""
    rule = ["---", *(("---:" if numbers else "---") for _ in header[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def percent(ratio: float, digits: int = 1) -> str:
    """A ratio as a signed difference in per cent."""
    value = round(100.0 * (ratio - 1.0), digits)
    return f"{value:+.{digits}f} %".replace("-", "−") if value else f"{0:.{digits}f} %"


def span(ratios: Sequence[float], digits: int = 1) -> str:
    """The least and the largest of some ratios, as differences in per cent."""
    return f"{percent(min(ratios), digits)} to {percent(max(ratios), digits)}"
