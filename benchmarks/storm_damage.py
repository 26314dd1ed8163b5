"""What can happen to a file, and how the files are read that a resumed run does not read."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from corrnoise import report
from corrnoise.records import Run
from storm_process import Tell


def _flipped(path: Path, dice: random.Random, other: Path) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, dice: random.Random, other: Path) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def _zeros(path: Path, dice: random.Random, other: Path) -> None:
    data = path.read_bytes()
    start = dice.randrange(len(data))
    path.write_bytes(data[:start] + bytes(len(data) - start))


def _header(path: Path, dice: random.Random, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n") + 1] if b"\n" in data else data[:64])


# Each takes the file, the dice and the same file of another run.
DAMAGES: dict[str, Callable[[Path, random.Random, Path], Any]] = {
    "a bit flipped": _flipped,
    "cut": _cut,
    "emptied": lambda path, dice, other: os.truncate(path, 0),
    "header only": _header,
    "zeros from some byte on": _zeros,
    "written twice": lambda path, dice, other: path.write_bytes(2 * path.read_bytes()),
    "random bytes": lambda path, dice, other: path.write_bytes(dice.randbytes(200)),
    "removed": lambda path, dice, other: path.unlink(),
    "of another run": lambda path, dice, other: shutil.copy(other, path),
    "readable by others": lambda path, dice, other: path.chmod(0o644),
}

READERS: dict[str, Callable[[Path], str]] = {
    "run.json": lambda path: Run.from_json(path.read_text(encoding="utf-8")).to_json(),
    "report.html": lambda path: report.read(path).verified().to_json(),
}


def read(path: Path, original: Path, tell: Tell) -> None:
    """Read a damaged file: it must be refused, or say what the original says."""
    if READERS[path.name](path) != READERS[path.name](original):
        raise AssertionError(f"{path.name} says something else, and is believed")
