"""The record of a training run: its plan, its statement and its course."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from corrnoise import _formats
from corrnoise.planning import Plan
from corrnoise.records.statement import Statement


@dataclass(frozen=True)
class Record:
    """How things stood after some steps.

    Attributes:
        step: the steps taken.
        epsilon: what they spent; ``None`` where it was not computed.
        loss: mean training loss since the record before; computed from private data, outside the
            guarantee.
        test_loss: on the test set.
        test_accuracy: on the test set; ``None`` where there is none.
    """

    step: int
    epsilon: float | None
    loss: float
    test_loss: float | None
    test_accuracy: float | None


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        label: how it is called in tables.
        plan: what was planned.
        statement: the privacy statement of what was released.
        records: in the order of steps, one an epoch.
        data: name, num_train, num_test, num_classes.
        model: name, num_parameters.
        settings: learning rate, clip norm, seed, device.
        seconds: of training, without planning.
    """

    label: str
    plan: Plan
    statement: Statement
    records: tuple[Record, ...]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    seconds: float

    @property
    def test_accuracy(self) -> float | None:
        """After the last step."""
        return self.records[-1].test_accuracy if self.records else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        fields = {
            "label": self.label,
            "plan": self.plan.to_dict(),
            "statement": self.statement.to_dict(),
            "records": [asdict(record) for record in self.records],
            "data": dict(self.data),
            "model": dict(self.model),
            "settings": dict(self.settings),
            "seconds": self.seconds,
        }
        return _formats.stamped("run", fields)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Run:
        """The inverse of ``to_dict``."""
        data = _formats.opened("run", data)
        return Run(
            label=data["label"],
            plan=Plan.from_dict(data["plan"]),
            statement=Statement.from_dict(data["statement"]),
            records=tuple(Record(**record) for record in data["records"]),
            data=data["data"],
            model=data["model"],
            settings=data["settings"],
            seconds=data["seconds"],
        )

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> Run:
        """The inverse of ``to_json``: an equal run, to the last bit."""
        return Run.from_dict(json.loads(text))
