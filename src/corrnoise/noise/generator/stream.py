"""The noise stream: z[step, index], a standard normal that depends on the key and its position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.noise.generator import keystream, normals
from corrnoise.noise.generator.chacha import ROUNDS, WORDS_PER_BLOCK, Words
from corrnoise.noise.generator.key import Key
from corrnoise.noise.generator.normals import (
    GROUP,
    GROUP_BLOCKS,
    Normals,
    Refinement,
    Scratch,
)

# Words that are computed at once: few enough to stay in cache, and enough that threads seldom wait
# for the interpreter's lock. With two threads, 2^16 gives a speed-up of 1.2 and 2^18 one of 1.8.
TILE = 1 << 18
LARGEST_WORD = (1 << 32) - 1
LARGEST_INDEX = (1 << 63) - 1
# Second blocks begin here. Indices are below 2^63, so the first blocks are below 2^59.
REFINEMENT_BLOCK = 1 << 63


class Workspace:
    """The arrays that one thread needs to compute normals tile by tile: 14 bytes per word."""

    def __init__(self, size: int) -> None:
        self.raw = np.empty(size, dtype=np.uint32)
        self.words = np.empty(size, dtype=np.uint32)
        # Normals overwrite the raw words, which are not needed any more.
        self.normals = self.raw.view(np.float32)
        self.scratch = Scratch(self.raw)


class NoiseStream:
    """z[step, index]: standard normals by random access, from ChaCha and Box-Muller.

    The value depends only on (key, stream, step, index), so any slice of any step can be
    regenerated, on any machine, whatever the sharding. ``docs/noise-stream.md`` defines every bit.
    The words are the same on all backends; the normals may differ in the last bits of a float32.

    Args:
        key: the secret.
        stream: an id below 2^32; different ids give independent noise under one key.
        rounds: 20 as in RFC 8439, or the faster 12 and 8. Published attacks that are faster than
            exhaustive search reach between 7 and 8 rounds, at a cost far beyond practice: 8 rounds
            leave no margin, 12 leave some, and 20 leave the standard's.
        purpose: the purpose of the subkey that the words come from; two purposes share no words.

    >>> stream = NoiseStream(Key.from_bytes(bytes(range(32))))
    >>> stream.normals(step=3, start=1000, stop=1003)
    array([-1.5559274 , -0.15454768, -0.7258028 ], dtype=float32)
    """

    def __init__(
        self, key: Key, stream: int = 0, rounds: int = 20, *, purpose: str = "noise"
    ) -> None:
        self.key = check_key(key)
        self.secret = self.key.subkey(purpose)
        self.stream = checks.integer("stream", stream, 0, LARGEST_WORD, "use a 32-bit id")
        self.rounds = check_rounds(rounds)

    def words(self, step: int, start: int, stop: int) -> Words:
        """The keystream words of the indices [start, stop) of a step."""
        step, start, stop = self._check(step, start, stop)
        result = np.empty(stop - start, dtype=np.uint32)
        workspace = Workspace(room_size(stop - start))
        for low, high in tiles(start, stop):
            result[low - start : high - start] = self.fill_words(step, low, high, workspace)
        return result

    def normals(
        self, step: int, start: int, stop: int, dtype: npt.DTypeLike = np.float32
    ) -> npt.NDArray[Any]:
        """z[step, start:stop]: in float32 by the fast path, or in float64 by the definition."""
        step, start, stop = self._check(step, start, stop)
        kind = np.dtype(dtype)
        if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, got {kind}; convert the result")
        result = np.empty(stop - start, dtype=kind)
        workspace = Workspace(room_size(stop - start))
        for low, high in tiles(start, stop):
            if kind == np.dtype(np.float32):
                part = self.fill(step, low, high, workspace)
            else:
                first = low - low % GROUP
                words = self.fill_words(step, first, -(-high // GROUP) * GROUP, workspace)
                exact = normals.box_muller_exact(words, self.refinement(step, first))
                part = exact[low - first : high - first]
            result[low - start : high - start] = part
        return result

    def fill_words(self, step: int, start: int, stop: int, workspace: Workspace) -> Words:
        """The words of a slice of one tile, in the workspace, without argument validation."""
        first = start - start % GROUP
        size = -(-stop // GROUP) * GROUP - first
        raw, words = workspace.raw[:size], workspace.words[:size]
        block = first // 16
        keystream.fill(
            raw, self.secret, stream=self.stream, step=step, block=block, rounds=self.rounds
        )
        normals.arrange(raw, words)
        return words[start - first : stop - first]

    def fill(self, step: int, start: int, stop: int, workspace: Workspace) -> Normals:
        """The normals of a slice of one tile, in the workspace, without argument validation."""
        first = start - start % GROUP
        size = -(-stop // GROUP) * GROUP - first
        words = self.fill_words(step, first, first + size, workspace)
        refinement = self.refinement(step, first)
        normals.box_muller(words, workspace.normals[:size], workspace.scratch, refinement)
        return workspace.normals[start - first : stop - first]

    def refinement(self, step: int, first: int) -> Refinement:
        """The function that gives the second words of pairs, for groups that begin at ``first``."""

        def words(pairs: npt.NDArray[np.intp]) -> tuple[Words, Words]:
            high, low = (np.empty(pairs.size, dtype=np.uint32) for _ in range(2))
            block = np.empty(WORDS_PER_BLOCK, dtype=np.uint32)
            for k, pair in enumerate(pairs.tolist()):
                group, place = divmod(pair, GROUP // 2)
                j, lane = divmod(place, GROUP_BLOCKS)
                number = REFINEMENT_BLOCK + first // 16 + GROUP_BLOCKS * group + lane
                keystream.fill(
                    block,
                    self.secret,
                    stream=self.stream,
                    step=step,
                    block=number,
                    rounds=self.rounds,
                )
                high[k], low[k] = block[j], block[j + 8]
            return high, low

        return words

    def _check(self, step: int, start: int, stop: int) -> tuple[int, int, int]:
        step = checks.integer("step", step, 0, LARGEST_WORD, "a step is a 32-bit number")
        return (step, *check_slice(start, stop))

    def __repr__(self) -> str:
        return (
            f"NoiseStream(key={self.key.fingerprint}, stream={self.stream}, rounds={self.rounds})"
        )


def tiles(start: int, stop: int, size: int = TILE) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at the multiples of ``size``."""
    while start < stop:
        end = min(stop, start - start % size + size)
        yield start, end
        start = end


def room_size(length: int) -> int:
    """How many words the groups of a slice of at most this length have; at most one tile."""
    return min(TILE, (length // GROUP + 2) * GROUP)


def check_key(key: object) -> Key:
    """Return ``key`` if it is one, or raise."""
    if not isinstance(key, Key):
        kind = type(key).__name__  # never the value: it may be the secret itself
        raise ValueError(f"key must be a Key, got {kind}; use Key.generate() or Key.load(path)")
    return key


def check_rounds(rounds: object) -> int:
    """Return ``rounds`` if it is a supported number of ChaCha rounds, or raise."""
    if isinstance(rounds, bool) or rounds not in ROUNDS:
        raise ValueError(f"rounds must be one of {ROUNDS}, got {rounds!r}; 20 is the standard")
    return cast(int, rounds)


def check_slice(start: object, stop: object) -> tuple[int, int]:
    """Return [start, stop) if it is a range of indices below 2^63, or raise."""
    low = checks.integer("start", start, 0, LARGEST_INDEX, "indices are 63-bit numbers")
    high = checks.integer("stop", stop, 0, LARGEST_INDEX, "indices are 63-bit numbers")
    if high < low:
        raise ValueError(f"stop must be at least start={low}, got {high}; swap them")
    return low, high
