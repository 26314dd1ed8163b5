"""One self-contained HTML file for a plan or for runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from corrnoise.planning import Plan
from corrnoise.report import choice, course, promise
from corrnoise.report.evidence import Evidence, mechanism_name
from corrnoise.report.markup import budget, number, percent, tag, text
from corrnoise.report.style import css
from corrnoise.run import Run
from corrnoise.statement import versions

# The browser itself refuses whatever is not in the file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_BARS = (16, -9, 6, -4, 3)


def html(plan: Plan | None = None, runs: Sequence[Run] = ()) -> str:
    """The page of a plan, or of a run and those that it is compared with.

    It opens from disk, loads nothing and runs no script. Every number comes from the plan and the
    runs; DP-SGD at the same budget and ε along the way are priced here where they are not recorded:
    a few seconds for balls-in-bins, else less than one.

    Args:
        plan: a plan; the first run's by default.
        runs: the run that the page is about, then those to compare it with.

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms=["dp_sgd", "bisr"])
    >>> page = html(plan)
    >>> page.startswith("<!doctype html>"), "http" + "://" in page
    (True, False)
    """
    evidence = Evidence.of(plan, runs)
    title = _title(evidence)
    body = [
        promise.statement(evidence),
        course.course(evidence),
        choice.error(evidence),
        choice.noise(evidence),
        choice.memory(evidence),
        promise.spending(evidence),
        choice.alternatives(evidence),
        promise.recomputing(evidence),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{text(title)}</title><style>{css()}</style></head>\n"
        f'<body><div class="page">{_header(evidence, title)}\n{tag("main", *body)}'
        f"{_footer()}</div>{_data(evidence.plan)}</body></html>\n"
    )


def write(path: str | Path, plan: Plan | None = None, runs: Sequence[Run] = ()) -> Path:
    """Write ``html`` to a file, whole or not at all, and return its path."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    part.write_text(html(plan, runs), encoding="utf-8")
    return part.replace(target)


def read(path: str | Path) -> Plan:
    """The plan that a page carries, to the last bit."""
    page = Path(path).read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    if found is None:
        raise ValueError(f"path must be a page that report.write made, got {str(path)!r}")
    return Plan.from_json(found[1])


def _data(plan: Plan) -> str:
    """The plan as data that no browser runs."""
    carried = json.dumps(plan.to_dict()).replace("<", "\\u003c")
    return f'<script type="application/json" id="plan">{carried}</script>'


def _title(evidence: Evidence) -> str:
    s = evidence.statement
    promise = f"({budget(s.epsilon)},\N{NO-BREAK SPACE}{budget(s.delta, 3)})"
    promise += "\N{NON-BREAKING HYPHEN}differential"
    if evidence.runs:
        return f"Trained with {promise} privacy"
    return f"A plan for training with {promise} privacy"


def _header(evidence: Evidence, title: str) -> str:
    bars = "".join(
        tag(
            "rect",
            x=float(3 + 5 * i),
            y=float(12 - max(h, 0) * 0.7),
            width=3.4,
            height=abs(h) * 0.7,
            rx=1.0,
            class_="minus" if h < 0 else "plus",
        )
        for i, h in enumerate(_BARS)
    )
    logo = tag("svg", bars, viewBox="0 0 30 22", aria_hidden="true")
    switch = "".join(
        f'<label><input type="radio" name="theme" id="{name.lower()}"'
        f"{' checked' if name == 'Auto' else ''}><span>{name}</span></label>"
        for name in ("Auto", "Light", "Dark")
    )
    top = tag(
        "div",
        tag("div", logo, "corrnoise", class_="brand"),
        tag("fieldset", tag("legend", "Colours"), switch, class_="theme"),
        class_="top",
    )
    return tag(
        "header",
        top,
        tag("h1", text(title)),
        tag("p", text(_lead(evidence)), class_="lead"),
        tag("dl", *_tiles(evidence), class_="tiles"),
    )


def _footer() -> str:
    made = (
        f"Written by corrnoise {versions()['corrnoise']}. This page loads nothing and runs nothing."
    )
    return tag("footer", text(made))


def _lead(evidence: Evidence) -> str:
    plan, unit = evidence.plan, evidence.statement.unit
    correlated = (
        "independent in every step"
        if plan.mechanism.name == "dp_sgd"
        else "correlated between steps, so that later noise cancels part of earlier noise"
    )
    if evidence.runs:
        run = evidence.runs[0]
        data, model = run.data.get("name", "not named"), run.model.get("name", "not named")
        what = f"This is the record of one training run (model: {model}; data: {data})"
    else:
        what = (
            f"This is a plan to train on {number(plan.num_examples)} examples in "
            f"{number(plan.num_steps)} steps"
        )
    return (
        f"{what}: what is promised to each {unit} in the data, and at what price. The noise that "
        f"keeps the promise is {correlated}."
    )


def _tiles(evidence: Evidence) -> list[str]:
    s, plan = evidence.statement, evidence.plan
    tiles = [
        _tile(
            "Privacy",
            f"ε = {budget(s.epsilon)}",
            f"δ = {budget(s.delta, 3)}",
            badge={"exact": "exact", "bound": "proven bound", "certified": "certified"}[s.kind],
        )
    ]
    if evidence.runs:
        accuracy = evidence.runs[0].test_accuracy
        if accuracy is not None:
            tiles.append(_tile("Test accuracy", percent(accuracy), _against(evidence, accuracy)))
    vectors = plan.scheme.num_vectors
    state = "no state" if not vectors else f"{vectors} model-sized vectors"
    family, _, size = mechanism_name(plan.mechanism).partition(" ")
    note = f"{size}; {state} between steps" if size else f"{state} between steps"
    tiles.append(
        _tile("Mechanism", family.replace("-", "\N{NON-BREAKING HYPHEN}"), note, kind="tile wide")
    )
    tiles.append(
        _tile("Noise", number(plan.noise_multiplier), "standard deviation over the clip norm")
    )
    ours, baseline = evidence.errors[0], evidence.baseline
    if baseline:
        tiles.append(
            _tile(
                "Error",
                _ratio(baseline.mean / ours.mean),
                f"than DP-SGD at the same budget: {number(ours.mean, 3)}, not "
                f"{number(baseline.mean, 3)}",
            )
        )
    else:
        tiles.append(_tile("Error", number(ours.mean, 3), "mean over steps, per unit of clip norm"))
    return tiles


def _against(evidence: Evidence, accuracy: float) -> str:
    if len(evidence.runs) < 2 or evidence.runs[1].test_accuracy is None:
        return "after the last step"
    other = evidence.runs[1]
    points = 100 * (accuracy - (other.test_accuracy or 0.0))
    sign = "−" if points < 0 else "+"
    return f"{sign}{abs(points):.1f} points on {other.label}"


def _ratio(value: float) -> str:
    if value >= 1.0:
        return f"{number(value, 2)}× less"
    return f"{number(1.0 / value, 2)}× more"


def _tile(name: str, value: str, note: str, badge: str = "", kind: str = "tile") -> str:
    mark = " " + tag("span", text(badge), class_="badge") if badge else ""
    return tag(
        "div",
        tag("dt", text(name)),
        tag("dd", text(value), class_="big"),
        tag("dd", text(note), mark, class_="note"),
        class_=kind,
    )
