"""The run that an output folder has already, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corrnoise.planning import Plan
from corrnoise.records.ledger import OtherRunError, read_entries


@dataclass(frozen=True)
class Begun:
    """A run whose ledger lies where one without ``resume_from_checkpoint`` is about to begin.

    Such a run may repeat that one from its start, exactly; the ledger refuses any other.

    Attributes:
        folder: where both write.
        header: of the ledger.
        steps: how many were released.
        apart: the names of ``key`` and ``ledger`` where they were given, and lie elsewhere.
        checkpoint: whether it can be resumed.
    """

    folder: Path
    header: Mapping[str, Any]
    steps: int
    apart: Sequence[str]
    checkpoint: bool

    def check(self, **wanted: Any) -> None:
        """Raise if a run that is wanted would be another one, before anything is computed.

        Args:
            wanted: fields of its plan and of its header.
        """
        try:
            plan = Plan.from_json(self.header["plan"])
        except (KeyError, TypeError, ValueError):  # of another version: the ledger says so
            return
        found = {name: getattr(plan, name, self.header.get(name)) for name in wanted}
        different = [
            f"{name} (was {found[name]}, is {value})"
            for name, value in wanted.items()
            if found[name] != value
        ]
        if different:
            raise ValueError(
                f"{self._remedies}; that run differs in {', '.join(different)}, which must be "
                "restored to go on with it"
            )

    def explained(self, error: ValueError) -> ValueError:
        """The error, with the remedies before it where the ledger has refused another run."""
        if isinstance(error, OtherRunError):
            return OtherRunError(f"{self._remedies}: {error}")
        return error

    @property
    def _remedies(self) -> str:
        known = f"{self.folder} has a run of {self.steps} of {self.header.get('num_steps')} steps"
        new = f"pass another {' and another '.join(('output_dir', *self.apart))} for a new run"
        if not self.checkpoint:
            return f"{known} and no checkpoint to resume it from; {new}"
        return f"{known}; {new}, or resume_from_checkpoint=True to train() to go on with that one"


def begun(folder: Path, ledger: Path, *, apart: Sequence[str], checkpoint: bool) -> Begun | None:
    """The run of a ledger, or ``None`` where none has recorded a step.

    A damaged ledger is no run here: whoever opens it says what is wrong.

    Args:
        folder: as in ``Begun``.
        ledger: its path.
        apart: as in ``Begun``.
        checkpoint: as in ``Begun``.
    """
    try:
        header, *entries = read_entries(ledger)
    except (OSError, ValueError):
        return None
    if not entries:
        return None
    steps = 0
    name = "published" if header.get("publishes") == "checkpoints" else "step"
    for entry in entries:
        if name in entry:
            steps = int(entry[name]) + (name == "step")
    return Begun(folder, header, steps, apart, checkpoint)
