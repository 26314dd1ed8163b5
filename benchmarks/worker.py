"""What a measuring process does, ours or theirs; the standard library alone."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

SHORT_S = 2.0


def emit(**record: object) -> None:
    """Write one line of JSON now, so that it survives a later time-out."""
    print(json.dumps(record), flush=True)


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """The result, and the seconds that it took."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start


def warm(function: Callable[[], object], first_s: float) -> float:
    """A later call of a function whose first took ``first_s``: the least of 3 where short."""
    repeats = 3 if first_s < SHORT_S else 1
    return min(timed(function)[1] for _ in range(repeats))


def limit_memory(gib: float) -> None:
    """Make allocations beyond this much address space fail."""
    size = int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def peak_mib() -> float:
    """The largest resident memory of this process so far, in MiB.

    ``getrusage`` carries the peak of the parent over ``exec`` on Linux; /proc does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
