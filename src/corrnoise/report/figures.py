"""The pictures of the page."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from corrnoise import toeplitz
from corrnoise.mechanisms import DenseMechanism
from corrnoise.noise import scheme as _scheme
from corrnoise.noise.filters import Filter
from corrnoise.report import charts
from corrnoise.report.axes import NARROW, Frame, counts, linear, logarithmic
from corrnoise.report.charts import Line, Mean, Point, hue
from corrnoise.report.evidence import Evidence, alternative_name, mechanism_name
from corrnoise.report.markup import budget, number, percent, tag
from corrnoise.run import Record

_STEPS = "step"
# Errors beyond this multiple of the chosen one are drawn at the edge.
_FARTHEST = 1.35


def accuracy(evidence: Evidence) -> str:
    """Test accuracy against steps; "" where none was recorded."""
    return _course(
        evidence,
        "Test accuracy of each run against steps",
        "test accuracy",
        [("test accuracy", lambda record: record.test_accuracy, False)],
        lambda tick: f"{100 * tick:g} %",
        percent,
    )


def loss(evidence: Evidence) -> str:
    """Test loss and training loss against steps."""
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
) -> str:
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
        return ""
    steps = [0.0, *(max(line.x) for line in curves)]
    values = [y for line in curves for y in line.y]
    return charts.lines(
        title,
        linear(_STEPS, steps, tight=True),
        linear(label, values, show=show, tell=tell),
        curves,
    )


def error(evidence: Evidence) -> str:
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
        + "; mean over the steps beside it",
        linear(_STEPS, [0.0, float(evidence.plan.num_steps)], tight=True),
        logarithmic("error of the step, per unit of clip norm", values),
        curves,
        means=means,
        mean_label="mean",
    )


def remains(evidence: Evidence) -> str:
    """What is left of the first step's noise in the model, step after step."""
    curves = [
        Line(e.label, e.color, range(e.remains.size), e.remains.tolist()) for e in evidence.errors
    ]
    values = [y for line in curves for y in line.y]
    return charts.lines(
        "Standard deviation that the noise of one step has in the model, against later steps",
        linear("steps later", [0.0, float(evidence.plan.num_steps - 1 or 1)], tight=True),
        linear("standard deviation, per unit of clip norm", [0.0, *values]),
        curves,
        width=NARROW,
    )


def noising(evidence: Evidence, size: int) -> npt.NDArray[np.float64]:
    """The first rows and columns of C⁻¹, over its first entry."""
    m = evidence.plan.mechanism
    size = min(size, m.num_steps)
    if isinstance(m, DenseMechanism):
        return m.noising[:size, :size] / m.noising[0, 0]
    return toeplitz.matrix(m.noising_coef[:size]) / m.noising_coef[0]


def weights(evidence: Evidence) -> str:
    """The first rows of C⁻¹: the weights of past noise in a step's."""
    matrix = noising(evidence, 8)
    return charts.cells(
        "Weights of the noise vectors (columns) in the noise of each step (rows)",
        matrix,
        values=True,
    )


def correlation(evidence: Evidence) -> str:
    """How the noise of two steps is correlated."""
    return charts.cells("Correlation of the noise of two steps", correlations(evidence, 24))


def correlations(evidence: Evidence, size: int) -> npt.NDArray[np.float64]:
    """The correlation matrix of C⁻¹z for the first steps."""
    matrix = noising(evidence, size)
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    return unit @ unit.T


def memory(evidence: Evidence) -> str:
    """Error against the model-sized vectors that the noise keeps."""
    plan, chosen = evidence.plan, evidence.chosen
    cap = _FARTHEST * plan.error
    points: list[Point] = []

    def add(name: str, vectors: int, value: float, cost: float, kind: str, why: str = "") -> None:
        far = value > cap
        label = f"{name} · {number(cost, 2)}×" if not far else f"{name}: {number(value, 3)} ↑"
        what = (
            f"{name}: error {number(value)}, {vectors} vectors, noise takes {number(cost, 3)} "
            f"times as long as DP-SGD's"
        )
        what += f"; {why}" if why else ""
        size = 2.6 + 0.65 * math.sqrt(cost)
        points.append(Point(label, what, vectors, min(value, cap), kind, size))

    spec = Filter.of(plan.mechanism)
    own = _scheme.relative_cost(plan.scheme, spec, plan.rounds)
    name = mechanism_name(plan.mechanism) if chosen is None else alternative_name(chosen)
    add(name, plan.scheme.num_vectors, plan.error, own, "s0")
    baseline = evidence.baseline
    if baseline:
        add("DP-SGD", 0, baseline.mean, 1.0, hue(baseline.color))
    others = [a for a in plan.alternatives if a is not chosen and a.name != "dp_sgd"]
    first = {a.name: a for a in reversed(others) if a.error is not None}
    for a in sorted(others, key=lambda a: first.get(a.name) is not a):
        if a.error is not None and a.scheme is not None and a.step_cost is not None:
            kind = "other out" if a.reason else "other"
            add(alternative_name(a), a.scheme.num_vectors, a.error, a.step_cost, kind, a.reason)
    schemes = _scheme.candidates(spec.num_terms) if spec.num_terms else []
    most = max(p.x for p in points)
    most = int(max(most, *(s.num_vectors for s in schemes), 0)) if schemes else int(most)
    x = counts("model-sized vectors kept between steps", most)
    values = [p.y for p in points]
    bound = evidence.lower_bound
    if bound is not None and bound >= 0.7 * min(values):
        values.append(bound)
    else:
        bound = None
    y = logarithmic("mean error, per unit of clip norm", values)
    area, extra, avoid = Frame(x, y, margin=20.0), "", []
    if bound is not None:
        extra += charts.level(area, f"lower bound {number(bound, 3)}", bound)
        avoid.append((area.left, area.up(bound) - 15, area.left + 110, area.up(bound) + 1))
    if len(schemes) > 1:
        height = area.up(plan.error)
        ends = area.across(0), area.across(schemes[-1].num_vectors)
        extra += tag("line", x1=ends[0], x2=ends[1], y1=height, y2=height, class_="path")
        extra += "".join(
            charts.dot(
                area.across(s.num_vectors),
                height,
                f"{name}, {s.kind}: {s.num_vectors} vectors, "
                f"{number(_scheme.relative_cost(s, spec, plan.rounds), 3)} times DP-SGD's time",
                size=2.2,
            )
            for s in schemes
        )
        extra = tag("g", extra, class_="s0 out")
        avoid.append((ends[0], height - 3, ends[1], height + 3))
    return charts.scatter(
        "Expected error of each mechanism against the vectors that its noise keeps",
        area,
        points,
        extra,
        avoid,
    )


def spending(evidence: Evidence) -> str:
    """ε against steps."""
    curves = [Line(s.label, s.color, s.steps, s.epsilons) for s in evidence.spending]
    planned = evidence.statement.planned_epsilon
    return charts.lines(
        "ε spent against steps",
        linear(_STEPS, [0.0, *(float(s.steps[-1]) for s in evidence.spending)], tight=True),
        linear("ε spent", [0.0, planned, *(e for s in evidence.spending for e in s.epsilons)]),
        curves,
        reference=(f"whole run: ε = {budget(planned)}", planned),
    )
