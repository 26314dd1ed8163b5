"""What is printed where: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Seconds before a progress bar is worth showing.
_PATIENCE = 1.0
# A pipe has no width: lines are as long as what they say.
_PIPE_WIDTH = 1000


def console(*, stderr: bool = False) -> Console:
    """Where to print: colours on a terminal alone, and not where NO_COLOR is set."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr,
        force_terminal=terminal,
        width=None if terminal else _PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_json(data: Mapping[str, Any]) -> None:
    """One line of JSON, and nothing else."""
    print(json.dumps(data))


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, one to a line."""
    width = max(len(name) for name in facts)
    out = console()
    for name, value in facts.items():
        out.print(f"{name:<{width}}  {value}", soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], bold: int = -1) -> None:
    """A table, its first column to the left and the others to the right; row ``bold`` stands out."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = index > 0 and column != "why not"
        table.add_column(column, justify="right" if numeric else "left")
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold green" if index == bold else None)
    console().print(table)


def check_file(path: Path | None) -> None:
    """Raise now, and not after a minute of work, if a file cannot be written here."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"file must be in a folder that exists, got {path}; make the folder first")


@contextmanager
def progress(title: str) -> Generator[Callable[[int, int], None]]:
    """A function of (done, total) that draws a bar on a terminal once a second has passed."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    start = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    bar = Progress(*columns, TimeElapsedColumn(), console=console(stderr=True), transient=True)
    task = bar.add_task(title)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if sys.stderr.isatty() and time.monotonic() - start > _PATIENCE:
            bar.start()

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
