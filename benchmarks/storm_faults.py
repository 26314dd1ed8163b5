"""Faults at a chosen point among everything that a process does to the files of a run.

``corrnoise._files`` writes every file of a run. ``Points.install`` stands between it and the
operating system in this process: each creation, write, sync, link, rename and truncation is a
point with a number, and at one of them the process is killed, stopped or interrupted, or the disk
is full from there on. What is written is written for real: a process that is killed inside a write
leaves the first half of it.
"""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corrnoise import _files

# What happens at a point: a kill before, inside and after it, a full disk, Ctrl-C, a stop.
KILLS = ("killed before", "killed inside", "killed after")
INTERRUPTS = ("interrupted before", "interrupted inside")
FULL, STOPPED = "full", "stopped"


@dataclass(frozen=True)
class Fault:
    """What happens at which point."""

    point: int
    how: str


class Points:
    """The points of this process, in order.

    Attributes:
        seen: the writer and the operation of each point so far.
        fault: what happens, and where; ``None`` to count only.
    """

    def __init__(self, fault: Fault | None = None) -> None:
        self.seen: list[tuple[str, str]] = []
        self.fault = fault
        self._writer = "ledger"  # which alone syncs a folder and truncates a file by itself
        self._full = self._interrupted = False

    def install(self) -> None:
        """Stand between ``_files`` and the operating system, until the process ends."""
        points, raw = self, _raw(self)

        def opened(path: Any, mode: str, opener: Any = None) -> Any:
            with points.writing(_writer(path, appended=True)):
                return io.BufferedRandom(raw(path, mode, opener))

        def fdopen(handle: int, mode: str) -> Any:
            return io.BufferedRandom(raw(handle, mode))

        _files.os = _System(self, fdopen)  # type: ignore[assignment]
        _files.open = opened  # type: ignore[attr-defined]
        for name in ("replacing", "create", "append"):
            setattr(_files, name, self._named(getattr(_files, name)))

    def reach(
        self, what: str, act: Callable[[], Any], half: Callable[[], Any] | None = None
    ) -> Any:
        """Do something at the next point, or what the fault asks for."""
        number = len(self.seen)
        self.seen.append((self._writer, what))
        here = self.fault is not None and self.fault.point == number
        how = self.fault.how if here and self.fault else ""
        if how == "killed before":
            _die()
        if how == STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)
        inside = how in ("killed inside", "interrupted inside", FULL) and half is not None
        if self._interrupted or (how in INTERRUPTS and not inside):
            self._interrupted = False
            raise KeyboardInterrupt
        if (self._full and what in ("create", "write", "link")) or (how == FULL and not inside):
            self._full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # As from the kernel, a write that cannot be completed returns how far it came; what stands
        # in its way is the answer to the next one.
        found = half() if inside and half is not None else act()
        if how in KILLS:
            _die()
        self._full = self._full or how == FULL
        self._interrupted = how in INTERRUPTS
        return found

    @contextmanager
    def writing(self, writer: str) -> Generator[None]:
        """Name the writer of the points inside the block."""
        before, self._writer = self._writer, writer
        try:
            yield
        finally:
            self._writer = before

    def _named(self, function: Any) -> Any:
        """A function of ``_files``, with its file as the writer of its points."""
        appended = function.__name__ == "append"
        if function.__name__ == "replacing":

            @contextmanager
            def replacing(path: Any, **options: Any) -> Any:
                with self.writing(_writer(path)), function(path, **options) as file:
                    yield file

            return replacing

        def named(target: Any, data: bytes) -> None:
            path = target.raw.name if appended else target
            with self.writing(_writer(path, appended=appended)):
                function(target, data)

        return named


class _System:
    """``os``, with points."""

    def __init__(self, points: Points, fdopen: Callable[[int, str], Any]) -> None:
        self._points = points
        self.fdopen = fdopen

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT or flags & os.O_TMPFILE == os.O_TMPFILE:
            return self._points.reach("create", lambda: os.open(path, flags, mode))
        return os.open(path, flags, mode)

    def fsync(self, handle: int) -> None:
        self._points.reach("sync", lambda: os.fsync(handle))

    def link(self, *args: Any, **options: Any) -> None:
        self._points.reach("link", lambda: os.link(*args, **options))

    def replace(self, *args: Any) -> None:
        self._points.reach("rename", lambda: os.replace(*args))


def _raw(points: Points) -> Any:
    """A class of files whose writes and truncations are points."""

    class Raw(io.FileIO):
        def __init__(self, path: Any, mode: str, opener: Any = None) -> None:
            super().__init__(path, mode.replace("b", ""), opener=opener)

        def write(self, data: Any) -> int:
            whole = bytes(data)
            write = super().write
            return points.reach(
                "write", lambda: write(whole), lambda: write(whole[: len(whole) // 2])
            )

        def truncate(self, size: int | None = None) -> int:
            truncate = super().truncate
            return points.reach("truncate", lambda: truncate(size))

    return Raw


def _writer(path: Any, *, appended: bool = False) -> str:
    """What is written to a path, in words."""
    name = Path(path).name
    if name.endswith(".key"):
        return "mark of use" if appended else "key"
    for part, words in _WORDS.items():
        if part in name:
            return words
    return name


_WORDS = {
    "ledger": "ledger",
    ".pt": "checkpoint",
    "plan": "plan",
    "run.json": "run",
    "statement": "statement",
    "report": "report",
}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
