"""The guarantee: the privacy statement, ε as a function of steps, and how to verify it."""

from __future__ import annotations

from markupsafe import Markup

from corrnoise.report import figures
from corrnoise.report.evidence import FEW_DRAWS, Evidence
from corrnoise.report.kit.blocks import facts, figure, folded, paragraphs, section, table
from corrnoise.report.kit.markup import tag
from corrnoise.report.kit.numbers import number, powers, rounded_up
from corrnoise.samplings import Calibration


def statement(evidence: Evidence) -> Markup:
    """The privacy statement."""
    found = evidence.statement
    rows = [
        (name, powers(value) if value == found.assurance else value)
        for name, value in found.rows()
        if name != "Versions"
    ]
    return section(
        "statement",
        "Privacy statement",
        tag(
            "div",
            tag("p", powers(found.headline), class_="headline"),
            facts(rows),
            tag("p", found.caveats, class_="caveats"),
            class_="card",
        ),
    )


def spending(evidence: Evidence) -> Markup:
    """ε against steps."""
    c = evidence.plan.calibration
    rows = [
        [s.label, number(step), rounded_up(spent)]
        for s in evidence.spending
        for step, spent in zip(s.steps, s.epsilons, strict=True)
    ]
    first = "Run" if evidence.recorded else "Mechanism"
    values = table("ε after a number of steps", [first, "Steps", "ε"], rows, numeric=(1, 2))
    words = [
        _about_points(evidence),
        _about_source(evidence),
        "If the decision to stop depends on the results, the ε of the whole run applies.",
    ]
    picture = figure(
        "ε against steps", figures.spending(evidence), f"At δ = {rounded_up(c.delta, 3)}."
    )
    return section(
        "spending",
        "Privacy spent",
        tag(
            "div",
            picture,
            tag("div", paragraphs(words), folded(values)),
            class_="grid two mixed",
        ),
    )


def _about_points(evidence: Evidence) -> str:
    """Whether the points are exact, bounds or certified, for each run if they differ."""
    kinds = [
        (spent.label, _kind(c, recorded=evidence.recorded))
        for spent, c in zip(evidence.spending, evidence.calibrations, strict=True)
    ]
    words = f"Each point is {kinds[0][1]}"
    if len({kind for _, kind in kinds}) > 1:
        each = "; each point of ".join(f"“{label}” is {kind}" for label, kind in kinds)
        words = f"Each point of {each}"
    return f"{words}. This holds for a run that stops at that step."


def _kind(calibration: Calibration, *, recorded: bool) -> str:
    if calibration.kind == "certified":
        failure = rounded_up(calibration.failure_probability, 3)
        if recorded:  # before its end a run states bounds with no draws
            return (
                "a proven upper bound (that of the whole run is certified by sampling, with "
                f"failure probability {failure})"
            )
        return f"an upper bound certified by sampling, with its own failure probability {failure}"
    return {"exact": "exact", "bound": "a proven upper bound"}[calibration.kind]


def _about_source(evidence: Evidence) -> str:
    if evidence.recorded:
        return "The runs recorded these values during training."
    words = "The points were computed for this page; the line between them is interpolated."
    estimate = evidence.plan.calibration.estimate
    if estimate and estimate.samples > FEW_DRAWS:
        words += (
            " They use fewer random draws than the ε of the whole run, which makes them slightly "
            "larger but no less valid."
        )
    return words


def verifying(evidence: Evidence) -> Markup:
    """How to verify the guarantee."""
    words = (
        "This file contains the plan with all its coefficients, so the guarantee can be recomputed "
        "from the file alone."
    )
    if evidence.plan.calibration.kind == "certified":
        words += " A new certificate uses its own random draws, so the last digits may differ."
    return section(
        "verify",
        "How to verify it",
        tag("p", words),
        tag("pre", tag("code", lines(evidence)), tabindex="0"),
        tag(
            "div",
            tag("h3", "Software versions"),
            facts(evidence.statement.versions.items()),
            class_="card",
        ),
    )


def lines(evidence: Evidence) -> str:
    """Python code that recomputes the guarantee."""
    c, found = evidence.plan.calibration, evidence.statement
    failure = ""
    if c.failure_probability:
        failure = f"\n    failure_probability={c.failure_probability!r},"
    stopped = ""
    if found.steps_taken < found.num_steps:
        price = f"c.spent({found.steps_taken})"
        if found.kind != c.kind:  # a bound with no draws, which certificates do without
            price = (
                "c.sampling.epsilon(c.mechanism, c.participation, c.noise_multiplier, c.delta, "
                f"{found.steps_taken})"
            )
        stopped = f"\nprint({price})  # was {found.epsilon!r}"
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
