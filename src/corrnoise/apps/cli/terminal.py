"""What the commands print on standard output; progress bars go to standard error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corrnoise import _tables
from corrnoise._progress import Bar

# The names of the columns and the rule below them.
_HEAD = 2


class StoppedError(Exception):
    """Ctrl-C, with one line that says what is kept of the work."""


def begin(title: str, *, at_once: bool) -> Bar:
    """A bar; where ``at_once``, it is drawn on a terminal before the first part of the work."""
    if not at_once:
        return Bar(title)
    bar = Bar(title, patience=0.0)
    bar(0, 1)
    return bar


def print_json(data: Mapping[str, Any]) -> None:
    """One line of JSON, and nothing else."""
    print(json.dumps(data))


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, one to a line."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], bold: int | None = None
) -> None:
    """A table, its first column to the left and the others to the right; row ``bold`` stands out."""
    print_text(_tables.text(columns, rows), bold)


def print_text(table: str, bold: int | None = None) -> None:
    """A table that ``_tables.text`` made; row ``bold`` stands out on a terminal."""
    lines = table.split("\n")
    if bold is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        lines[_HEAD + bold] = f"\x1b[1m{lines[_HEAD + bold]}\x1b[0m"
    print("\n".join(lines))


def warn_of_delta(delta: float, num_examples: int | None) -> None:
    """Say on standard error that a δ is too large for a dataset, where that is so."""
    if num_examples is not None and delta * num_examples >= 1.0:
        print(
            f"corrnoise: warning: delta={delta:g} is not below 1/{num_examples:,}, one over the "
            "number of examples: a release that publishes an example at random has such a delta; "
            "lower it",
            file=sys.stderr,
        )


def check_file(path: Path | None) -> None:
    """Raise before a minute of work, not after it, if a file cannot be written at this path."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"file must be in a folder that exists, got {path}; make the folder first")
