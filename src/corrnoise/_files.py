"""Files that survive a crash: atomic writes, forced to the disk, and locks for shared files.

Every file of a run is written by this module, so that all of them have the same guarantee: when a
function returns, the contents and the folder's entry have been forced to the disk.
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
    """Open a new file that replaces ``path`` when the block ends without an exception.

    Args:
        path: the file; at every moment a complete file has this name, the old or the new one.
        previous: where to keep the old file; by default it is not kept.
        mode: the permissions of the new file, before the umask.
    """
    place = Path(path)
    with _naming(place), _nameless(place, mode) as (file, name):
        yield file
        _flush(file)
        if previous is not None and place.exists():
            # A hard link keeps a complete file under ``path`` at every moment.
            _link_over(place, Path(previous))
        if isinstance(name, Path):
            os.replace(name, place)
        else:
            _link_over(name, place)
    sync_folder(place.parent)


def write(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a complete file, text as UTF-8, and replace any existing one."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def create(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file that only its owner may read (mode 0600).

    Raises:
        FileExistsError: the file exists already; it is left unchanged.
    """
    place = Path(path)
    with _naming(place), _nameless(place, 0o600) as (file, name):
        file.write(data)
        _flush(file)
        _link(name, place)
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


def open_to_append(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a file to append to it; only its owner may read a new one (mode 0600)."""
    return open(path, "a+b", opener=lambda name, flags: os.open(name, flags, 0o600))


def append(file: IO[bytes], data: bytes) -> None:
    """Write to the end of an open file, and force it to the disk."""
    with _naming(file.name):
        file.write(data)
        _flush(file)


def extend(path: str | os.PathLike[str], data: bytes) -> None:
    """Write to the end of a file, and force it to the disk."""
    with _naming(path), open_to_append(path) as file:
        append(file, data)


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
def _naming(path: str | os.PathLike[str]) -> Generator[None]:
    """Add the file's name to an ``OSError`` that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def _nameless(place: Path, mode: int) -> Generator[tuple[IO[bytes], str | Path]]:
    """A new file without a name in its folder (``O_TMPFILE``), and the path to link it from.

    A crash then leaves neither a copy of a secret nor half of a large file behind. Systems without
    such files get a temporary file with a name.
    """
    try:
        os.stat("/proc/self/fd")
        handle = os.open(place.parent, os.O_TMPFILE | os.O_RDWR, mode)
    except (AttributeError, OSError):
        with _beside(place, mode) as found:
            yield found
        return
    with os.fdopen(handle, "w+b") as file:
        yield file, f"/proc/self/fd/{file.fileno()}"


@contextmanager
def _beside(place: Path, mode: int) -> Generator[tuple[IO[bytes], Path]]:
    """A temporary file in the same folder, which is removed when the block ends."""
    name = _temporary(place)
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file, name
    finally:
        name.unlink(missing_ok=True)


def _temporary(place: Path) -> Path:
    return place.with_name(f".{place.name}.{secrets.token_hex(8)}")


def _link_over(name: str | Path, place: Path) -> None:
    """Make a hard link that atomically replaces any existing file."""
    spare = _temporary(place)
    _link(name, spare)
    try:
        os.replace(spare, place)
    finally:
        spare.unlink(missing_ok=True)  # ``replace`` leaves it if both were the same file


def _link(name: str | Path, place: Path) -> None:
    """Make a hard link; a file without a name is linked through its symbolic link in /proc."""
    if isinstance(name, Path):
        os.link(name, place)
        return
    folder = os.open(place.parent, os.O_RDONLY)  # Python follows symbolic links only with a folder
    try:
        os.link(name, place, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
