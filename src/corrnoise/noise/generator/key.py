"""The secret key of a noise stream, of 256 bits, and its file."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, final

from corrnoise import _files

KEY_BYTES = 32

_DOMAIN = b"corrnoise key fingerprint v1\0"
# The secret, then the id of the run that it belongs to, then a mark if that run released a step.
# A mark that a crash wrote incompletely counts too: its step is in the ledger already.
_FILE = re.compile(rb"corrnoise-key-v1 ([0-9a-f]{64})\n(?:run ([0-9a-f]+)\n([a-z]+\n?)?)?")
_RELEASED = b"released\n"


@final
class Key:
    """A secret 256-bit key. Anyone who has it can subtract the noise.

    ``repr`` and ``str`` show only the fingerprint. Pickling the key, or any object that holds it,
    raises an error, and there is no JSON form. Store it in a file of its own, apart from
    checkpoints.

    Use a key for one run only: the same key, stream and step give the same noise, and two different
    gradients with the same noise reveal their difference.

    >>> key = Key.from_bytes(bytes(range(32)))
    >>> key
    Key(fingerprint='1a2824097d5835b4')
    >>> key == Key.from_bytes(bytes(range(32))), Key.generate() == key
    (True, False)
    """

    __slots__ = ("__secret",)

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, (bytes, bytearray)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"secret must be bytes, got {type(secret).__name__}; use Key.generate()"
            )
        if len(secret) != KEY_BYTES:
            raise ValueError(
                f"secret must have {KEY_BYTES} bytes, got {len(secret)}; use Key.generate()"
            )
        if not any(secret):
            raise ValueError("secret must be random, got zeros alone; use Key.generate()")
        self.__secret = bytes(secret)

    @staticmethod
    def generate() -> Key:
        """A fresh key from the operating system's generator."""
        return Key(secrets.token_bytes(KEY_BYTES))

    @staticmethod
    def from_bytes(secret: bytes) -> Key:
        """The key with these 32 bytes."""
        return Key(secret)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Key:
        """Read a key that ``save`` wrote.

        Raises:
            ValueError: the file is not a key file, or users other than its owner may read it.
        """
        place = Path(path)
        if place.is_dir():
            raise ValueError(
                f"path must be a key file, got the folder {place}; give the file in it"
            )
        mode = stat.S_IMODE(place.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            raise ValueError(
                f"path must be readable by its owner alone (mode 0600), got {mode:04o} for "
                f"{place}; the key may have been seen: make a new one, or chmod 600 it"
            )
        return Key(bytes.fromhex(_match(place)[1].decode()))

    def save(self, path: str | os.PathLike[str], *, run_id: str | None = None) -> None:
        """Write the key to a new file of mode 0600; an existing file is never overwritten.

        Args:
            path: the new file.
            run_id: the id of the run that the key belongs to, in hex digits, if there is one.

        Raises:
            ValueError: the file exists.
        """
        place = Path(path)
        lines = b"corrnoise-key-v1 " + self.__secret.hex().encode() + b"\n"
        if run_id is not None:
            lines += b"run " + run_id.encode() + b"\n"
        try:
            _files.create(place, lines)
        except FileExistsError:
            raise ValueError(
                f"path must not exist yet, got {place}; a key is never overwritten: "
                "load it, or choose another path"
            ) from None

    @property
    def fingerprint(self) -> str:
        """16 hex digits of the SHA-256 of a prefix and the key; they do not reveal it."""
        return hashlib.sha256(_DOMAIN + self.__secret).hexdigest()[:16]

    def subkey(self, purpose: str) -> bytes:
        """32 bytes for one purpose: HKDF-SHA-256 (RFC 5869) with an empty salt.

        No two purposes share a key, and the key itself is used for nothing else.
        """
        extracted = hmac.new(bytes(32), self.__secret, hashlib.sha256).digest()
        info = b"corrnoise v1 " + purpose.encode() + b"\x01"
        return hmac.new(extracted, info, hashlib.sha256).digest()

    def reveal(self) -> bytes:
        """The 32 secret bytes, for use by the cipher only."""
        return self.__secret

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self.__secret, other.__secret)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Key(fingerprint={self.fingerprint!r})"

    def __copy__(self) -> Key:
        return self

    def __deepcopy__(self, memo: object) -> Key:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Key, or an object that holds one, cannot be pickled; use Key.save and Key.load"
        )


@dataclass(frozen=True)
class KeyUse:
    """What a key file records about the use of its key.

    Attributes:
        run_id: the id of the run that the key belongs to; ``None`` if there is no run yet.
        released: whether that run has released a step.
    """

    run_id: str | None
    released: bool


def key_use(path: str | os.PathLike[str]) -> KeyUse:
    """What a key file records about the use of its key."""
    found = _match(Path(path))
    return KeyUse(None if found[2] is None else found[2].decode(), found[3] is not None)


def mark_released(path: str | os.PathLike[str], run_id: str) -> None:
    """Record in a key file that its run has released a step, unless that is recorded already.

    Raises:
        ValueError: the file belongs to another run.
    """
    use = key_use(path)
    if use.run_id != run_id:
        raise ValueError(f"path must be the key of run {run_id}, got {path} of run {use.run_id}")
    if not use.released:
        _files.extend(path, _RELEASED)


def _match(place: Path) -> re.Match[bytes]:
    found = _FILE.fullmatch(place.read_bytes())
    if found is None:
        raise ValueError(
            f"path must be a file that Key.save wrote, got {place}, which is another one or is "
            "damaged; restore it from a copy, or pass the right path"
        )
    return found
