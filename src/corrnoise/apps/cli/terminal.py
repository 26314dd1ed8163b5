"""What the commands print on standard output; progress bars go to standard error."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corrnoise import _tables
from corrnoise._progress import Bar

# The number of lines of a table's head: the names of the columns and the rule below them.
_HEAD = 2
# A line is folded only if its text has at least this many characters of room.
_LEAST_ROOM = 20
# The indent of columns that do not fit into their row and are printed below it.
_BELOW = 4


class StoppedError(Exception):
    """Raised on Ctrl-C, with one line that says which results are kept."""


def begin(title: str, *, at_once: bool) -> Bar:
    """A progress bar; with ``at_once`` a terminal shows it before the first part of the work."""
    bar = Bar(title, at_once=at_once)
    if at_once:
        bar(0, 1)
    return bar


def print_json(data: Mapping[str, Any]) -> None:
    """One line of JSON, and nothing else."""
    print(json.dumps(data))


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, one to a line."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(_folded(f"{name:<{width}}  {value}", width + 2))


def print_summary(text: str) -> None:
    """Lines that begin with a name; on a terminal a long value is folded below its beginning."""
    for line in text.split("\n"):
        name = re.match(r"\S+ +", line)
        print(_folded(line, name.end() if name else 0))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], bold: int | None = None
) -> None:
    """A table, its first column to the left and the others to the right; row ``bold`` stands out."""
    print_text(_tables.text(columns, rows), bold)


def print_text(table: str, bold: int | None = None) -> None:
    """A table that ``_tables.text`` made; row ``bold`` stands out on a terminal.

    On a terminal, long cells of the last column are folded. If the other columns do not fit either,
    those on the right are printed in lines of their own below each row.
    """
    lines = table.split("\n")
    if len(lines) > 1:
        lines = _fitted(lines)
    if bold is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        lines[_HEAD + bold] = f"\x1b[1m{lines[_HEAD + bold]}\x1b[0m"
    print("\n".join(lines))


def _fitted(lines: Sequence[str]) -> list[str]:
    """The lines of a table, each as long as a terminal can show."""
    rule, width = lines[1], shutil.get_terminal_size().columns
    spans = [each.span() for each in re.finditer("-+", rule)]
    gaps = [i for i, sign in enumerate(rule) if sign == " "]
    last = spans[-1][0]
    wide = sys.stdout.isatty() and len(rule) > width and width - last < _LEAST_ROOM
    pieces = _pieces(spans, width) if wide else [(0, last), (last, len(rule))]

    def fit(line: str) -> str:
        if any(line[i : i + 1].strip() for i in gaps):  # a sentence below the table
            return _folded(line, 0)
        if not wide:
            return _folded(line, last)
        shown = [
            (i, line[a:b].rstrip())
            for i, (a, b) in enumerate(pieces)
            if lines[0][a:b].strip() or line is not rule
        ]
        return "\n".join(
            _folded(" " * _BELOW * (i > 0) + text, _BELOW) for i, text in shown if text
        )

    return [fit(line) for line in lines]


def _pieces(spans: Sequence[tuple[int, int]], width: int) -> list[tuple[int, int]]:
    """Groups of neighbouring columns of a table, each as many as a line can show."""
    found = [spans[0]]
    for start, end in spans[1:]:
        begin = found[-1][0]
        if end - begin + (_BELOW if begin else 0) <= width:
            found[-1] = (begin, end)
        else:
            found.append((start, end))
    return found


def _folded(line: str, indent: int) -> str:
    """A line, folded to the width of the terminal; all but its first piece begin at ``indent``.

    It is not folded in a pipe, or if the terminal has too little room beside the indent.
    """
    width = shutil.get_terminal_size().columns
    if len(line) <= width or width - indent < _LEAST_ROOM or not sys.stdout.isatty():
        return line
    rest = textwrap.wrap(line[indent:], width - indent, break_on_hyphens=False)
    if set(rest[0]) == {"-"}:  # the rule below the names of columns
        rest = rest[:1]
    return line[:indent] + ("\n" + " " * indent).join(rest)


def warn_of_delta(delta: float, num_examples: int | None) -> None:
    """Warn on standard error if δ is too large for the dataset."""
    if num_examples is not None and delta * num_examples >= 1.0:
        print(
            f"corrnoise: warning: delta={delta:g} is not below 1/{num_examples:,}, one over the "
            "number of examples: a release that publishes an example at random has such a delta; "
            "lower it",
            file=sys.stderr,
        )


def check_file(path: Path | None) -> None:
    """Raise if no file can be written at this path; called before the work begins."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"file must be in a folder that exists, got {path}; make the folder first")
