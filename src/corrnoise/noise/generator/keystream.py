"""The keystream of one step: ChaCha blocks addressed by (key, stream, step, block)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from corrnoise.noise.generator import chacha
from corrnoise.noise.generator.chacha import WORDS_PER_BLOCK, Words

_SPAN = 1 << 32  # how many blocks share one value of state word 13
_NAIVE_BLOCKS = 1 << 12


def fill(out: Words, key: bytes, *, stream: int, step: int, block: int, rounds: int = 20) -> None:
    """Write the keystream, starting at ``block``, to ``out``, whose length is a multiple of 16.

    State words 12 to 15 are the low and the high half of the block number, the step and the stream
    id, so that a step has 2^64 blocks. ChaCha20 is computed by OpenSSL where the ``cryptography``
    package is installed. For fewer rounds, or without that package, the NumPy reference computes
    the same words, more slowly.
    """
    done, total = 0, out.size // WORDS_PER_BLOCK
    while done < total:
        first = block + done
        count = min(total - done, _SPAN - first % _SPAN)
        part = out[done * WORDS_PER_BLOCK : (done + count) * WORDS_PER_BLOCK]
        cipher = _openssl() if rounds == 20 else None
        if cipher is None:
            count = min(count, _NAIVE_BLOCKS)
            part = part[: count * WORDS_PER_BLOCK]
            numbers = np.arange(count, dtype=np.uint64) + np.uint64(first)
            low, high = numbers & np.uint64(_SPAN - 1), numbers >> np.uint64(32)
            tail = [low, high, np.full_like(low, step), np.full_like(low, stream)]
            part.reshape(count, WORDS_PER_BLOCK)[:] = chacha.blocks(key, tail, rounds).T
        else:
            words = (first % _SPAN, first // _SPAN, step, stream)
            cipher(key, b"".join(word.to_bytes(4, "little") for word in words), part)
        done += count


@lru_cache(maxsize=1)
def _openssl() -> Any:
    """A function of (key, the last 16 bytes of the state, out) that uses OpenSSL, or ``None``."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    except ImportError:
        return None

    def keystream(key: bytes, tail: bytes, out: Words) -> None:
        encryptor = Cipher(algorithms.ChaCha20(key, tail), mode=None).encryptor()
        target = out.data.cast("B")
        for start in range(0, len(target), len(_ZEROS)):
            part = target[start : start + len(_ZEROS)]
            encryptor.update_into(_ZEROS[: len(part)], part)
        if not _LITTLE_ENDIAN:
            out.byteswap(inplace=True)

    return keystream


_ZEROS = memoryview(bytes(1 << 18))
_LITTLE_ENDIAN = bool(np.dtype(np.uint32).newbyteorder("<") == np.dtype(np.uint32))
