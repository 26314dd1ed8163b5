"""The top of the page: its title, a summary, and the main numbers."""

from __future__ import annotations

from markupsafe import Markup

from corrnoise import mechanisms
from corrnoise._rounding import counted
from corrnoise.report.evidence import Evidence, family_label
from corrnoise.report.kit.markup import joined, tag
from corrnoise.report.kit.numbers import number, percent, rounded_up

_BARS = (16, -9, 6, -4, 3)
_BADGES = {"exact": "exact", "bound": "proven bound", "certified": "certified"}


def title(evidence: Evidence) -> str:
    """The title of the page."""
    s = evidence.statement
    budget = f"({rounded_up(s.epsilon)},\N{NO-BREAK SPACE}{rounded_up(s.delta, 3)})"
    start = "Trained with" if evidence.runs else "A plan for training with"
    return f"{start} {budget}\N{NON-BREAKING HYPHEN}differential privacy"


def header(evidence: Evidence) -> Markup:
    """Brand, colour switch, title, lead and tiles."""
    bars = (
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
    logo = tag("svg", *bars, viewBox="0 0 30 22", aria_hidden="true")
    switch = (
        tag(
            "label",
            tag("input", type="radio", name="theme", id=name.lower(), checked=name == "Auto"),
            tag("span", name),
        )
        for name in ("Auto", "Light", "Dark")
    )
    return tag(
        "header",
        tag(
            "div",
            tag("div", logo, "corrnoise", class_="brand"),
            tag("fieldset", tag("legend", "Colours"), *switch, class_="theme"),
            class_="top",
        ),
        tag("h1", title(evidence)),
        tag("p", _lead(evidence), class_="lead"),
        tag("dl", *_tiles(evidence), class_="tiles"),
    )


def _lead(evidence: Evidence) -> str:
    plan, unit = evidence.plan, evidence.statement.unit
    if evidence.runs:
        run, others = evidence.runs[0], len(evidence.runs) - 1
        data, model = run.data.get("name", "not named"), run.model.get("name", "not named")
        what = f"This page records a training run (model: {model}; data: {data})"
        if others:
            what += " and compares it with "
            what += "another run" if others == 1 else f"{number(others)} other runs"
    else:
        what = (
            f"This page describes a plan to train on {number(plan.num_examples)} examples in "
            f"{counted(plan.num_steps, 'step')}"
        )
    noise = (
        "independent in every step"
        if plan.mechanism.independent
        else "correlated between steps, so that later noise cancels part of earlier noise"
    )
    return (
        f"{what}: the privacy guarantee for each {unit} in the data, and the error that the noise "
        f"causes. The noise is {noise}."
    )


def _tiles(evidence: Evidence) -> list[Markup]:
    s, plan = evidence.statement, evidence.plan
    tiles = [
        _tile(
            "Privacy",
            f"ε = {rounded_up(s.epsilon)}",
            f"δ = {rounded_up(s.delta, 3)}",
            badge=_BADGES[s.kind],
        )
    ]
    if evidence.runs:
        accuracy = evidence.runs[0].test_accuracy
        if accuracy is not None:
            tiles.append(_tile("Test accuracy", percent(accuracy), _against(evidence, accuracy)))
    vectors = plan.scheme.num_vectors
    state = counted(vectors, "model-sized vector") if vectors else "no state"
    family = family_label(plan.mechanism.name)
    size = mechanisms.shown(plan.mechanism).removeprefix(family).strip()
    note = f"{size}; {state} between steps" if size else f"{state} between steps"
    tiles.append(_tile("Mechanism", family, note, kind="tile wide"))
    tiles.append(
        _tile(
            "Noise multiplier",
            rounded_up(plan.noise_multiplier),
            "standard deviation over clip norm",
        )
    )
    ours, baseline = evidence.errors[0], evidence.baseline
    if baseline:
        against = f"{number(ours.mean, 3)} against {number(baseline.mean, 3)}"
        note = f"than DP-SGD with {baseline.sampling} batches at the same budget ({against})"
        tiles.append(_tile("Error", _ratio(baseline.mean / ours.mean), note))
    else:
        note = "mean over the steps, per unit of clip norm"
        tiles.append(_tile("Error", number(ours.mean, 3), note))
    return tiles


def _against(evidence: Evidence, accuracy: float) -> str:
    other = evidence.runs[1] if len(evidence.runs) > 1 else None
    if other is None or other.test_accuracy is None:
        return "after the last step"
    points = 100 * (accuracy - other.test_accuracy)
    return f"{abs(points):.1f} points {'below' if points < 0 else 'above'} {other.label}"


def _ratio(value: float) -> str:
    if value >= 1.0:
        return f"{number(value, 2)}× lower"
    return f"{number(1.0 / value, 2)}× higher"


def _tile(name: str, value: str, note: str, badge: str = "", kind: str = "tile") -> Markup:
    about: str = _unbroken(note)
    if badge:
        about = joined([about, " ", tag("span", badge, class_="badge")])
    return tag(
        "div",
        tag("dt", name),
        tag("dd", _unbroken(value), class_="big"),
        tag("dd", about, class_="note"),
        class_=kind,
    )


def _unbroken(text: str) -> str:
    """The same text, with hyphens at which no line is broken."""
    return text.replace("-", "\N{NON-BREAKING HYPHEN}")
