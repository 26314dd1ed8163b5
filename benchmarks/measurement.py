"""One measured case, from a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "bad_alloc", "MemoryError", "Out of memory")


@dataclass(frozen=True)
class Measurement:
    """What one case took, or why there is no answer.

    Attributes:
        name: the case.
        num_steps: n.
        failure: why there is no result; ``None`` where there is one.
        import_s: importing the library.
        first_s: the first call in a fresh process.
        warm_s: a later call in the same process; ``None`` where there was no time for one.
        price_s: certifying the sensitivity and the error of the result; ours only.
        rmse: the certified root mean squared error.
        gap: how much of the certified sensitivity may be slack; 0 where it is exact.
        peak_mib: the most memory that the process held.
    """

    name: str
    num_steps: int
    failure: str | None = None
    import_s: float | None = None
    first_s: float | None = None
    warm_s: float | None = None
    price_s: float | None = None
    rmse: float | None = None
    gap: float | None = None
    peak_mib: float | None = None

    @property
    def cold_s(self) -> float | None:
        """What a user waits for in a fresh process: the import and the first call."""
        if self.import_s is None or self.first_s is None:
            return None
        return self.import_s + self.first_s


def run(
    name: str, num_steps: int, command: Sequence[str], limit_s: float
) -> tuple[Measurement, dict[str, Any]]:
    """Run a measuring process for at most ``limit_s`` seconds; also returns what else it said."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdout=output, stderr=complaints)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
        found = _records(output)
        known = {key: found.pop(key) for key in tuple(found) if key in _FIELDS}
        measurement = replace(Measurement(name, num_steps), **known)
        if measurement.first_s is None:
            measurement = replace(measurement, failure=_reason(status, complaints, limit_s))
        return measurement, found


_FIELDS = frozenset(Measurement.__dataclass_fields__)


def _records(output: IO[str]) -> dict[str, Any]:
    """All complete lines, as one dictionary."""
    output.seek(0)
    merged: dict[str, Any] = {}
    for line in output:
        if line.startswith("{") and line.endswith("\n"):
            merged.update(json.loads(line))
    return merged


def _reason(status: int | None, complaints: IO[str], limit_s: float) -> str:
    if status is None:
        return f"over {limit_s:g} s"
    complaints.seek(0)
    text = complaints.read()
    if status == -signal.SIGKILL or any(word in text for word in _OUT_OF_MEMORY):
        return "out of memory"
    last = text.strip().splitlines()[-1:] or [f"exit status {status}"]
    return f"failed: {last[0][:60]}"
