"""The ChaCha block function (RFC 8439, section 2.3) in NumPy: the specification of every backend.

It is written for readability. OpenSSL (``keystream``) and the GPU are far faster, and both must
give the same words.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

ROUNDS = (20, 12, 8)
WORDS_PER_BLOCK = 16

_SIGMA = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)
_COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))


def quarter_round(x: list[Words], a: int, b: int, c: int, d: int) -> None:
    """The ChaCha quarter round on the words a, b, c, d of the state, in place (section 2.1)."""
    x[a] = x[a] + x[b]
    x[d] = _rotate(x[d] ^ x[a], 16)
    x[c] = x[c] + x[d]
    x[b] = _rotate(x[b] ^ x[c], 12)
    x[a] = x[a] + x[b]
    x[d] = _rotate(x[d] ^ x[a], 8)
    x[c] = x[c] + x[d]
    x[b] = _rotate(x[b] ^ x[c], 7)


def blocks(key: bytes, tail: npt.ArrayLike, rounds: int = 20) -> Words:
    """The keystream words of blocks that share a key, shape (16, number of blocks).

    Args:
        key: 32 bytes.
        tail: words 12 to 15 of the initial state, shape (4, number of blocks): in the RFC's terms
            the counter and the three nonce words.
        rounds: 20, 12 or 8.

    >>> blocks(bytes(32), [[0], [0], [0], [0]])[:2, 0].astype("<u4").tobytes().hex()
    '76b8e0ada0f13d90'
    """
    last = np.asarray(tail, dtype=np.uint32)
    head = np.concatenate([_SIGMA, np.frombuffer(key, dtype="<u4").astype(np.uint32)])
    start = [np.full(last.shape[1], word, dtype=np.uint32) for word in head] + list(last)
    x = list(start)
    for _ in range(rounds // 2):
        for lane in _COLUMNS + _DIAGONALS:
            quarter_round(x, *lane)
    return np.stack([word + first for word, first in zip(x, start, strict=True)])


def _rotate(x: Words, left: int) -> Words:
    return (x << np.uint32(left)) | (x >> np.uint32(32 - left))
