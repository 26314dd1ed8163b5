"""Files that a crash cannot spoil: whole or not at all, forced to the disk, locked where shared.

Every file of a run is written here and nowhere else, so that all of them have the same guarantee:
when a function returns, the contents and the folder's entry have been forced to the disk.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from corrnoise import _extras


@contextmanager
def replacing(
    path: str | os.PathLike[str],
    *,
    previous: str | os.PathLike[str] | None = None,
    mode: int = 0o666,
) -> Generator[IO[bytes]]:
    """A new file that takes the place of ``path`` when the block ends without an exception.

    Args:
        path: the file; there is a whole one under this name at every moment, the old or the new.
        previous: where the old one is kept, if anywhere.
        mode: of the new file, less the umask.
    """
    place = Path(path)
    with _beside(place, mode) as (file, name):
        yield file
        _flush(file)
        if previous is not None and place.exists():
            # A link, so that there is a whole file under the name at every moment.
            spare = Path(str(name) + ".previous")
            os.link(place, spare)
            os.replace(spare, previous)
        os.replace(name, place)
    sync_folder(place.parent)


def write(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a whole file, text as UTF-8, in place of whatever was there."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def create(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file that its owner alone may read (mode 0600).

    Raises:
        FileExistsError: there is one already; it is left alone.
    """
    place = Path(path)
    with _beside(place, 0o600) as (file, name):
        file.write(data)
        _flush(file)
        os.link(name, place)
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, so that a new or renamed file survives a crash."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append(file: IO[bytes], data: bytes) -> None:
    """Write to the end of an open file, and force it to the disk."""
    file.write(data)
    _flush(file)


def lock(file: IO[bytes]) -> None:
    """Lock an open file for this process, until it is closed.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file system cannot lock.
    """
    portalocker = _extras.load("portalocker")
    flags = portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING
    try:
        portalocker.lock(file, flags)
    except portalocker.AlreadyLocked as taken:
        raise BlockingIOError(str(taken)) from None
    except portalocker.LockException as failed:
        raise OSError(str(failed)) from None


@contextmanager
def _beside(place: Path, mode: int) -> Generator[tuple[IO[bytes], Path]]:
    """A temporary file in the same folder, which is gone when the block ends."""
    name = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file, name
    finally:
        name.unlink(missing_ok=True)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
