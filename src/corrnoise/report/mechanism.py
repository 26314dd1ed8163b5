"""The mechanism: the error that its noise causes, and how that noise is correlated."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from corrnoise._rounding import counted
from corrnoise.report import figures
from corrnoise.report.evidence import Evidence
from corrnoise.report.kit import cells
from corrnoise.report.kit.blocks import figure, folded, paragraphs, section, swatch, table
from corrnoise.report.kit.charts import hue
from corrnoise.report.kit.markup import joined, tag
from corrnoise.report.kit.numbers import number, rounded_up

_COEFFICIENTS = 32


def error(evidence: Evidence) -> Markup:
    """Error against DP-SGD and the lower bound."""
    rows = [
        [
            swatch(hue(e.color), e.label),
            e.sampling,
            rounded_up(e.noise_multiplier),
            e.kind,
            number(e.mean),
            number(float(e.steps[-1])),
        ]
        for e in evidence.errors
    ]
    if evidence.lower_bound is not None:
        rows.append(
            ["Lower bound", evidence.plan.sampling.name, "", "", number(evidence.lower_bound), ""]
        )
    values = table(
        "Noise multiplier and error at the same budget",
        ["Mechanism", "Sampling", "Noise", "Noise is", "Mean error", "Last step"],
        rows,
        numeric=(2, 4, 5),
        strong=0,
    )
    words = [
        "The noise perturbs the model. The chart shows the root mean square of this perturbation "
        "after each step, for each parameter, in units of the clip norm, before the learning rate "
        "and the division by the batch size. Every mechanism has the noise multiplier that the "
        "same (ε, δ) requires.",
        *_about_baseline(evidence),
        _about_bound(evidence),
    ]
    picture = figure(
        "Error of each step",
        figures.error(evidence),
        "Logarithmic scale. On the right: the root mean square over all steps.",
    )
    return section(
        "error",
        "Error caused by the noise",
        tag("div", picture, tag("div", paragraphs(words), values), class_="grid two mixed"),
    )


def _about_baseline(evidence: Evidence) -> Iterator[str]:
    ours, baseline = evidence.errors[0], evidence.baseline
    if baseline is None:
        return
    ratio = baseline.mean / ours.mean
    words = (
        f"Over all steps, independent noise (DP-SGD) with {baseline.sampling} batches has "
        f"{number(ratio, 3)} times the error"
    )
    if ratio > 1.0 and baseline.noise_multiplier < ours.noise_multiplier:
        words += ": its noise multiplier is smaller, but no later noise cancels its noise"
    yield words + "."
    if baseline.kind == "estimate":
        yield (
            "The noise multiplier of DP-SGD is an estimate here. It is good enough for this "
            "comparison, but it guarantees nothing."
        )


def _about_bound(evidence: Evidence) -> str:
    sampling = evidence.plan.sampling
    if evidence.lower_bound is None:
        return f"No lower bound is known here for {sampling} sampling, so none is drawn."
    words = (
        f"No factorization can have a mean error below {number(evidence.lower_bound)} at this "
        "budget. This is proven for the mean over the steps only; the error of a single step may "
        "be lower."
    )
    return f"{words} {sampling.about_least_error}".rstrip()


def noise(evidence: Evidence) -> Markup:
    """How the noise is correlated."""
    lead = (
        "Each step adds fresh noise and subtracts part of the noise of earlier steps, so that less "
        "noise accumulates in the model. The guarantee covers all steps together, including these "
        "correlations."
    )
    if evidence.plan.mechanism.independent:
        lead = "Each step adds fresh noise that is independent of all other steps."
    return section(
        "noise",
        "How the noise is correlated",
        tag("p", lead),
        tag(
            "div",
            figure(
                "Weights of past draws",
                figures.weights(evidence),
                "Row t: the weight of each draw z₁, z₂, … in the noise of step t. These are the "
                "first rows of C⁻¹, divided by its first entry.",
            ),
            figure(
                "Correlation between steps",
                joined([figures.correlation(evidence), tag("div", cells.key(), class_="key")]),
                "Correlation between the noise of two steps. Blue is negative, orange is positive.",
            ),
            figure(
                "What remains of one draw",
                figures.remains(evidence),
                "How much of the first step's noise is in the model at each later step. Each "
                "mechanism has its own noise multiplier.",
            ),
            class_="grid three",
        ),
        folded(_weights(evidence)),
    )


def _weights(evidence: Evidence) -> Markup:
    row = figures.noising(evidence, _COEFFICIENTS)[-1][::-1]
    return table(
        f"Weights of the draws in the noise of step {row.size}, relative to its own draw",
        ["Draw", "Weight"],
        [
            [
                f"{counted(lag, 'step')} earlier" if lag else "the step's own",
                f"{number(float(weight), 5)}",
            ]
            for lag, weight in enumerate(row)
            if weight
        ],
        numeric=(1,),
    )
