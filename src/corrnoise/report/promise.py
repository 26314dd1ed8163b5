"""What is promised: the statement, what is spent along the way, and how to check it."""

from __future__ import annotations

from corrnoise.report import figures
from corrnoise.report.evidence import FEW_DRAWS, Evidence
from corrnoise.report.markup import (
    budget,
    facts,
    figure,
    folded,
    number,
    paragraphs,
    powers,
    section,
    table,
    tag,
    text,
)

_KINDS = {
    "exact": "exact",
    "bound": "a proven upper bound",
    "certified": "an upper bound, certified by sampling, by itself but for probability {}",
}


def statement(evidence: Evidence) -> str:
    """The privacy statement."""
    found = evidence.statement
    rows = [
        (name, powers(value) if name == "ε is" else value)
        for name, value in found.rows()
        if name != "Versions"
    ]
    return section(
        "promise",
        "What is promised",
        tag(
            "div",
            tag("p", text(powers(found.headline)), class_="promise"),
            facts(rows),
            tag("p", text(found.caveats), class_="caveats"),
            class_="card",
        ),
    )


def spending(evidence: Evidence) -> str:
    """ε against steps."""
    c = evidence.plan.calibration
    source = "The runs recorded these values as they went."
    if not evidence.recorded:
        source = "They were computed for this page; between them the curve is only drawn."
    if not evidence.recorded and c.estimate and c.estimate.samples > FEW_DRAWS:
        source += (
            " They rest on fewer draws than the ε of the whole run, which makes them a little "
            "larger, not less valid."
        )
    rows = [
        [text(s.label), number(step), budget(spent)]
        for s in evidence.spending
        for step, spent in zip(s.steps, s.epsilons, strict=True)
    ]
    words = [
        _about_points(evidence),
        source,
        "A stop that was chosen by looking at the results costs the ε of the whole run.",
    ]
    return section(
        "spending",
        "Privacy spent",
        tag(
            "div",
            figure("ε against steps", figures.spending(evidence), f"At δ = {budget(c.delta, 3)}."),
            tag(
                "div",
                paragraphs(words),
                folded(table("ε after some steps", ["Run", "Steps", "ε"], rows, numeric=(1, 2))),
            ),
            class_="grid two mixed",
        ),
    )


def _about_points(evidence: Evidence) -> str:
    """What kind of numbers the points are, for each run where they differ."""
    kinds = {
        spent.label: _KINDS[c.kind].format(number(c.failure_probability))
        for spent, c in zip(evidence.spending, evidence.calibrations, strict=True)
    }
    if len(set(kinds.values())) == 1:
        return f"Each point is {next(iter(kinds.values()))}, for a run that stops there."
    each = "; ".join(f"of “{label}”, {kind}" for label, kind in kinds.items())
    return f"What each point is for a run that stops there: {each}."


def recomputing(evidence: Evidence) -> str:
    """How to check the promise."""
    c, found = evidence.plan.calibration, evidence.statement
    words = (
        "This file carries the plan with every coefficient, so the promise can be priced again "
        "from the file alone."
    )
    if c.kind == "certified":
        words += " A new certificate has draws of its own, so its last digits may differ."
    return section(
        "recompute",
        "How to check it",
        tag("p", text(words)),
        tag("pre", tag("code", text(lines(evidence))), tabindex="0"),
        tag(
            "div",
            tag("h3", "Versions that made the numbers"),
            facts(found.versions.items()),
            class_="card",
        ),
    )


def lines(evidence: Evidence) -> str:
    """The Python that prices the promise again."""
    c, found = evidence.plan.calibration, evidence.statement
    failure = ""
    if c.failure_probability:
        failure = f"\n    failure_probability={c.failure_probability!r},"
    stopped = ""
    if found.steps_taken < found.num_steps:
        stopped = f"\nprint(cn.epsilon_of(c, {found.steps_taken}))  # was {found.epsilon!r}"
    return f"""import corrnoise as cn
from corrnoise import report

c = report.read("report.html").calibration  # this file
again = cn.account(
    c.mechanism,
    c.participation,
    noise_multiplier=c.noise_multiplier,
    delta=c.delta,
    sampling=c.sampling,{failure}
)
print(again.epsilon)  # was {c.epsilon!r} at delta {c.delta!r}{stopped}
"""
