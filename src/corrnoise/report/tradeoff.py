"""The picture of error against memory: the chosen mechanism and the alternatives."""

from __future__ import annotations

import math
from dataclasses import replace

from markupsafe import Markup

from corrnoise import mechanisms
from corrnoise._rounding import counted
from corrnoise.noise import Scheme
from corrnoise.noise.filtering import scheme as _scheme
from corrnoise.noise.filtering.filters import Filter
from corrnoise.report.evidence import Evidence, alternative_label, dp_sgd, with_batches
from corrnoise.report.kit import charts
from corrnoise.report.kit.axes import Frame, counts, logarithmic
from corrnoise.report.kit.charts import Box, Point, hue
from corrnoise.report.kit.markup import tag
from corrnoise.report.kit.numbers import number

# Errors above this multiple of the chosen one are drawn at the edge, and a lower bound below this
# fraction of it is left out, so that similar errors can be distinguished.
_FARTHEST, _LOWEST = 1.35, 0.7


def picture(evidence: Evidence) -> Markup:
    """Mean error against the model-sized vectors that the noise keeps."""
    own, others = _own(evidence), _others(evidence)
    points = [*own, *others]
    errors, bound = [p.y for p in points], evidence.lower_bound
    if bound is not None and bound < _LOWEST * min(errors):
        bound = None
    area = Frame(
        counts("model-sized vectors kept between steps", int(max(p.x for p in points))),
        logarithmic(
            "mean error, per unit of clip norm", errors if bound is None else [*errors, bound]
        ),
        margin=20.0,
    )
    beneath, avoid = list[Markup](), list[Box]()
    if bound is not None:
        beneath.append(charts.level(area, f"lower bound {number(bound, 3)}", bound))
        left, y = charts.named_at(area), area.up(bound)
        avoid.append((left, y - 15, left + 110, y + 1))
    if len(own) > 1:
        y = area.up(own[0].y)
        left, right = (area.across(f(p.x for p in own)) for f in (min, max))
        beneath.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="path"))
        avoid.append((left, y - 3, right, y + 3))
    title = "Expected error of each mechanism against the vectors that its noise keeps"
    return charts.scatter(title, area, points, beneath, avoid)


def beyond(evidence: Evidence) -> bool:
    """Whether an error is drawn at the upper edge because it is larger."""
    known = [a.error for a in evidence.plan.shown if a.scheme is not None]
    if evidence.baseline:
        known.append(evidence.baseline.mean)
    return any(error is not None and error > _cap(evidence) for error in known)


def _cap(evidence: Evidence) -> float:
    return _FARTHEST * evidence.plan.error


def _own(evidence: Evidence) -> list[Point]:
    """The chosen mechanism as planned, then with every other scheme that is worth its memory."""
    plan, chosen = evidence.plan, evidence.plan.chosen
    spec, planned = Filter.of(plan.mechanism), plan.scheme
    name = mechanisms.shown(plan.mechanism) if chosen is None else alternative_label(chosen)

    def cost(scheme: Scheme) -> float:
        return _scheme.relative_cost(scheme, spec, plan.rounds)

    points = [_point(name, planned.num_vectors, plan.error, cost(planned), "s0")]
    least = math.inf
    schemes = _scheme.candidates(spec.num_terms) if spec.num_terms else []
    for other in sorted(schemes, key=lambda s: (s.num_vectors, cost(s))):
        if cost(other) < least and other != planned:
            label, time = f"{name}, {other.kind}", cost(other)
            full = _point(label, other.num_vectors, plan.error, time, "s0 out")
            points.append(replace(full, label=f"{number(time, 2)}×"))
        least = min(least, cost(other))
    between = points[2:-1]
    return [*points[:2], *(replace(p, label="") for p in between), *points[2 + len(between) :]]


def _others(evidence: Evidence) -> list[Point]:
    """DP-SGD, the best of each other family, and the rest."""
    plan, baseline, independent = evidence.plan, evidence.baseline, dp_sgd(evidence.plan)
    cap = _cap(evidence)
    points: list[Point] = []
    if baseline:
        name = with_batches(mechanisms.shown(independent), baseline.sampling, plan)
        color = hue(baseline.color)
        points.append(_point(name, 0, baseline.mean, 1.0, color, cap=cap))
    others = [a for a in plan.shown if a is not plan.chosen and a.name != independent.name]
    best = {a.name: a for a in reversed(others) if a.error is not None}
    for a in sorted(others, key=lambda a: best.get(a.name) is not a):
        if a.error is not None and a.scheme is not None and a.step_cost is not None:
            kind = "other out" if a.reason else "other"
            vectors, name = a.scheme.num_vectors, alternative_label(a)
            full = _point(name, vectors, a.error, a.step_cost, kind, a.reason, cap=cap)
            points.append(full if best[a.name] is a else replace(full, label=""))
    return points


def _point(
    name: str,
    vectors: int,
    error: float,
    cost: float,
    kind: str,
    reason: str = "",
    *,
    cap: float = math.inf,
) -> Point:
    label = f"{name} · {number(cost, 2)}×"
    if error > cap:
        label = f"{name}: {number(error, 3)} ↑"
    what = (
        f"{name}: error {number(error)}, {counted(vectors, 'vector')}, "
        f"{number(cost, 3)} times DP-SGD's time"
    )
    if reason:
        what += f"; {reason}"
    size = 2.6 + 0.65 * math.sqrt(cost)
    return Point(label, what, vectors, min(error, cap), kind, size)
