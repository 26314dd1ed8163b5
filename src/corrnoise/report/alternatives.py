"""The alternatives considered: error against memory, and the table of all of them."""

from __future__ import annotations

from markupsafe import Markup

from corrnoise._rounding import counted
from corrnoise.report import tradeoff
from corrnoise.report.evidence import Evidence, alternative_label
from corrnoise.report.kit.blocks import figure, paragraphs, section, table
from corrnoise.report.kit.markup import tag
from corrnoise.report.kit.numbers import number, rounded_up


def memory(evidence: Evidence) -> Markup:
    """Error against memory."""
    plan, scheme = evidence.plan, evidence.plan.scheme
    words = [
        _about_state(evidence),
        "A factor such as 2× is the time that the noise takes in a step, relative to DP-SGD, "
        "according to a model of random draws and memory traffic. A larger circle takes longer.",
    ]
    if any(a.reason and a.error is not None for a in plan.alternatives):
        words.append(
            "Hollow grey circles are mechanisms that this plan cannot use; the table of "
            "alternatives gives the reasons."
        )
    if scheme.kind != "recursion" and not plan.mechanism.independent:
        words.append(
            "The dotted line shows the chosen mechanism with other schemes, which regenerate fewer "
            "draws and keep more state: the same noise in less time."
        )
    caption = "Logarithmic scale."
    if tradeoff.beyond(evidence):
        caption += " ↑ marks an error that is above the chart; its value is next to it."
    picture = figure("Mean error and memory", tradeoff.picture(evidence), caption)
    return section(
        "memory",
        "Error against memory",
        tag("div", picture, tag("div", paragraphs(words)), class_="grid two mixed"),
    )


def _about_state(evidence: Evidence) -> str:
    plan, scheme = evidence.plan, evidence.plan.scheme
    state = "no state"
    if scheme.num_vectors:
        state = counted(scheme.num_vectors, "model-sized vector")
        if plan.num_parameters:
            state += f" ({number(scheme.state_bytes(plan.num_parameters) / 2**20, 3)} MiB)"
    how = {
        "regenerate": "past draws are regenerated from the key",
        "lookahead": f"the noise of {scheme.lookahead} steps is generated at once",
        "ring": "the newest draws are kept, and older ones are regenerated from the key",
        "recursion": "the noise is computed recursively from its own past",
    }[scheme.kind]
    draws = "draw" if scheme.draws_per_step == 1 else "draws"
    most = "vector" if plan.memory == 1 else "vectors"
    return (
        f"The noise keeps {state} between steps: {how}. Each step takes "
        f"{number(scheme.draws_per_step, 3)} {draws} for each parameter. The plan allows "
        f"{number(plan.memory)} {most} of state."
    )


def considered(evidence: Evidence) -> Markup:
    """The table of all alternatives."""
    plan, title = evidence.plan, "Alternatives considered"
    if not plan.alternatives:
        words = "The mechanism of this plan was given, so no alternatives were considered."
        return section("alternatives", title, tag("p", words))
    rows = [
        [
            alternative_label(a),
            a.sampling,
            number(a.error),
            rounded_up(a.noise_multiplier),
            a.kind or "–",
            number(None if a.scheme is None else a.scheme.num_vectors),
            number(a.step_cost, 3),
            "chosen" if a is plan.chosen else a.reason,
        ]
        for a in plan.alternatives
    ]
    words = (
        "All mechanisms and samplings that the planner considered, least error first. An estimate "
        "is used for ranking only and guarantees nothing; the noise multiplier of the chosen "
        "mechanism is exact, a proven bound or certified."
    )
    if plan.advice:
        words += f" What would lower the error most: {plan.advice}."
    return section(
        "alternatives",
        title,
        tag("p", words),
        table(
            "Mean error and noise multiplier at the same budget, per unit of clip norm. Vectors: "
            "model-sized vectors of state. Time: of the noise in a step, relative to DP-SGD.",
            ["Mechanism", "Sampling", "Mean error", "Noise", "Noise is", "Vectors", "Time", "Note"],
            rows,
            numeric=(2, 3, 5, 6),
            strong=plan.choice,
        ),
    )
