"""How well the runs learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from corrnoise.report import figures
from corrnoise.report.charts import hue
from corrnoise.report.evidence import Evidence, mechanism_name
from corrnoise.report.markup import (
    budget,
    facts,
    figure,
    folded,
    number,
    percent,
    section,
    swatch,
    table,
    tag,
    text,
)

_KNOWN = {
    "num_train": "training examples",
    "num_test": "test examples",
    "num_classes": "classes",
    "num_parameters": "parameters",
}


def course(evidence: Evidence) -> str:
    """Accuracy and loss of the runs; "" for a plan."""
    if not evidence.runs:
        return ""
    first = evidence.runs[0]
    settings = [
        ("Data", _listed(first.data)),
        ("Model", _listed(first.model)),
        *((_words(key), _plain(value)) for key, value in first.settings.items()),
        ("Training time", f"{number(first.seconds, 3)} s, without planning"),
    ]
    return section(
        "course",
        "How well it learned",
        tag("p", text(_same_budget(evidence))) if len(evidence.runs) > 1 else "",
        tag("div", *_pictures(evidence), class_="grid two"),
        _runs(evidence),
        _records(evidence),
        tag(
            "div", tag("h3", text(f"The run “{first.label}”")), facts(settings), class_="card after"
        ),
    )


def _pictures(evidence: Evidence) -> Iterator[str]:
    accuracy, loss = figures.accuracy(evidence), figures.loss(evidence)
    if accuracy:
        yield figure("Accuracy", accuracy, "On the test set, at each record of the run.")
    if loss:
        yield figure(
            "Loss",
            loss,
            "Solid: on the test set. Dotted: on the training set, the mean since the record "
            "before. The training loss comes from private data and is outside the guarantee: do "
            "not publish it with the model.",
        )


def _runs(evidence: Evidence) -> str:
    rows = [
        [
            swatch(hue(color), run.label),
            text(mechanism_name(run.plan.mechanism)),
            budget(run.statement.epsilon),
            budget(run.statement.delta, 3),
            text(run.statement.kind),
            number(run.plan.noise_multiplier),
            number(run.plan.error),
            percent(run.test_accuracy),
            number(run.records[-1].test_loss if run.records else None, 3),
            number(run.seconds, 3),
        ]
        for color, run in enumerate(evidence.runs)
    ]
    return table(
        "The runs after their last step. Noise: standard deviation over the clip norm. Error: "
        "expected, mean over the steps, per unit of clip norm.",
        [
            *("Run", "Mechanism", "ε", "δ", "ε is", "Noise", "Error"),
            *("Test accuracy", "Test loss", "Time, s"),
        ],
        rows,
        numeric=(2, 3, 5, 6, 7, 8, 9),
        strong=0,
    )


def _records(evidence: Evidence) -> str:
    rows = [
        [
            text(run.label),
            number(record.step),
            budget(record.epsilon),
            percent(record.test_accuracy),
            number(record.test_loss),
            number(record.loss),
        ]
        for run in evidence.runs
        for record in run.records
    ]
    if not rows:
        return ""
    head = ["Run", "Step", "ε spent", "Test accuracy", "Test loss", "Training loss"]
    return folded(table("All records", head, rows, numeric=(1, 2, 3, 4, 5)))


def _same_budget(evidence: Evidence) -> str:
    budgets = {(run.statement.epsilon, run.statement.delta) for run in evidence.runs}
    if len(budgets) > 1:
        return "The runs did not spend the same (ε, δ): compare them with the table in hand."
    samplings = {run.plan.sampling for run in evidence.runs}
    also = "" if len(samplings) == 1 else ", though their batches are not sampled in one way"
    return f"All runs spent the same (ε, δ){also}. A curve is one run: other seeds give others."


def _listed(values: Mapping[str, Any]) -> str:
    """A name and its sizes in one line."""
    parts = [str(values["name"])] if "name" in values else []
    for key, value in values.items():
        if key != "name" and value is not None:
            shown = _plain(value)
            parts.append(f"{shown} {_KNOWN[key]}" if key in _KNOWN else f"{_words(key)} {shown}")
    return ", ".join(parts)


def _words(key: str) -> str:
    return key.replace("_", " ").capitalize()


def _plain(value: object) -> str:
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
        return number(value)
    return str(value)
