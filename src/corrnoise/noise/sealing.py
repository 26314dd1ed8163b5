"""Encryption of the noise that a recursion keeps, for checkpoints.

The state of a recursion contains past noise: anyone who reads it can subtract that noise from what
was released. In a checkpoint it is encrypted with ChaCha20-Poly1305 (RFC 8439) under a subkey of
the run's key, and bound to the run and the step. So a checkpoint reveals nothing about the noise
without the key, and the state of another run or step is not accepted.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from corrnoise import _extras

Bytes = npt.NDArray[np.uint8]

_NONCE, _TAG = 12, 16
_PIECE = 1 << 26  # bytes that are encrypted at once; the cipher takes less than 2^31


def seal(vectors: npt.NDArray[np.float32], key: bytes, header: Mapping[str, Any]) -> Bytes:
    """Encrypt float32 vectors and bind them to ``header``, which is authenticated with them."""
    data = np.ascontiguousarray(vectors, dtype="<f4").reshape(-1).view(np.uint8)
    cipher, nonce = _cipher(key), secrets.token_bytes(_NONCE)
    parts = [np.frombuffer(nonce, np.uint8)]
    for number, start in enumerate(range(0, max(data.size, 1), _PIECE)):
        piece = data[start : start + _PIECE].tobytes()
        sealed = cipher.encrypt(_counted(nonce, number), piece, _bound(header, data.size))
        parts.append(np.frombuffer(sealed, np.uint8))
    return np.concatenate(parts)


def unseal(
    sealed: Bytes, key: bytes, header: Mapping[str, Any], shape: tuple[int, int]
) -> npt.NDArray[np.float32]:
    """The inverse of ``seal``.

    Raises:
        ValueError: the data was changed, or sealed under another key or header.
    """
    size = 4 * shape[0] * shape[1]
    pieces = max(1, -(-size // _PIECE))
    invalid = _extras.load("cryptography.exceptions").InvalidTag
    try:
        if sealed.dtype != np.uint8 or sealed.size != _NONCE + size + pieces * _TAG:
            raise invalid
        cipher, nonce = _cipher(key), sealed[:_NONCE].tobytes()
        parts: list[bytes] = []
        for number in range(pieces):
            start = _NONCE + number * (_PIECE + _TAG)
            piece = sealed[start : start + _PIECE + _TAG].tobytes()
            parts.append(cipher.decrypt(_counted(nonce, number), piece, _bound(header, size)))
    except invalid:
        raise ValueError(
            "state must be the one that this run saved at this step, under its key; it is damaged, "
            "was changed, or belongs to another: load another checkpoint"
        ) from None
    return np.frombuffer(b"".join(parts), "<f4").astype(np.float32).reshape(shape)


def _cipher(key: bytes) -> Any:
    return _extras.load("cryptography.hazmat.primitives.ciphers.aead").ChaCha20Poly1305(key)


def _counted(nonce: bytes, number: int) -> bytes:
    """The nonce of a piece: the random nonce, its last four bytes increased by ``number``."""
    last = (int.from_bytes(nonce[8:], "little") + number) % 2**32
    return nonce[:8] + last.to_bytes(4, "little")


def _bound(header: Mapping[str, Any], size: int) -> bytes:
    return json.dumps({**header, "bytes": size}, sort_keys=True).encode()
