"""The ledger of a run: an append-only file that knows every step that was ever released.

A crash loses what a process had in memory, and a resumed run goes back to its last checkpoint: it
repeats steps. That is harmless if it repeats them *exactly*: the same noise on the same gradient is
the same release. The same noise on another gradient would reveal their difference. So each step is
written down, with a keyed digest of the gradient before noise, and forced to the disk before the
step is released; a step that is there already must come with the same digest.

One line of JSON and its checksum for each entry. The first line is the run's header.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from corrnoise import _files, _formats


class Ledger:
    """The released steps of one run, in memory and, if it has a path, on the disk.

    Guarantees: when ``record`` returns, the entry has been forced to the disk. A line that a crash
    tore at the end of the file was never released, and is dropped; any other damage is refused.
    The file is locked as long as the ledger is open, so that no two processes continue one run.

    Args:
        header: what must not change between the processes of a run: plain values.
        path: the file; created with the header if it is not there. ``None`` keeps it in memory.

    Raises:
        ValueError: the file belongs to another run, is damaged, or is in use.

    >>> ledger = Ledger({"key_fingerprint": "1a2b"})
    >>> ledger.record(0, "7f")
    >>> ledger.record(0, "7f")  # the same release again
    >>> ledger.record(0, "80")
    Traceback (most recent call last):
        ...
    ValueError: step 0 was released before with another gradient: ...
    """

    def __init__(
        self, header: Mapping[str, Any], path: str | os.PathLike[str] | None = None
    ) -> None:
        self.header: dict[str, Any] = _formats.stamped("ledger", header)
        self.path = None if path is None else Path(path)
        self._digests: list[str] = []
        self._file: IO[bytes] | None = None
        if self.path is not None:
            self._open(self.path)

    @property
    def num_released(self) -> int:
        """How many steps were ever released: the highest one, plus 1."""
        return len(self._digests)

    def record(self, step: int, digest: str) -> None:
        """Write down that ``step`` is about to be released, or check that it is a repetition.

        Raises:
            ValueError: the step was released with another digest, or steps before it were not.
        """
        if step < len(self._digests):
            if self._digests[step] != digest:
                raise ValueError(
                    f"step {step} was released before with another gradient: adding the same noise "
                    "to this one would reveal the difference; restore data, model and settings of "
                    "that run, or start a new run with a new key"
                )
            return
        if step > len(self._digests):
            raise ValueError(
                f"step must be {len(self._digests)}, the first one that was not released, got "
                f"{step}; this ledger does not belong to the checkpoint"
            )
        if self.path is not None:
            self._append({"step": step, "gradient": digest})
        self._digests.append(digest)

    def close(self) -> None:
        """Let another process have the file; nothing can be recorded any more."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ValueError(
                f"the ledger {self.path} must be open; it was closed, or a write failed"
            )
        try:
            _files.append(self._file, _line(entry))
        except OSError:
            # What is on the disk is unknown now; the next process will see.
            self.close()
            raise

    def _open(self, path: Path) -> None:
        fresh = not path.exists()
        self._file = path.open("a+b")
        try:
            self._lock(path)
            if self._file.seek(0, os.SEEK_END) == 0:
                _files.append(self._file, _line(self.header))
            else:
                self._read(path)
        except BaseException:
            self.close()
            raise
        if fresh:
            _files.sync_folder(path.parent)

    def _lock(self, path: Path) -> None:
        assert self._file is not None
        try:
            _files.lock(self._file)
        except BlockingIOError:
            raise ValueError(
                f"ledger must be open in one process only, but {path} is in use; "
                "wait for the other process, or start another run with its own key and ledger"
            ) from None
        except OSError as failed:
            raise ValueError(
                f"ledger must be in a folder whose file system can lock files, but {path} cannot "
                f"be locked ({failed}); without a lock two processes could continue one run: "
                "choose another folder"
            ) from None

    def _read(self, path: Path) -> None:
        assert self._file is not None
        entries, whole = read_entries(path)
        if len(entries) < 2:  # nothing was ever released: a run may begin as it likes
            self._file.truncate(0)
            _files.append(self._file, _line(self.header))
            return
        _formats.opened("ledger", entries[0])
        self._file.truncate(whole)
        _files.append(self._file, b"")
        different = [
            f"{name} (was {_short(entries[0].get(name))}, is {_short(value)})"
            for name, value in self.header.items()
            if entries[0].get(name) != value and name != "run_id"
        ]
        if different:
            raise ValueError(
                f"ledger must belong to this run, but {path} differs in {'; '.join(different)}; "
                "restore those settings, or start a new run with a new key and a new ledger"
            )
        self.header = entries[0]
        for step, entry in enumerate(entries[1:]):
            if entry.get("step") != step:
                raise ValueError(
                    f"ledger must list every step once, but {path} has {entry.get('step')!r} in "
                    f"place of step {step}; it is damaged: restore it from a copy"
                )
            self._digests.append(entry["gradient"])


def read_entries(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
    """The entries of a ledger file, and the bytes that they take; a torn last line is left out.

    Raises:
        ValueError: a line that is not the last is damaged.
    """
    data = Path(path).read_bytes()
    lines = data.split(b"\n")
    entries: list[dict[str, Any]] = []
    whole = 0
    for number, line in enumerate(lines[:-1]):
        entry = _parse(line)
        if entry is None:
            if number == len(lines) - 2 and not lines[-1]:
                break
            raise ValueError(
                f"ledger must be whole, but line {number + 1} of {path} is damaged; "
                "restore it from a copy: without it nobody knows which steps were released"
            )
        entries.append(entry)
        whole += len(line) + 1
    return entries, whole


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry, sort_keys=True).encode()
    return text + b" " + f"{zlib.crc32(text):08x}".encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    text, _, checksum = line.rpartition(b" ")
    if f"{zlib.crc32(text):08x}".encode() != checksum:
        return None
    return json.loads(text)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
