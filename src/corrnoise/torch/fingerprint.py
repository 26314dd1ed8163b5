"""Keyed digests that tell one dataset or model from another, and tell nothing without the key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from corrnoise._extras import has_triton
from corrnoise.noise.generator.key import Key
from corrnoise.records.keys import keyed

_PROBES = 64


# Elements in a row of the hash, and rows that are hashed at a time.
_ROW, _ROWS = 1 << 14, 1 << 10


class PositionHash:
    """A keyed hash of a tensor's bits that depends on their places.

    Element (r, c) of the tensors, each cut into rows of 2^14, counts a_c·b_r times its bits, with
    secret odd numbers a_c mod 2^32 and b_r mod 2^64: two given lists of tensors have the same hash
    with probability of about 2^-31 over the key. One pass over the tensors on a CUDA device with
    Triton, a few passes elsewhere. The result is a 64-bit number on their device; it is to be
    digested with a key before anyone sees it.
    """

    def __init__(self, key: bytes) -> None:
        words = np.frombuffer(_expanded(key, 4 * _ROW), "<i4") | 1
        self._columns = torch.from_numpy(words.astype(np.int32))
        self._multiplier = int.from_bytes(_expanded(key + b"rows", 8), "little", signed=True) | 1

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The hash of the elements of all tensors, on one device, in their order."""
        device = tensors[0].device
        if self._columns.device != device:
            self._columns = self._columns.to(device)
        sums = torch.cat([row_sums(_integers(tensor), self._columns) for tensor in tensors])
        numbers = torch.arange(sums.numel(), device=device)
        return (sums * _mixed(numbers, self._multiplier)).sum()


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    kind = torch.int32 if tensor.element_size() >= 4 else torch.int16
    return tensor.detach().contiguous().view(-1).view(kind)


def row_sums(bits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Σ_c bits[r, c]·columns[c] for every row r: products mod 2^32, their sum in 64 bits."""
    if bits.device.type == "cuda" and has_triton():
        from corrnoise.torch import hash_kernel

        return hash_kernel.row_sums(bits, columns)
    found: list[torch.Tensor] = []
    for start in range(0, bits.numel(), _ROW * _ROWS):
        piece = bits[start : start + _ROW * _ROWS]
        whole = piece.numel() // _ROW
        found.append((piece[: whole * _ROW].view(whole, _ROW) * columns).sum(dim=1))
        rest = piece[whole * _ROW :]
        if rest.numel():
            found.append((rest * columns[: rest.numel()]).sum().view(1))
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64, device=bits.device)


def _mixed(numbers: torch.Tensor, multiplier: int) -> torch.Tensor:
    """Odd pseudo-random 64-bit factors for row numbers."""
    mixed = (numbers + 1) * multiplier
    mixed = (mixed ^ (mixed >> 29)) * multiplier
    return (mixed ^ (mixed >> 32)) | 1


def _expanded(key: bytes, size: int) -> bytes:
    return hashlib.shake_256(key).digest(size)


def data_digest(dataset: Any, key: Key) -> str:
    """A digest of the size of a dataset and of 64 of its examples, spread over it.

    Examples that differ each time they are read (random augmentation) are left out; then the size
    alone tells datasets apart.
    """
    size = len(dataset)
    probes = sorted({k * size // _PROBES for k in range(_PROBES)})
    text = hashlib.sha256(repr(size).encode())
    for index in probes:
        first = hashlib.sha256(b"".join(_bytes(dataset[index]))).digest()
        again = hashlib.sha256(b"".join(_bytes(dataset[index]))).digest()
        text.update(first if first == again else b"random")
    return keyed(key, b"data", text.digest())


def parameter_digest(params: Sequence[nn.Parameter], key: Key) -> str:
    """A digest of the shapes and kinds of an optimizer's parameters, in order."""
    shapes = [(tuple(param.shape), str(param.dtype)) for param in params]
    return keyed(key, b"parameters", repr(shapes).encode())


def _bytes(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield value.tobytes()
    elif isinstance(value, Mapping):
        for name in sorted(value, key=repr):
            yield repr(name).encode()
            yield from _bytes(value[name])
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _bytes(part)
    elif isinstance(value, (int, float, str, bytes, bool)):
        yield repr(value).encode()
    else:
        yield type(value).__name__.encode()
