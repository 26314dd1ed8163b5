"""The pictures of the page."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from corrnoise.records import Record
from corrnoise.report.evidence import Evidence
from corrnoise.report.kit import cells, charts
from corrnoise.report.kit.axes import NARROW, linear, logarithmic, steps
from corrnoise.report.kit.charts import Line, Mean
from corrnoise.report.kit.numbers import number, percent, rounded_up

_STEP = "step"


def accuracy(evidence: Evidence) -> Markup | None:
    """Test accuracy against steps; ``None`` where none was recorded."""
    return _course(
        evidence,
        "Test accuracy of each run against steps",
        "test accuracy",
        [("test accuracy", lambda record: record.test_accuracy, False)],
        lambda tick: f"{100 * tick:g}%",
        percent,
    )


def loss(evidence: Evidence) -> Markup | None:
    """Test loss and training loss against steps; ``None`` where none was recorded."""
    return _course(
        evidence,
        "Test loss and training loss of each run against steps",
        "loss",
        [
            ("test loss", lambda record: record.test_loss, False),
            ("training loss", lambda record: record.loss, True),
        ],
        number,
        number,
    )


def _course(
    evidence: Evidence,
    title: str,
    label: str,
    kinds: list[tuple[str, Callable[[Record], float | None], bool]],
    show: Callable[[float], str],
    tell: Callable[[float], str],
) -> Markup | None:
    curves: list[Line] = []
    for color, run in enumerate(evidence.runs):
        named = False
        for what, value, dashed in kinds:
            known = [
                (r.step, v) for r in run.records if (v := value(r)) is not None and math.isfinite(v)
            ]
            if known:
                x, y = zip(*known, strict=True)
                name = "" if named else run.label
                curves.append(Line(name, color, x, y, dashed, f"{run.label}, {what}"))
                named = True
    if not curves:
        return None
    values = [y for line in curves for y in line.y]
    return charts.lines(
        title,
        steps(_STEP, max(max(line.x) for line in curves)),
        linear(label, values, show=show, tell=tell),
        curves,
    )


def error(evidence: Evidence) -> Markup:
    """The error of each step, and the means beside it."""
    bound = evidence.lower_bound
    curves = [
        Line(e.label, e.color, range(1, e.steps.size + 1), e.steps.tolist())
        for e in evidence.errors
    ]
    means = [
        Mean(f"{charts.short(e.label, 12)} {number(e.mean, 3)}", e.color, e.mean)
        for e in evidence.errors
    ]
    if bound is not None:
        means.append(Mean(f"bound {number(bound, 3)}", None, bound))
    values = [y for line in curves for y in line.y] + [mean.value for mean in means]
    return charts.lines(
        "Error of each step for "
        + ", ".join(e.label for e in evidence.errors)
        + ", with the mean over the steps on the right",
        steps(_STEP, evidence.plan.num_steps),
        logarithmic("error of the step, per unit of clip norm", values),
        curves,
        means=means,
        mean_label="mean",
    )


def remains(evidence: Evidence) -> Markup:
    """What remains of the first step's noise in the model at each later step."""
    curves = [
        Line(e.label, e.color, range(e.remains.size), e.remains.tolist()) for e in evidence.errors
    ]
    values = [y for line in curves for y in line.y]
    return charts.lines(
        "Standard deviation that the noise of one step has in the model, against later steps",
        steps("steps later", evidence.plan.num_steps - 1),
        linear("standard deviation, per unit of clip norm", [0.0, *values]),
        curves,
        width=NARROW,
    )


def noising(evidence: Evidence, size: int) -> npt.NDArray[np.float64]:
    """The first rows and columns of C⁻¹, divided by its first entry."""
    mechanism = evidence.plan.mechanism
    matrix = mechanism.noising_matrix(min(size, mechanism.num_steps))
    return matrix / matrix[0, 0]


def weights(evidence: Evidence) -> Markup:
    """The first rows of C⁻¹: the weights of all draws in the noise of a step."""
    matrix = noising(evidence, 8)
    return cells.picture(
        "Weights of the draws (columns) in the noise of each step (rows)", matrix, values=True
    )


def correlation(evidence: Evidence) -> Markup:
    """How the noise of two steps is correlated."""
    return cells.picture("Correlation between the noise of two steps", correlations(evidence, 24))


def correlations(evidence: Evidence, size: int) -> npt.NDArray[np.float64]:
    """The correlation matrix of C⁻¹z for the first steps."""
    matrix = noising(evidence, size)
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    return unit @ unit.T


def spending(evidence: Evidence) -> Markup:
    """ε against steps."""
    curves = [Line(s.label, s.color, s.steps, s.epsilons) for s in evidence.spending]
    planned = evidence.statement.planned_epsilon
    return charts.lines(
        "ε spent against steps",
        steps(_STEP, max(s.steps[-1] for s in evidence.spending)),
        linear(
            "ε spent",
            [0.0, planned, *(e for s in evidence.spending for e in s.epsilons)],
            tell=rounded_up,
        ),
        curves,
        reference=(f"whole run: ε = {rounded_up(planned)}", planned),
    )
