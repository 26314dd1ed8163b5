"""The record of a training run: its plan, its statement and its progress over the steps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from corrnoise import _checks as checks
from corrnoise import _formats
from corrnoise.planning import Plan
from corrnoise.records.statement import Statement


@dataclass(frozen=True)
class Record:
    """The state of a run after some steps.

    Attributes:
        step: the number of steps taken.
        epsilon: the ε that they spent; ``None`` if it was not computed.
        loss: the mean training loss since the record before. It is computed from private data and
            not covered by the guarantee.
        test_loss: the loss on the test set.
        test_accuracy: the accuracy on the test set; ``None`` if there is none.
    """

    step: int
    epsilon: float | None
    loss: float
    test_loss: float | None
    test_accuracy: float | None


@dataclass(frozen=True)
class Run:
    """A finished training run: what was planned, what was released, and how training went.

    Attributes:
        label: the name of the run in tables.
        plan: the plan of the run.
        statement: the privacy statement of what was released.
        records: one record for each epoch, in the order of steps.
        data: name, num_train, num_test, num_classes.
        model: name, num_parameters.
        settings: learning rate, clip norm, seed, device.
        seconds: the time of training, without planning.

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms="dp_sgd")
    >>> run = Run("mine", plan, Statement.of(plan, clip_norm=1.0), records=(), data={}, model={},
    ...           settings={}, seconds=60.0)
    >>> Run.from_json(run.to_json()) == run
    True
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
        """The test accuracy after the last step."""
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
        """The inverse of ``to_dict``.

        Raises:
            ValueError: a field is missing, unknown or wrong; the message names it.
        """
        names = [field.name for field in fields(Run)]
        given = checks.fields("run", _formats.opened("run", data), names)
        for name in ("data", "model", "settings"):
            if not isinstance(given[name], Mapping):
                raise ValueError(f"{name} of a run must be a JSON object, got {given[name]!r:.60}")
        records = checks.listed("records", given["records"])
        return Run(
            label=checks.text("label of a run", given["label"]),
            plan=Plan.from_dict(given["plan"]),
            statement=Statement.from_dict(given["statement"]),
            records=tuple(Record(**checks.of_type("record", each, Record)) for each in records),
            data=given["data"],
            model=given["model"],
            settings=given["settings"],
            seconds=checks.number("seconds of a run", given["seconds"], 0.0),
        )

    def to_json(self) -> str:
        """``to_dict`` as JSON, with a checksum that detects accidental damage.

        The checksum does not protect against someone who changes it too.
        """
        fields = self.to_dict()
        return json.dumps({**fields, _CHECKSUM: _checksum(fields)})

    @staticmethod
    def from_json(text: str) -> Run:
        """The inverse of ``to_json``: an equal run, to the last bit.

        Raises:
            ValueError: the text is not a run, or was changed.
        """
        fields = checks.parsed("run", text)
        if isinstance(fields, dict) and _CHECKSUM in fields:
            fields = check_checksum(cast(dict[str, Any], fields))
        return Run.from_dict(fields)


_CHECKSUM = "sha256"


def check_checksum(fields: Any) -> dict[str, Any]:
    """The fields of a run without the checksum; raises if it is missing or wrong."""
    if not isinstance(fields, dict) or _CHECKSUM not in fields:
        raise ValueError(f"a run must be a JSON object with the field {_CHECKSUM!r}, got none")
    found = dict(cast(dict[str, Any], fields))
    if found.pop(_CHECKSUM) != _checksum(found):
        raise ValueError(
            f"a run must be as it was written, got one that does not fit its {_CHECKSUM}; "
            "it is damaged or was changed: restore it from a copy"
        )
    return found


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()
