"""A storm over tiny training runs: kills, full disks, damage, hostile plans, processes at odds.

    python benchmarks/storm.py [--rounds N | --minutes M] [--seed S] [--json FILE] [KIND=COUNT ...]

After each event the run is resumed. It must end bit-equal to an undisturbed run with the same key,
or be refused in one line; a step that is released with other values, a ledger that forgets, a key
that appears in another file, a traceback and a run that can never go on are wrong. A round is one
event of each kind. Ctrl-C ends the storm; the counts so far are printed. The exit status is 1 where
anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

KINDS = {
    "kill": "SIGKILL before, inside or after an operation on a file",
    "begin": "SIGKILL twice while key and ledger come into being",
    "full": "disk full from an operation on a file on (ENOSPC)",
    "small": "file system of 512 KiB that is full (a real ENOSPC)",
    "limit": "limit of the file size in the middle of a write (a real EFBIG)",
    "interrupt": "Ctrl-C inside a write, and on in the same process",
    "damage": "a file with a bit flipped, cut, emptied, exchanged, removed, …",
    "plan": "hostile plan; accepted only where what it states is true",
    "two": "two processes with one run",
    "fork": "fork that takes a step, begins anew or outlives its process",
}
ENDS = ("resumed", "refused", "wrong")
_MOUNT_DETACH, _MOUNT_PRIVATE, _NEW_NAMESPACES = 2, 0x44000, 0x10020000


class Counts:
    """How many events of each kind ended how."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, int]] = {}
        self.subjects: dict[str, dict[str, int]] = {}

    def add(self, kind: str, subject: str, end: str) -> None:
        row = self.rows.setdefault(kind, dict.fromkeys(ENDS, 0))
        row[end] += 1
        subjects = self.subjects.setdefault(kind, {})
        subjects[subject] = subjects.get(subject, 0) + 1

    def to_dict(self, seed: int, seconds: float) -> dict[str, Any]:
        """What ``table`` reads, and where and when it was counted."""
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
            "versions": {"python": platform.python_version(), **_versions("corrnoise", "torch")},
            "seed": seed,
            "seconds": round(seconds),
            "rows": [
                {"kind": kind, "events": sum(self.rows[kind].values()), **self.rows[kind]}
                for kind in KINDS
                if kind in self.rows
            ],
            "subjects": {kind: dict(sorted(each.items())) for kind, each in self.subjects.items()},
        }


def table(result: dict[str, Any]) -> str:
    """The counts in Markdown."""
    lines = [
        "| event | events | resumed, bit-equal | refused in one line | wrong |",
        "|---|---:|---:|---:|---:|",
    ]
    rows = [(KINDS[row["kind"]], row) for row in result["rows"]]
    names = ("events", *ENDS)
    rows.append(("all", {name: sum(row[name] for _, row in rows) for name in names}))
    for label, row in rows:
        lines.append("| " + " | ".join([label, *(f"{row[name]:,}" for name in names)]) + " |")
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> str:
    """Where, when and for how long the storm raged, in a sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return (
        f"{result['date']}, seed {result['seed']}, {result['seconds']:,} s "
        f"({result['machine']}; {versions})."
    )


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="one event of each kind, as often as this")
    parser.add_argument("--minutes", type=float, default=5.0, help="if --rounds is not given")
    parser.add_argument("--seed", type=int, default=0, help="of all choices")
    parser.add_argument("--json", type=Path, help="write the counts there")
    parser.add_argument("--folder", type=Path, help="for the files of the runs")
    parser.add_argument("counts", nargs="*", metavar="KIND=COUNT", help=f"of {', '.join(KINDS)}")
    given = parser.parse_args(args)
    # One thread: processes are forked, and the small file system needs a process without threads.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    counts, start = Counts(), time.monotonic()
    stopped = _stoppable()
    with tempfile.TemporaryDirectory(prefix="storm-", dir=given.folder) as name:
        try:
            with _small_disk(Path(name)) as small:
                _rage(_order(given, start, stopped), given.seed, counts, Path(name), small)
        except KeyboardInterrupt:
            stopped.append(signal.SIGINT)
    if stopped:
        print("interrupted")
    result = counts.to_dict(given.seed, time.monotonic() - start)
    print(f"{table(result)}\n\n{summary(result)}")
    if given.json:
        from corrnoise import _files

        _files.write(given.json, json.dumps(result, indent=1) + "\n")
    return 1 if any(row["wrong"] for row in result["rows"]) else 0


def _rage(
    order: Iterator[str], seed: int, counts: Counts, folder: Path, small: Path | None
) -> None:
    """Make one event after the other."""
    # Imported late: the small file system cannot be had once there are threads.
    from storm_events import Events
    from storm_process import Process
    from storm_runs import warm_up

    if small is None:
        print("this system lets no user mount a small file system: that kind is left out")
    warm_up()
    events = Events(seed, folder, small)
    print("the storm begins", flush=True)
    try:
        for kind in order:
            if kind in events.kinds:
                found = events.make(kind)
                counts.add(kind, found.subject, found.end)
                if found.end == "wrong":
                    print(f"wrong: {kind}: {found.subject}: {found.why}", flush=True)
    finally:
        Process.end_all()


def _order(given: argparse.Namespace, start: float, stopped: list[int]) -> Iterator[str]:
    """The kind of each event, until the end of the storm."""
    counted = [each.partition("=") for each in given.counts]
    kinds = [kind for kind, _, number in counted for _ in range(int(number))]
    rounds = 1 if kinds else given.rounds
    for done in count():
        for kind in kinds or KINDS:
            late = rounds is None and time.monotonic() - start > 60.0 * given.minutes
            if stopped or late or done == rounds:
                return
            yield kind


def _stoppable() -> list[int]:
    """A list that is filled by Ctrl-C: the storm ends with its event, the second time at once."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


@contextmanager
def _small_disk(folder: Path) -> Generator[Path | None]:
    """A file system of 512 KiB that only this process and its children see, where allowed."""
    place = folder / "small"
    place.mkdir()
    child = os.fork()  # which tries: a failure half-way would leave a process without a user
    if child == 0:
        os._exit(0 if _mounted(place) else 1)
    if os.waitpid(child, 0)[1] != 0 or not _mounted(place):
        yield None
        return
    try:
        yield place
    finally:
        ctypes.CDLL(None).umount2(bytes(place), _MOUNT_DETACH)


def _mounted(place: Path) -> bool:
    """Mount a small file system in namespaces of this process; whether that worked."""
    user, group, system = os.getuid(), os.getgid(), ctypes.CDLL(None)
    try:
        if system.unshare(_NEW_NAMESPACES) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        system.mount(b"none", b"/", None, _MOUNT_PRIVATE, None)
        return system.mount(b"none", bytes(place), b"tmpfs", 0, b"size=512k,mode=700") == 0
    except (AttributeError, OSError):
        return False


def _versions(*names: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
