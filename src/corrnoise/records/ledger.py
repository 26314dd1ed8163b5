"""The ledger of a run: an append-only file that records every released step.

After a crash a resumed run goes back to its last checkpoint and repeats steps. That is harmless if
it repeats them *exactly*: the same noise on the same gradient is the same release. The same noise
on another gradient would reveal their difference. So each step is recorded, with a keyed digest of
its gradient before noise, and forced to the disk before the step is released. A step that is
recorded already must have the same digest.

Each line is an entry as JSON and a code that covers the entry and the codes of all lines before it:
HMAC-SHA-256 under a key of the run, cut to 128 bits. So nobody without the key can change, move or
remove a line unnoticed. The first line is the run's header. The codes cannot show that the last
lines are missing: an old copy of a ledger is as valid as it was.

By default a step counts as released when it is recorded. A run whose header says that it publishes
checkpoints alone releases a step with the next publication, which the ledger records before it
happens. The steps after the last publication of a crashed run never left the process, so they may
be repeated with another gradient.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from corrnoise import _files, _formats

_CODE = 32  # hex digits of a code
_START = b'{"corrnoise": "ledger", '  # every header begins with this
_LONGEST = 60  # characters of a value in a message


class _Missing:
    """A marker for a missing field, as ``None`` is a value."""

    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


class OtherRunError(ValueError):
    """The ledger belongs to another run: its settings or gradients differ."""


class Ledger:
    """The released steps of one run, in memory and, if it has a path, on the disk.

    Guarantees: when ``record`` returns, the entry has been forced to the disk. An incomplete last
    line, as a crash leaves it, belongs to a step that was never released, and is dropped. Any other
    change of the file is refused. The file is locked while the ledger is open, so that no two
    processes continue one run. A fork of this process cannot record and does not hold the lock.

    Args:
        header: plain values that must not change between the processes of a run.
        path: the file. If it does not exist, it is created with the header, with access for its
            owner only. ``None`` keeps the ledger in memory.
        key: the key of the codes; without one they detect only accidental damage.
        published: how many steps another process of the run has published; they count here too.

    Raises:
        ValueError: the file is not a ledger, belongs to another run, is damaged, or is in use.

    >>> ledger = Ledger({"key_fingerprint": "1a2b"})
    >>> ledger.record(0, "7f")
    >>> ledger.record(0, "7f")  # the same release again
    >>> ledger.record(0, "80")
    Traceback (most recent call last):
        ...
    corrnoise.records.ledger.OtherRunError: step 0 was released before with another gradient: ...
    """

    def __init__(
        self,
        header: Mapping[str, Any],
        path: str | os.PathLike[str] | None = None,
        key: bytes = b"",
        *,
        published: int = 0,
    ) -> None:
        self.header = {"corrnoise": "ledger", **_formats.stamped("ledger", header)}
        self.path = None if path is None else Path(path)
        self._key, self._code = key, ""
        self._digests: list[str] = []
        self._published = 0  # how many of the released steps left the process
        self._digest_size = 0  # the size of the digest of any step in the file
        self._file: IO[bytes] | None = None
        self._held: list[IO[bytes]] = []
        if self.path is not None:
            self._open(self.path, published)
            _OPEN.add(self)

    @property
    def num_released(self) -> int:
        """How many steps were released, or may be released before this process ends."""
        return len(self._digests)

    @property
    def publishes(self) -> str:
        """What releases steps: "steps" (each by itself) or only "checkpoints"."""
        return self.header.get("publishes", "steps")

    def publish(self) -> None:
        """Record that all steps so far are about to leave the process, if that releases them."""
        if self.publishes == "checkpoints" and self._published < len(self._digests):
            with self._kept():
                self._append({"published": len(self._digests)})
                self._published = len(self._digests)

    def record(self, step: int, digest: str) -> None:
        """Record a step before it is released; a recorded step must have the same digest.

        Raises:
            ValueError: the step was released with another digest, or steps before it were not.
        """
        if step < len(self._digests):
            if self._digests[step] != digest:
                raise OtherRunError(
                    f"step {step} was released before with another gradient: adding the same noise "
                    "to this one would reveal the difference; restore data, model and settings of "
                    "that run, resume from its checkpoint, or start a new run with a new key"
                )
            return
        if step > len(self._digests):
            raise ValueError(
                f"step must be {len(self._digests)}, the first one that was not released, got "
                f"{step}; this ledger does not belong to the checkpoint"
            )
        with self._kept():
            self._append({"step": step, "gradient": digest})
            self._digests.append(digest)

    def hold(self, file: IO[bytes]) -> None:
        """Keep a locked file of the run, such as its key file, open until the ledger is closed."""
        self._held.append(file)
        _OPEN.add(self)

    def close(self) -> None:
        """Release the lock, so that another process can open the file; no more can be recorded."""
        while self._held:
            self._held.pop().close()
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def __del__(self) -> None:
        if hasattr(self, "_held"):
            self.close()

    @contextmanager
    def _kept(self) -> Generator[None]:
        """Keep memory and file consistent: close the file if the block fails, Ctrl-C included.

        It is then unknown whether the entry is on the disk; reopening the file shows it.
        """
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self.close()
            raise

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        if self._file is None:
            raise ValueError(
                f"the ledger {self.path} must be open; it was closed, a write failed or was "
                "interrupted, or this is a fork of the process that opened it: continue from the "
                "last checkpoint with a new engine"
            )
        line = _line(entry, self._code, self._key)
        _files.append(self._file, line)
        self._code = _code_of(line)

    def _open(self, path: Path, published: int) -> None:
        fresh = not path.exists()
        self._file = _files.open_to_append(path)
        with self._kept():
            self._lock(path)
            if self._file.seek(0, os.SEEK_END) == 0:
                self._append(self.header)
            else:
                self._read(path, published)
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

    def _read(self, path: Path, published: int) -> None:
        assert self._file is not None
        lines, rest = read_lines(path)
        if len(lines) < 2:  # no step was ever recorded
            self._begin(path, lines, rest)
            return
        _formats.opened("ledger", _entry(lines[0], path, 1))
        self._check_header(path, _entry(lines[0], path, 1))
        for number, line in enumerate(lines, start=1):
            if line != _signed(line[: -_CODE - 2], self._code, self._key):
                raise ValueError(
                    f"ledger must be as this run wrote it, but line {number} of {path} is damaged, "
                    "was changed, or belongs to another key; restore it from a copy: without it "
                    "nobody knows which steps were released"
                )
            self._code = _code_of(line)
        for number, line in enumerate(lines[1:], start=2):
            self._replay(_entry(line, path, number), path)
        self._settle(path, sum(map(len, lines)), rest)
        if self.publishes == "checkpoints":
            self._drop_lost(min(published, len(self._digests)))

    def _drop_lost(self, published: int) -> None:
        """Drop the steps after the last publication: the process that took them has ended."""
        if self._published < published:
            self._append({"published": published})
            self._published = published
        if self._published < len(self._digests):
            self._append({"resumed": self._published})
            del self._digests[self._published :]

    def _replay(self, entry: dict[str, Any], path: Path) -> None:
        """Apply an entry that an earlier process wrote."""
        step = len(self._digests)
        if "published" in entry and 0 < entry["published"] <= step:
            self._published = entry["published"]
        elif entry.get("resumed") == self._published and self.publishes == "checkpoints":
            del self._digests[self._published :]
        elif entry.get("step") == step:
            self._digests.append(entry["gradient"])
            self._digest_size = len(entry["gradient"])
        else:
            raise ValueError(
                f"ledger must list every step once, but {path} has {entry.get('step')!r} in "
                f"place of step {step}; it is damaged: restore it from a copy"
            )

    def _begin(self, path: Path, lines: list[bytes], rest: bytes) -> None:
        """Replace an old header, complete or not, by this run's; nothing else is overwritten."""
        assert self._file is not None
        first = (lines or [rest])[0]
        if not first.startswith(_START[: len(first)]) or (lines and rest and rest[:1] != b"{"):
            raise ValueError(
                f"ledger must be a new file or one that a run wrote, but {path} has other "
                "contents, which are left alone; choose another path"
            )
        if lines:
            _formats.opened("ledger", _entry(lines[0], path, 1))
        self._file.truncate(0)
        self._append(self.header)

    def _settle(self, path: Path, whole: int, rest: bytes) -> None:
        """Decide what to do with an incomplete last line.

        A crash can leave only the beginning of an entry, whose step was then never released; it is
        removed. An entry that lacks only its line end is kept: counting it is the safe side.
        """
        assert self._file is not None
        if not rest:
            return
        if self._is_whole(rest):
            self._replay(_entry(rest + b"\n", path, 0), path)
            self._code = _code_of(rest + b"\n")
            _files.append(self._file, b"\n")
            return
        entry = {"step": len(self._digests), "gradient": "0" * self._digest_size}
        longest = len(_line(entry, self._code, self._key))
        if len(rest) + 1 >= longest or self._is_whole(rest[:-1]):
            raise ValueError(
                f"ledger must end with a whole line, but the last one of {path} was changed; "
                "restore it from a copy: without it nobody knows which steps were released"
            )
        self._file.truncate(whole)
        _files.append(self._file, b"")

    def _is_whole(self, text: bytes) -> bool:
        """Whether this is the complete next line without its line end."""
        return text + b"\n" == _signed(text[: -_CODE - 1], self._code, self._key)

    def _check_header(self, path: Path, found: dict[str, Any]) -> None:
        different = [
            line
            for name, value in self.header.items()
            if name != "run_id"
            for line in _differences(name, found.get(name), value)
        ]
        if different:
            different = without_plan(different)
            raise OtherRunError(
                f"ledger must belong to this run, but {path} differs in {'; '.join(different)}; "
                "restore those settings, or start a new run with a new key and a new ledger"
            )
        self.header = found


def read_entries(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The entries of a ledger file, its header first, without an incomplete last line.

    The codes are not checked, as this needs the key: use ``Ledger``, or ``corrnoise verify --key``.

    Raises:
        ValueError: a line is not an entry.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger({"key_fingerprint": "1a2b"}, f"{folder}/ledger")
    ...     ledger.record(0, "7f")
    ...     ledger.close()
    ...     read_entries(f"{folder}/ledger")[1:]
    [{'step': 0, 'gradient': '7f'}]
    """
    lines, _ = read_lines(Path(path))
    return [_entry(line, Path(path), number) for number, line in enumerate(lines, start=1)]


def first_wrong_code(path: str | os.PathLike[str], key: bytes) -> int | None:
    """The number of the first line with a wrong code, from 1; ``None`` if all are right."""
    before = ""
    for number, line in enumerate(read_lines(Path(path))[0], start=1):
        if line != _signed(line[: -_CODE - 2], before, key):
            return number
        before = _code_of(line)
    return None


def without_plan(different: list[str]) -> list[str]:
    """The differences of two headers, without that of the plans' JSON if there are others."""
    return [line for line in different if not line.startswith("plan (")] or different


def read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The complete lines of a file with their line ends, and the bytes after the last of them."""
    *lines, rest = path.read_bytes().split(b"\n")
    return [line + b"\n" for line in lines], rest


def _line(entry: Mapping[str, Any], before: str, key: bytes) -> bytes:
    return _signed(json.dumps(entry).encode(), before, key)


def _signed(text: bytes, before: str, key: bytes) -> bytes:
    """A line: the text of an entry and its code, given the code of the line before."""
    code = hmac.new(key, before.encode() + text, hashlib.sha256).hexdigest()[:_CODE]
    return text + b" " + code.encode() + b"\n"


def _code_of(line: bytes) -> str:
    return line[-_CODE - 1 : -1].decode()


def _entry(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found: Any = json.loads(line[: -_CODE - 2])
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(
            f"ledger must be as a run wrote it, but line {number} of {path} is damaged or is no "
            "entry of a ledger; restore it from a copy: without it nobody knows which steps were "
            "released"
        )
    return found


def _differences(name: str, was: Any, now: Any) -> list[str]:
    """The fields in which two values differ, and how; nested fields are named by their path."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        keys = dict.fromkeys([*was, *now])
        return [
            line
            for key in keys
            for line in _differences(
                f"{name}.{key}", was.get(key, _MISSING), now.get(key, _MISSING)
            )
        ]
    if was == now:
        return []
    before, after = repr(was), repr(now)
    first = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
        min(len(before), len(after)),
    )
    return [f"{name} (was {_around(before, first)}, is {_around(after, first)})"]


def _around(text: str, first: int) -> str:
    """A text; if it is long, only the part around the first character that differs."""
    if len(text) <= _LONGEST:
        return text
    start = max(0, first - _LONGEST // 3)
    part = text[start : start + _LONGEST]
    return "…" * (start > 0) + part + "…" * (start + _LONGEST < len(text))


_OPEN: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _close_all() -> None:
    for ledger in list(_OPEN):
        ledger.close()


if hasattr(os, "register_at_fork"):
    # A fork shares the lock; closing its copy leaves the lock to the process that opened the file.
    os.register_at_fork(after_in_child=_close_all)
