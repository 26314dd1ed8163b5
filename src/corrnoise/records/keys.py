"""The key of a run and its ledger: they are opened together, and the key is marked when used."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from corrnoise import _files
from corrnoise.noise import Key
from corrnoise.noise.generator.key import key_use, mark_released
from corrnoise.records.ledger import Ledger, read_entries

# The ids of this process's runs that have released steps, by the fingerprints of their keys.
_RELEASED: dict[str, str] = {}
_SHARED = (
    "key must be of one run, but another run of this process has released steps with it; two runs "
    "with the same noise reveal the difference of their gradients: use Key.generate() for each run"
)


@dataclass(frozen=True)
class Use:
    """The use of a key by a run.

    Attributes:
        key: the secret.
        run_id: the id of the run.
        path: the path of the key file, if there is one.
    """

    key: Key
    run_id: str
    path: Path | None

    def claim(self) -> None:
        """Claim the key for this run; call it before the first step is recorded.

        Raises:
            ValueError: another run of this process, begun before or after this one, has released
                steps with the key.
        """
        if _RELEASED.setdefault(self.key.fingerprint, self.run_id) != self.run_id:
            raise ValueError(_SHARED)

    def mark(self) -> None:
        """Mark the key file as used; call it once the first step is recorded, before release."""
        if self.path is not None:
            mark_released(self.path, self.run_id)


def forget(key: Key) -> None:
    """Allow other runs of this process to use a key that protects nothing, such as an audit's."""
    _RELEASED.pop(key.fingerprint, None)


def open_key(source: object, ledger: Path | None) -> tuple[Key, str | None]:
    """The key of a run (given, from its file, or new), and the id of the run in its file.

    Raises:
        ValueError: the key was used by another run, or its file and the ledger do not belong
            together.
    """
    if source is None:
        return Key.generate(), None
    if isinstance(source, Key):
        known = _RELEASED.get(source.fingerprint)
        if known is not None and _run_of(ledger) != known:
            raise ValueError(_SHARED)
        return source, None
    if not isinstance(source, (str, os.PathLike)):
        kind = type(source).__name__  # never the value: it may be the secret itself
        raise ValueError(f"key must be a Key or a path, got {kind}; use Key.from_bytes for bytes")
    path = Path(str(cast("str | os.PathLike[str]", source)))
    entries = read_entries(ledger) if ledger is not None and ledger.exists() else None
    if not path.exists():
        if entries and len(entries) > 1:
            raise ValueError(
                f"key must be the one of the run in {ledger}, but {path} does not exist; "
                "restore it: without it the run cannot go on"
            )
        return Key.generate(), None
    if entries is None:
        without = "no ledger was given" if ledger is None else f"{ledger} does not"
        raise ValueError(
            f"key must be new or come with the ledger of its run, but {path} exists and "
            f"{without}; a key belongs to one run: give its ledger, or another path for a "
            "new key, or delete the key file if that run is over and no copy of it goes on"
        )
    use = key_use(path)
    if use.run_id is None:
        raise ValueError(
            f"key must be a file that a run wrote, but {path} names no run: it was saved by hand "
            "or cut off; restore it, or pass Key.load of it in place of the path"
        )
    # If nothing was released, any ledger without steps is accepted, even without a header: a
    # process that is killed while it rewrites the header leaves an empty file.
    if use.released if len(entries) < 2 else entries[0].get("run_id") != use.run_id:
        raise ValueError(
            f"ledger must be the one that the key in {path} was used with, but {ledger} is "
            "damaged, was begun anew, or belongs to another run; restore it from a copy, or "
            "start a new run with a new key and a new ledger"
        )
    return Key.load(path), use.run_id


def _run_of(ledger: Path | None) -> str | None:
    entries = read_entries(ledger) if ledger is not None and ledger.exists() else []
    return entries[0].get("run_id") if entries else None


def keep_key(source: object, key: Key, ledger: Ledger) -> Use:
    """Save a new key to the user's path, with the id of its run, and lock the file.

    The ledger must exist already. A process that is killed before the key is saved leaves a ledger
    without steps, which can be used again; a key without a ledger might have been used.

    Raises:
        ValueError: another process has saved another key there in the meantime, or continues the
            run, perhaps with a copy of the ledger.
    """
    run_id = ledger.header["run_id"]
    path = None if source is None or isinstance(source, Key) else Path(str(source))
    try:
        if path is not None and not path.exists():
            key.save(path, run_id=run_id)
        if path is not None and (Key.load(path) != key or key_use(path).run_id != run_id):
            raise ValueError(
                f"key must be of one run, but another process has begun a run with {path} at the "
                "same moment; wait for it to end and begin again"
            )
        if path is not None:
            _lock(path, ledger)
    except BaseException:
        ledger.close()
        raise
    return Use(key, run_id, path)


def _lock(path: Path, ledger: Ledger) -> None:
    """Lock a key file until the ledger is closed, if its file system has locks.

    With a lock on the ledger alone, another process could continue with a copy of it.
    """
    if os.name != "posix":  # there a lock would block this process too
        return
    file = path.open("a+b" if os.access(path, os.W_OK) else "rb")
    ledger.hold(file)
    try:
        _files.lock(file)
    except BlockingIOError:
        raise ValueError(
            f"key must be in use by one process only, but {path} is in use, with this ledger or a "
            "copy of it; two processes would release different gradients with the same noise: "
            "wait for the other process, or start another run with its own key and ledger"
        ) from None
    except OSError:
        pass


def keyed(key: Key, what: bytes, text: bytes) -> str:
    """16 hex digits of a keyed hash, which nobody without the key can compute or compare."""
    return hmac.new(key.subkey("digests"), what + text, hashlib.sha256).hexdigest()[:16]
