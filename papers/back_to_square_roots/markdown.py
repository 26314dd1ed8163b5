"""Text for the README: claims of the paper and whether they hold, and differences in per cent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from corrnoise import _tables


@dataclass(frozen=True)
class Claim:
    """What the paper says, whether it held here, and the numbers."""

    text: str
    verdict: str
    evidence: str


def verdict(holds: bool, *, otherwise: str = "differs") -> str:
    """Whether a claim holds, in words."""
    return "holds" if holds else otherwise


def claims(found: Sequence[Claim]) -> str:
    """The claims as a table."""
    return _tables.markdown(
        ("the paper", "here", "numbers"),
        [(claim.text, f"**{claim.verdict}**", claim.evidence) for claim in found],
    )


def percent(ratio: float, digits: int = 1) -> str:
    """A ratio as a signed difference in per cent."""
    value = round(100.0 * (ratio - 1.0), digits)
    return f"{value:+.{digits}f} %".replace("-", "−") if value else f"{0:.{digits}f} %"


def span(ratios: Sequence[float], digits: int = 1) -> str:
    """The least and the largest of some ratios, as differences in per cent."""
    return f"{percent(min(ratios), digits)} to {percent(max(ratios), digits)}"
