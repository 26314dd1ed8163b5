"""Checkpoints that a crash cannot spoil: written beside the old one, then put in its place.

The file is what Opacus writes, a dictionary saved by torch, so that its tools can read it; its
SHA-256 is the comment of the ZIP archive that such a file is. The one before it stays as
``PATH.previous``. A checkpoint is read only if the digest fits.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch

from corrnoise import _files

_NAME = b"corrnoise-sha256:"
_TRAILER = (len(_NAME) + 32).to_bytes(2, "little") + _NAME
_CHUNK = 1 << 20


def save(data: Mapping[str, Any], path: Any, **torch_save_kwargs: Any) -> None:
    """Write a checkpoint atomically; a file object is simply written to."""
    if not isinstance(path, (str, os.PathLike)):
        torch.save(data, path, **torch_save_kwargs)
        return
    with _files.replacing(path, previous=previous(path), mode=0o600) as file:
        _write(data, file, **torch_save_kwargs)
        _sign(file)


def load(path: Any, **torch_load_kwargs: Any) -> dict[str, Any]:
    """Read a checkpoint; where it is damaged, the one before it, with a warning.

    Raises:
        ValueError: neither can be read.
    """
    options: dict[str, Any] = {"weights_only": True, **torch_load_kwargs}
    if not isinstance(path, (str, os.PathLike)):
        return torch.load(path, **options)
    place = Path(path)
    damage = _damage(place)
    if damage:
        spare = previous(place)
        if not spare.exists() or _damage(spare):
            raise ValueError(
                f"path must be a whole checkpoint, but {place} {damage}, and there is no whole "
                f"{spare.name} beside it; restore a copy"
            )
        warnings.warn(f"{place} {damage}: the checkpoint before it is used, {spare}", stacklevel=3)
        place = spare
    return torch.load(place, **options)


def previous(path: str | os.PathLike[str]) -> Path:
    """Where the checkpoint before this one lies."""
    place = Path(path)
    return place.with_name(place.name + ".previous")


class _Writer:
    """What ``torch.save`` writes to: a file that keeps the exception of a write that failed."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.failed: BaseException | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except BaseException as failed:
            self.failed = failed
            raise

    def flush(self) -> None:
        self._file.flush()


def _write(data: Mapping[str, Any], file: IO[bytes], **torch_save_kwargs: Any) -> None:
    """``torch.save``, but the exception of a write reaches the caller, such as that of a full disk.

    In its place torch raises a ``RuntimeError`` about positions in its archive.
    """
    writer = _Writer(file)
    try:
        torch.save(data, cast(IO[bytes], writer), **torch_save_kwargs)
    except RuntimeError:
        if writer.failed is None:
            raise
        raise writer.failed from None


def _sign(file: IO[bytes]) -> None:
    """Put the digest into the archive's comment, whose length is the last thing in the file."""
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    file.seek(-2, os.SEEK_END)
    if file.read() != b"\0\0":
        raise ValueError(
            "checkpoints must be saved in torch's zip format; "
            "drop _use_new_zipfile_serialization=False"
        )
    file.seek(-2, os.SEEK_END)
    file.write(_TRAILER + digest.digest())


def _damage(place: Path) -> str:
    """What is wrong with a file; "" if its digest fits."""
    if not place.exists():
        return "does not exist"
    size = place.stat().st_size - len(_TRAILER) - 32
    if size <= 0:
        return "is truncated"
    with place.open("rb") as file:
        digest = hashlib.sha256()
        for start in range(0, size, _CHUNK):
            digest.update(file.read(min(_CHUNK, size - start)))
        digest.update(b"\0\0")
        if file.read() != _TRAILER + digest.digest():
            return "is truncated or damaged, or was not saved by this engine"
    return ""
