"""The picture of error against memory: what was chosen, and what else there was."""

from __future__ import annotations

import math
from dataclasses import replace

from corrnoise.noise import Scheme
from corrnoise.noise import scheme as _scheme
from corrnoise.noise.filters import Filter
from corrnoise.report import charts
from corrnoise.report.axes import Frame, counts, logarithmic
from corrnoise.report.charts import Box, Point, hue
from corrnoise.report.evidence import Evidence, alternative_name, mechanism_name
from corrnoise.report.markup import number, tag

# Errors beyond this multiple of the chosen one are drawn at the edge, and a lower bound below that
# share of it is left out, so that the near ones can be told apart.
_FARTHEST, _LOWEST = 1.35, 0.7


def picture(evidence: Evidence) -> str:
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
    beneath, avoid = "", list[Box]()
    if bound is not None:
        beneath += charts.level(area, f"lower bound {number(bound, 3)}", bound)
        left, y = charts.named_at(area), area.up(bound)
        avoid.append((left, y - 15, left + 110, y + 1))
    if len(own) > 1:
        y = area.up(own[0].y)
        left, right = (area.across(f(p.x for p in own)) for f in (min, max))
        beneath += tag("line", x1=left, x2=right, y1=y, y2=y, class_="path")
        avoid.append((left, y - 3, right, y + 3))
    title = "Expected error of each mechanism against the vectors that its noise keeps"
    return charts.scatter(title, area, points, beneath, avoid)


def _own(evidence: Evidence) -> list[Point]:
    """The chosen mechanism as planned, then with every other scheme that is worth its memory."""
    plan, chosen = evidence.plan, evidence.chosen
    spec, planned = Filter.of(plan.mechanism), plan.scheme
    name = mechanism_name(plan.mechanism) if chosen is None else alternative_name(chosen)

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
    plan, baseline = evidence.plan, evidence.baseline
    points: list[Point] = []
    if baseline:
        points.append(
            _point("DP-SGD", 0, baseline.mean, 1.0, hue(baseline.color), cap=_FARTHEST * plan.error)
        )
    others = [a for a in plan.alternatives if a is not evidence.chosen and a.name != "dp_sgd"]
    best = {a.name: a for a in reversed(others) if a.error is not None}
    for a in sorted(others, key=lambda a: best.get(a.name) is not a):
        if a.error is not None and a.scheme is not None and a.step_cost is not None:
            kind = "other out" if a.reason else "other"
            vectors, cap = a.scheme.num_vectors, _FARTHEST * plan.error
            name = alternative_name(a)
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
        f"{name}: error {number(error)}, {vectors} vectors, {number(cost, 3)} times DP-SGD's time"
    )
    if reason:
        what += f"; {reason}"
    size = 2.6 + 0.65 * math.sqrt(cost)
    return Point(label, what, vectors, min(error, cap), kind, size)
