"""The progress protocol: a function of (done, total) that is called during long work.

Functions that may take longer than a second have an argument ``progress``: such a function, or
``True`` for a bar on the terminal. ``Bar`` is that bar; ``Share`` splits one bar between parts.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Progress = Callable[[int, int], None]
Item = TypeVar("Item")

_WIDTH = 40
_PATIENCE = 1.0  # seconds of work before a bar is shown


class Bar:
    """A progress bar on standard error, shown after one second of work.

    Nothing is printed unless standard error is a terminal or the output of a notebook. As a context
    manager it removes the bar when the block ends.

    Args:
        title: the text before the bar.
        at_once: whether the bar is shown from the beginning.
    """

    def __init__(self, title: str = "", *, at_once: bool = False) -> None:
        self._title, self._at_once = title, at_once
        self._start, self._length = time.monotonic(), 0  # length of the line shown

    def __call__(self, done: int, total: int) -> None:
        """Redraw the bar."""
        seconds = time.monotonic() - self._start
        if not _seen() or not (self._at_once or self._length or seconds >= _PATIENCE):
            return
        total = max(total, 1)
        title = f"{self._title} " if self._title else ""
        says = f" {100 * done // total:3d} % {seconds:.0f} s"
        # A line that the terminal wraps cannot be redrawn.
        room = shutil.get_terminal_size().columns - len(title) - len(says) - 1
        width = max(0, min(_WIDTH, room))
        filled = width * done // total
        self._draw(f"{title}{'█' * filled}{'·' * (width - filled)}{says}")
        if done >= total:
            self.clear()

    def clear(self) -> None:
        """Overwrite the bar with spaces, the only way that notebooks support."""
        if self._length:
            self._draw(" " * self._length)
            self._draw("")

    def _draw(self, line: str) -> None:
        self._length = len(line)
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.clear()


def _seen() -> bool:
    """Whether standard error is shown to a person: on a terminal, or in a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def resolve(progress: Progress | bool | None) -> Progress | None:
    """The function for an argument ``progress``: ``True`` gives a ``Bar``."""
    if progress is True:
        return Bar()
    return progress or None


class Share:
    """One progress function for several parts of known sizes, done one after the other."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def advance(self, units: int) -> None:
        """Report that these units are done."""
        self.done += units
        self._show(self.done)

    def part(self, units: int) -> Progress:
        """A progress function for the next ``units``; the progress shown never decreases."""
        return lambda done, total: self._show(self.done + units * done // (total + 1))

    def finish(self) -> None:
        """Report that all units are done, whether they were needed or not."""
        self._show(self.total)

    def _show(self, done: int) -> None:
        if self.progress is not None:
            self.progress(min(done, self.total), self.total)


def tracked(items: Sequence[Item], progress: Progress | None) -> Iterator[Item]:
    """Yield the items; ``progress`` is called when each of them is done."""
    for done, item in enumerate(items, 1):
        yield item
        if progress is not None:
            progress(done, len(items))
