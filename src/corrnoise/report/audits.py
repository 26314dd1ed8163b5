"""The section on audits: the claims, and the lower bounds from canaries."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from corrnoise._rounding import counted, rounded_down
from corrnoise.auditing import Audit
from corrnoise.report.kit import charts
from corrnoise.report.kit.axes import linear
from corrnoise.report.kit.blocks import figure, folded, paragraphs, section, table
from corrnoise.report.kit.charts import Line
from corrnoise.report.kit.markup import tag
from corrnoise.report.kit.numbers import rounded_up


def audited(audits: Sequence[Audit]) -> Markup:
    """Claims and lower bounds, one for each δ."""
    ordered = sorted(audits, key=lambda audit: audit.claim)
    first = ordered[0]
    rows = [
        [rounded_up(a.delta, 3), rounded_up(a.claim), rounded_down(a.lower_bound), a.statistic]
        for a in ordered
    ]
    violated = [a for a in ordered if a.violated]
    verdict = "No bound is above its claim."
    if violated:
        verdict = f"{counted(len(violated), 'bound')} above the claim: the guarantee does not hold."
    words = [
        f"{counted(first.num_canaries, 'canary example')} took part in a separate run of the "
        "engine, each with a gradient in a direction of its own, in or out by a fair coin. A "
        f"lower bound is below the engine’s ε with probability {first.confidence:g}.",
        verdict,
        "An audit can refute a claim; it proves none. The distance between claim and bound is "
        "mostly that of a finite number of canaries.",
    ]
    values = table(
        "Claims and bounds", ["δ", "Claimed ε", "Shown ε", "By"], rows, numeric=(0, 1, 2)
    )
    body = tag("div", paragraphs(words), folded(values))
    if len(ordered) > 1:
        picture = figure("Shown against claimed ε", picture_of(ordered), "One point for each δ.")
        body = tag("div", picture, body, class_="grid two mixed")
    return section("audit", "Audit", body)


def picture_of(audits: Sequence[Audit]) -> Markup:
    """The lower bound against the claim, with the claim as the diagonal."""
    claims = [a.claim for a in audits]
    bounds = [a.lower_bound for a in audits]
    x = linear("claimed ε", claims)
    y = linear("ε", [0.0, *claims, *bounds])
    curves = [
        Line("shown", 0, claims, bounds, what="lower bound"),
        Line("claimed", 1, claims, claims, dashed=True, what="claim"),
    ]
    return charts.lines("Lower bounds of ε against claims", x, y, curves)
