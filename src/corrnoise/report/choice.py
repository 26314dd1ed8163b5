"""The mechanism: its error, its noise, its memory, and what it was chosen from."""

from __future__ import annotations

from corrnoise.report import cells, figures, tradeoff
from corrnoise.report.charts import hue
from corrnoise.report.evidence import Evidence, alternative_name
from corrnoise.report.markup import (
    figure,
    folded,
    number,
    paragraphs,
    section,
    swatch,
    table,
    tag,
    text,
)

_COEFFICIENTS = 32


def error(evidence: Evidence) -> str:
    """Error against DP-SGD and the lower bound."""
    rows = [
        [
            swatch(hue(e.color), e.label),
            number(e.noise_multiplier),
            text(e.kind),
            number(e.mean),
            number(float(e.steps[-1])),
        ]
        for e in evidence.errors
    ]
    if evidence.lower_bound is not None:
        rows.append([text("Lower bound"), "", "", number(evidence.lower_bound), ""])
    words = [
        "Noise moves the model: this is by how much after each step, for each parameter, in units "
        "of the clip norm, before the learning rate and the division by the batch size. Each "
        "mechanism has the noise that the same (ε, δ) asks of it.",
        *_about_baseline(evidence),
        _about_bound(evidence),
    ]
    return section(
        "error",
        "The error that the noise leaves",
        tag(
            "div",
            figure(
                "Error of each step",
                figures.error(evidence),
                "Logarithmic. On the right, the root of the mean square over all steps.",
            ),
            tag(
                "div",
                paragraphs(words),
                table(
                    "Noise and error at the same budget",
                    ["Mechanism", "Noise", "Noise is", "Mean error", "Last step"],
                    rows,
                    numeric=(1, 3, 4),
                    strong=0,
                ),
            ),
            class_="grid two mixed",
        ),
    )


def _about_baseline(evidence: Evidence) -> list[str]:
    baseline = evidence.baseline
    if baseline is None:
        return []
    ratio = baseline.mean / evidence.errors[0].mean
    words = f"Over all steps, independent noise (DP-SGD) leaves {number(ratio, 3)} times the error"
    if ratio > 1.0 and baseline.noise_multiplier < evidence.errors[0].noise_multiplier:
        words += ": each of its draws is smaller, but nothing cancels them later"
    if baseline.kind == "estimate":
        words += ". Its noise is an estimate that is good for this comparison and promises nothing"
    return [words + "."]


def _about_bound(evidence: Evidence) -> str:
    sampling = evidence.plan.sampling
    if evidence.lower_bound is None:
        return f"No lower bound is known here for {sampling} sampling, so none is drawn."
    words = (
        f"No factorization can have a mean error below {number(evidence.lower_bound)} at this "
        "budget. This is proven for the mean over the steps alone; a single step may lie below."
    )
    if sampling == "balls-in-bins":
        return words + " With balls-in-bins the proof is loose: the best error is likely higher."
    return words + " It holds for fixed batches; amplification by sampling could go below."


def noise(evidence: Evidence) -> str:
    """How the noise is correlated."""
    lead = (
        "Each step adds fresh noise and takes back part of the noise of earlier steps, so that "
        "less of it adds up in the model. The promise covers all steps together, correlations "
        "included."
    )
    if evidence.plan.mechanism.name == "dp_sgd":
        lead = "Each step adds fresh noise, independent of all other steps."
    row = figures.noising(evidence, _COEFFICIENTS)[-1][::-1]
    weights = table(
        f"Weights in the noise of step {row.size}, over that of its own draw",
        ["Draw of", "Weight"],
        [
            [text(f"{lag} steps before" if lag else "the step itself"), number(float(weight), 5)]
            for lag, weight in enumerate(row)
            if weight
        ],
        numeric=(1,),
    )
    return section(
        "noise",
        "How the noise is correlated",
        tag("p", text(lead)),
        tag(
            "div",
            figure(
                "The noise of a step",
                figures.weights(evidence),
                "Row t: the weight of each draw z₁, z₂, … in the noise of step t. These are the "
                "first rows of C⁻¹, over its first entry.",
            ),
            figure(
                "Correlation between steps",
                figures.correlation(evidence) + tag("div", cells.key(), class_="key"),
                "Of the noise that two steps add: blue is opposite, orange alike.",
            ),
            figure(
                "What stays of one draw",
                figures.remains(evidence),
                "How much of the first step's draw is in the model, step after step. Each "
                "mechanism has its own noise.",
            ),
            class_="grid three",
        ),
        folded(weights),
    )


def memory(evidence: Evidence) -> str:
    """Error against memory."""
    plan, scheme = evidence.plan, evidence.plan.scheme
    state = "no state" if not scheme.num_vectors else f"{scheme.num_vectors} model-sized vectors"
    if scheme.num_vectors and plan.num_parameters:
        state += f" ({number(scheme.state_bytes(plan.num_parameters) / 2**20, 3)} MiB)"
    how = {
        "regenerate": "past draws are made again from the key",
        "lookahead": f"the noise of {scheme.lookahead} steps is made at once",
        "ring": "past draws are kept in a ring",
        "recursion": "a recursion keeps what it needs",
    }[scheme.kind]
    draws = "draw" if scheme.draws_per_step == 1 else "draws"
    words = [
        f"The noise keeps {state} between steps: {how}, at {number(scheme.draws_per_step, 3)} "
        f"{draws} for each parameter and step. The plan allows {number(plan.memory)} vectors.",
        "Multiples (×) are the time of the noise in a step over DP-SGD's, by a model of draws and "
        "memory traffic; a larger circle takes longer.",
    ]
    if any(a.reason and a.error is not None for a in plan.alternatives):
        words.append("Hollow circles cannot be chosen; the table below says why.")
    if scheme.kind != "recursion" and plan.mechanism.name != "dp_sgd":
        words.append(
            "The dotted line is the chosen mechanism with other schemes, which make fewer draws "
            "again and keep more: the same noise, less time."
        )
    picture = tradeoff.picture(evidence)
    caption = "Logarithmic."
    if "↑" in picture:
        caption += " ↑ marks a mechanism far above the picture, with its error."
    return section(
        "memory",
        "Error against memory",
        tag(
            "div",
            figure(
                "Mean error and state",
                picture,
                caption,
            ),
            tag("div", paragraphs(words)),
            class_="grid two mixed",
        ),
    )


def alternatives(evidence: Evidence) -> str:
    """What the plan chose from."""
    found, title = evidence.plan.alternatives, "What else there was"
    if not found:
        words = "This plan was given its mechanism: nothing else was looked at."
        return section("alternatives", title, tag("p", text(words)))
    rows = [
        [
            text(alternative_name(a)),
            number(a.error),
            number(a.noise_multiplier),
            text(a.kind or "–"),
            number(None if a.scheme is None else a.scheme.num_vectors),
            number(a.step_cost, 3),
            text("chosen" if a is evidence.chosen else a.reason),
        ]
        for a in found
    ]
    words = (
        "All mechanisms that the plan looked at, least error first. An estimate ranks and promises "
        "nothing; what is chosen is exact, a proven bound or certified."
    )
    return section(
        "alternatives",
        title,
        tag("p", text(words)),
        table(
            "Error and noise per unit of clip norm at the same budget; model-sized vectors of "
            "state; time of the noise in a step over DP-SGD's",
            ["Mechanism", "Mean error", "Noise", "Noise is", "Vectors", "Time", "Note"],
            rows,
            numeric=(1, 2, 4, 5),
            strong=next((i for i, a in enumerate(found) if a is evidence.chosen), None),
        ),
    )
