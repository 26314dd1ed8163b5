"""The secret of a noise stream: 256 bits that are shown to nobody."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path
from typing import NoReturn, final

from corrnoise import _files

KEY_BYTES = 32

_DOMAIN = b"corrnoise key fingerprint v1\0"
_FILE = re.compile(rb"corrnoise-key-v1 ([0-9a-f]{64})\n")


@final
class Key:
    """A 256-bit key. Whoever has it can subtract the noise, so it is kept out of everything.

    ``repr`` and ``str`` show the fingerprint alone; pickling it, or any object that holds it,
    raises; JSON does not know it. It is stored in a file of its own, apart from checkpoints.

    A key belongs to one run: the same key, stream and step give the same noise, and two different
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
            ValueError: the file is not a key file, or others than its owner may read it.
        """
        place = Path(path)
        mode = stat.S_IMODE(place.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            raise ValueError(
                f"path must be readable by its owner alone (mode 0600), got {mode:04o} for "
                f"{place}; the key may have been seen: make a new one, or chmod 600 it"
            )
        found = _FILE.fullmatch(place.read_bytes())
        if found is None:
            raise ValueError(f"path must be a file that Key.save wrote, got {place}; pass that one")
        return Key(bytes.fromhex(found[1].decode()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file of mode 0600; an existing file is never overwritten.

        Raises:
            ValueError: the file exists.
        """
        place = Path(path)
        try:
            _files.create(place, b"corrnoise-key-v1 " + self.__secret.hex().encode() + b"\n")
        except FileExistsError:
            raise ValueError(
                f"path must not exist yet, got {place}; a key is never overwritten: "
                "load it, or choose another path"
            ) from None

    @property
    def fingerprint(self) -> str:
        """16 hex digits of SHA-256 over a prefix and the key: enough to compare, none to invert."""
        return hashlib.sha256(_DOMAIN + self.__secret).hexdigest()[:16]

    def reveal(self) -> bytes:
        """The 32 secret bytes, for a cipher and for nothing else."""
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
        raise TypeError("a Key is never pickled, nor what holds it; use Key.save and Key.load")
