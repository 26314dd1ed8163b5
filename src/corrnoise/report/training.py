"""The training results of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from corrnoise import mechanisms
from corrnoise.report import figures
from corrnoise.report.evidence import Evidence
from corrnoise.report.kit.blocks import facts, figure, folded, section, swatch, table
from corrnoise.report.kit.charts import hue
from corrnoise.report.kit.markup import tag
from corrnoise.report.kit.numbers import number, percent, rounded_up

_KNOWN = {
    "num_train": "training examples",
    "num_test": "test examples",
    "num_classes": "classes",
    "num_parameters": "parameters",
}


def results(evidence: Evidence) -> Markup | None:
    """Accuracy and loss of the runs; ``None`` for a plan."""
    if not evidence.runs:
        return None
    first = evidence.runs[0]
    own = {key: value for key, value in first.settings.items() if key != "model"}
    settings = [
        ("Data", _listed(first.data)),
        ("Model", _listed(first.model)),
        *((_words(key), _plain(value)) for key, value in own.items()),
        ("Training time", f"{number(first.seconds, 3)} s, excluding planning"),
    ]
    return section(
        "training",
        "Training results",
        tag("p", _same_budget(evidence)) if len(evidence.runs) > 1 else None,
        tag("div", *_pictures(evidence), class_="grid two"),
        _runs(evidence),
        _records(evidence),
        tag("div", tag("h3", f"Settings of “{first.label}”"), facts(settings), class_="card after"),
    )


def _pictures(evidence: Evidence) -> Iterator[Markup]:
    accuracy, loss = figures.accuracy(evidence), figures.loss(evidence)
    if accuracy is not None:
        yield figure("Accuracy", accuracy, "On the test set, at each recorded step.")
    if loss is not None:
        yield figure(
            "Loss",
            loss,
            "Solid lines: test set. Dotted lines: training set, averaged since the previous "
            "record. The training loss is computed from private data and is not covered by the "
            "guarantee: do not publish it with the model.",
        )


def _runs(evidence: Evidence) -> Markup:
    rows = [
        [
            swatch(hue(color), run.label),
            mechanisms.shown(run.plan.mechanism),
            rounded_up(run.statement.epsilon),
            rounded_up(run.statement.delta, 3),
            run.statement.kind,
            rounded_up(run.plan.noise_multiplier),
            number(run.plan.error),
            percent(run.test_accuracy),
            number(run.records[-1].test_loss if run.records else None, 3),
            number(run.seconds, 3),
        ]
        for color, run in enumerate(evidence.runs)
    ]
    return table(
        "Results after the last step. Noise: the noise multiplier, which is the standard deviation "
        "over the clip norm. Error: expected, averaged over the steps, per unit of clip norm.",
        [
            *("Run", "Mechanism", "ε", "δ", "ε is", "Noise", "Error"),
            *("Test accuracy", "Test loss", "Time, s"),
        ],
        rows,
        numeric=(2, 3, 5, 6, 7, 8, 9),
        strong=0,
    )


def _records(evidence: Evidence) -> Markup | None:
    rows = [
        [
            run.label,
            number(record.step),
            rounded_up(record.epsilon),
            percent(record.test_accuracy),
            number(record.test_loss),
            number(record.loss),
        ]
        for run in evidence.runs
        for record in run.records
    ]
    if not rows:
        return None
    head = ["Run", "Step", "ε spent", "Test accuracy", "Test loss", "Training loss"]
    return folded(table("All records", head, rows, numeric=(1, 2, 3, 4, 5)))


def _same_budget(evidence: Evidence) -> str:
    budgets = {(run.statement.epsilon, run.statement.delta) for run in evidence.runs}
    if len(budgets) > 1:
        words = "The runs did not spend the same (ε, δ); the table shows what each run spent."
        return f"{words} {_sum(evidence)}"
    samplings = {run.plan.sampling for run in evidence.runs}
    also = "" if len(samplings) == 1 else ", but their batches were sampled in different ways"
    return (
        f"All runs spent the same (ε, δ){also}. {_sum(evidence)} Each curve is a single run; other "
        "seeds give other curves."
    )


def _sum(evidence: Evidence) -> str:
    """The total privacy cost of all runs."""
    spent = [run.statement for run in evidence.runs]
    epsilon = rounded_up(sum(s.epsilon for s in spent))
    delta = rounded_up(min(1.0, sum(s.delta for s in spent)), 3)
    return (
        f"Each (ε, δ) is that of one run alone: what is published of several runs on the same data "
        f"costs their sum, ({epsilon}, {delta}) for all {len(spent)}."
    )


def _listed(values: Mapping[str, Any]) -> str:
    """A name and its sizes in one line."""
    parts = [str(values["name"])] if "name" in values else []
    for key, value in values.items():
        if key != "name" and value is not None:
            shown = _plain(value)
            parts.append(f"{shown} {_KNOWN[key]}" if key in _KNOWN else f"{_words(key)} {shown}")
    return ", ".join(parts)


def _words(key: str) -> str:
    """A key as words, with a capital first letter."""
    return (key[:1].upper() + key[1:]).replace("_", " ")


def _plain(value: object) -> str:
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return number(value)
    return str(value)
