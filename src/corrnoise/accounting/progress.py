"""A progress bar for the terminal, with nothing to install."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[int, int], None]

_WIDTH = 40


def bar(done: int, total: int) -> None:
    """Redraw the bar on standard error; silent where that is not a terminal."""
    if not sys.stderr.isatty():
        return
    filled = _WIDTH * done // total
    end = "\n" if done == total else ""
    share = f"{100 * done // total:3d} %"
    print(
        f"\r{'█' * filled}{'·' * (_WIDTH - filled)} {share}", end=end, file=sys.stderr, flush=True
    )
