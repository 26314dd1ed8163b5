"""All measurements of one run, and how to look them up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from measurement import Measurement

Key = tuple[str, int]


@dataclass
class Results:
    """What one run measured.

    Attributes:
        ours: by mechanism and n.
        theirs: by name in jax-privacy and n.
        import_s: ``import corrnoise``, less the start of the interpreter.
        machine: where it ran, and the versions.
    """

    ours: dict[Key, Measurement] = field(default_factory=dict[Key, Measurement])
    theirs: dict[Key, Measurement] = field(default_factory=dict[Key, Measurement])
    import_s: float = math.nan
    machine: dict[str, str] = field(default_factory=dict[str, str])

    def to_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return {
            "machine": self.machine,
            "import_s": self.import_s,
            "ours": [asdict(m) for m in self.ours.values()],
            "theirs": [asdict(m) for m in self.theirs.values()],
        }


def ratio(above: float | None, below: float | None) -> float | None:
    """The quotient where both were measured."""
    return above / below if above is not None and below else None


def seconds(table: Mapping[Key, Measurement], name: str, n: int) -> float | None:
    """The time of a call in a warm process, where measured."""
    found = table.get((name, n))
    return found.warm_s if found else None
