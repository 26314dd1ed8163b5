r"""Standard normals from keystream words: Box-Muller, with 104 bits of radius in the tail.

The 512 indices of a group share 32 ChaCha blocks. Index i = 512g + 32j + l takes word j of block
32g + l, so that 32 neighbouring indices use 32 neighbouring blocks: a GPU warp that computes one
block per lane reads and writes its gradient in whole lines, and NumPy works on long rows. Word
j < 8 of a block, R, pairs with word j + 8, A, of the same block:

    u = (256·R + (A mod 256) + v) / 2^40,        radius = √(-2 ln u)
    θ = π·(2·⌊A/256⌋ + 1) / 2^24,                z[j] = radius·cos θ,   z[j + 8] = radius·sin θ

For almost all pairs v = 1/2. In the tail, R < 2^8, which has probability 2^-24, words j and j + 8
of a second block, E and F, refine it: v = (2^32·E + F + 1/2) / 2^64. The radius is at most
√(210 ln 2) = 12.06; an untruncated normal pair exceeds it with probability 2^-105.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from corrnoise import _checks as checks
from corrnoise.noise.generator.chacha import Words

GROUP_BLOCKS = 32
GROUP = 16 * GROUP_BLOCKS
TAIL = 1 << 8  # radius words below this are refined by a second block
BEYOND = 2.0**-105  # the probability that a pair of true normals exceeds the largest radius
LARGEST_RADIUS = math.sqrt(-2 * math.log(BEYOND))

Normals = npt.NDArray[np.float32]
# A function from numbers of pairs, 256·group + place of the radius word, to their words E and F.
Refinement = Callable[[npt.NDArray[np.intp]], tuple[Words, Words]]

_HALF = GROUP // 2
_F = np.float32
_LOW, _HIGH, _MIDDLE = np.uint32(0xFF), np.uint32(0xFFFFFF00), np.uint32(0x80)
# Every radius of the tail is above this, float32 rounding included: √(-2 ln 2^-24) = 5.7681.
_TAIL_RADIUS = _F(5.768)


def arrange(raw: Words, out: Words) -> None:
    """Reorder the keystream of whole groups into the order of the indices."""
    groups = raw.size // GROUP
    blocks = raw.reshape(groups, GROUP_BLOCKS, 16)
    np.copyto(out.reshape(groups, 16, GROUP_BLOCKS), blocks.transpose(0, 2, 1))


def truncation(num_steps: int, num_parameters: int) -> float:
    """An upper bound on the probability that true normals exceed the stream's largest radius.

    A step takes its normals from at most ``num_parameters`` pairs, however the indices are laid
    out, and a pair of true normals exceeds the radius with probability 2^-105. The union bound is
    num_steps·num_parameters·2^-105. ``docs/noise-stream.md`` derives what it adds to δ.

    >>> truncation(num_steps=10_000, num_parameters=10**8) < 1e-19
    True
    """
    steps = checks.integer("num_steps", num_steps, 0, 1 << 32)
    parameters = checks.integer("num_parameters", num_parameters, 0, 1 << 63)
    return min(1.0, math.nextafter(float(steps * parameters), math.inf) * BEYOND)


def box_muller_exact(words: Words, refinement: Refinement) -> npt.NDArray[np.float64]:
    """The normals by definition, in float64, from the words of whole groups in index order."""
    pair = words.reshape(-1, 2, _HALF)
    radius_word, angle_word = pair[:, 0].astype(np.float64), pair[:, 1]
    low = (angle_word & _LOW).astype(np.float64)
    u = (256.0 * radius_word + low + 0.5) / 2.0**40  # exact: 41 bits
    pairs = np.flatnonzero(pair[:, 0] < TAIL)
    u.reshape(-1)[pairs] = _tail(words, pairs, refinement)
    radius = np.sqrt(-2.0 * np.log(u))
    theta = (2.0 * (angle_word.view(np.int32) >> 8).astype(np.float64) + 1.0) * (math.pi / 2.0**24)
    return np.stack([radius * np.cos(theta), radius * np.sin(theta)], axis=1).reshape(-1)


def _tail(
    words: Words, pairs: npt.NDArray[np.intp], refinement: Refinement
) -> npt.NDArray[np.float64]:
    """The u of pairs in the tail, accurate to a few units of 2^-53."""
    if not pairs.size:
        return np.empty(0)
    place = pairs + pairs // _HALF * _HALF
    cell = 256.0 * words[place] + (words[place + _HALF] & _LOW)
    high, low = (word.astype(np.float64) for word in refinement(pairs))
    return (cell + (high * 2.0**-32 + (low + 0.5) * 2.0**-64)) * 2.0**-40


def box_muller(words: Words, out: Normals, scratch: Scratch, refinement: Refinement) -> None:
    """The normals in float32, accurate to 2^-21 of the radius, without allocating memory.

    ``f`` is u, or u - 1 if the radius word's top bit is set. As a signed number the word is exact
    at both ends: for u near 0 (the tail) and u near 1 (the centre). Near 1, w = 1 + f is rounded,
    and the lost part is added to the logarithm: ln(1 + f) = ln w + (f - (w - 1)) + O(2^-24 ln w).
    The few radii of the tail are computed in float64. Only whole groups are computed, so a normal
    does not depend on the requested slice.
    """
    groups = words.size // GROUP
    pair = words.reshape(groups, 2, _HALF)
    f, x, y, integer = scratch.views(groups)
    # f = (R + (low + 1/2)/256)/2^32, R signed
    np.bitwise_and(pair[:, 1], _LOW, out=integer)
    np.copyto(x, integer.view(np.int32), casting="unsafe")
    np.multiply(x, _F(2.0**-40), out=x)
    np.add(x, _F(2.0**-41), out=x)
    np.copyto(f, pair[:, 0].view(np.int32), casting="unsafe")
    np.multiply(f, _F(2.0**-32), out=f)
    np.add(f, x, out=f)
    # y = √(-2 ln u)
    np.floor(f, out=x)  # -1 or 0
    np.subtract(f, x, out=y)  # w
    np.add(x, y, out=x)  # w - 1 or w, exact
    np.subtract(f, x, out=x)  # the part of w that was lost by rounding, exact
    np.log(y, out=y)
    np.add(y, x, out=y)
    np.multiply(y, _F(-2.0), out=y)
    np.sqrt(y, out=y)
    if y.max() > _TAIL_RADIUS:
        pairs = np.flatnonzero(pair[:, 0] < TAIL)
        y.reshape(-1)[pairs] = np.sqrt(-2.0 * np.log(_tail(words, pairs, refinement)))
    # f = θ: the angle word with its low byte set to one half of 256, signed, is exact in float32
    np.bitwise_and(pair[:, 1], _HIGH, out=integer)
    np.bitwise_or(integer, _MIDDLE, out=integer)
    np.copyto(f, integer.view(np.int32), casting="unsafe")
    np.multiply(f, _F(math.pi * 2.0**-31), out=f)
    result = out.reshape(groups, 2, _HALF)
    np.cos(f, out=x)
    np.multiply(x, y, out=result[:, 0])
    np.sin(f, out=x)
    np.multiply(x, y, out=result[:, 1])


class Scratch:
    """Memory for ``box_muller``: 6 bytes per word, besides ``spare`` words that it may overwrite.

    The results may overwrite the same spare words.
    """

    def __init__(self, spare: Words) -> None:
        self._floats = [np.empty(spare.size // 2, dtype=np.float32) for _ in range(3)]
        self._integers = spare[: spare.size // 2]

    def views(self, groups: int) -> tuple[Normals, Normals, Normals, Words]:
        """Three float arrays and one of integers, each of shape (groups, 256)."""
        size = groups * _HALF
        f, x, y = (array[:size].reshape(groups, _HALF) for array in self._floats)
        return f, x, y, self._integers[:size].reshape(groups, _HALF)
