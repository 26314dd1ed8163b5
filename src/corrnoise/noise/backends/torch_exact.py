"""Exact releases on a torch device, in plain torch operations: the counterpart of ``exact._tile``.

The words of ChaCha come from the noise kernel, or are computed in int32, whose additions wrap
around. Both are equal bit for bit to those of ``chacha``. The normals may differ from NumPy's in
their last bits, but the releases are the same, as both round the same real numbers. Entries that
float64 cannot decide are computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from corrnoise._extras import has_triton
from corrnoise.noise.backends.cpu import Layout
from corrnoise.noise.exact import Release
from corrnoise.noise.generator.chacha import WORDS_PER_BLOCK
from corrnoise.noise.generator.normals import GROUP_BLOCKS
from corrnoise.noise.generator.reals import HALF_TURN, INDICES, LEVEL_BITS, OPEN_BITS
from corrnoise.noise.generator.stream import LARGEST_INDEX, NoiseStream, tiles

# A function from G and an index of the flat vector to the release in units of the grid.
Nearest = Callable[[float, int], int]

_SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_TILE = 1 << 22  # indices at once; they take about 300 MiB on the device
_OPEN = 1 << (32 - OPEN_BITS)


class Words:
    """The keystream of a stream on a device: by Triton on CUDA, where it is installed.

    Args:
        stream: the key of a level, with stream id and rounds.
        device: where the words are wanted.
        by_triton: whether Triton's kernel computes them.
    """

    def __init__(
        self, stream: NoiseStream, device: torch.device, *, by_triton: bool | None = None
    ) -> None:
        self._stream, self._device, self._kernel = stream, device, None
        if device.type == "cuda" and has_triton() if by_triton is None else by_triton:
            from corrnoise.noise.backends.triton_backend import TritonBackend

            self._kernel = TritonBackend(stream, str(device))

    def __call__(self, step: int, block: int, count: int) -> Tensor:
        """The words of ``count`` blocks from ``block`` on, shape (16, count), in int32."""
        first = block - block % GROUP_BLOCKS
        groups = -(-(block + count - first) // GROUP_BLOCKS)
        end = WORDS_PER_BLOCK * (first + groups * GROUP_BLOCKS)
        if self._kernel is None or end > LARGEST_INDEX:
            return self._by_torch(step, block, count)
        # In the order of ``normals.arrange``.
        flat = self._kernel.words(step, WORDS_PER_BLOCK * first, end)
        by_word = flat.view(groups, WORDS_PER_BLOCK, GROUP_BLOCKS).transpose(0, 1)
        return by_word.reshape(WORDS_PER_BLOCK, -1)[:, block - first : block - first + count]

    def _by_torch(self, step: int, block: int, count: int) -> Tensor:
        numbers = torch.arange(block, block + count, device=self._device)
        fixed = [*_SIGMA, *np.frombuffer(self._stream.secret, "<u4").tolist()]
        state = torch.empty(WORDS_PER_BLOCK, count, dtype=torch.int32, device=self._device)
        for place, word in [*enumerate(fixed), (14, step), (15, self._stream.stream)]:
            state[place] = _signed(word)
        state[12] = (numbers & 0xFFFFFFFF).to(torch.int32)
        state[13] = (numbers >> 32).to(torch.int32)
        a, b, c, d = (row.clone() for row in state.view(4, 4, count))
        for _ in range(self._stream.rounds // 2):
            _quarter_rounds(a, b, c, d)
            b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
            _quarter_rounds(a, b, c, d)
            b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
        return torch.cat([a, b, c, d]).add_(state)


def approximate(found: Tensor) -> Tensor:
    """The normals of whole blocks, or NaN where level 0 has too few bits (``reals.approximate``).

    Args:
        found: words of level 0, (16, blocks).

    Returns:
        (8, blocks): row j has the normals with i mod 8 = j.
    """
    low, high = found[0::2].long() & 0xFFFFFFFF, found[1::2].long()
    bits = high << 32 | low  # as signed numbers
    whole = bits[:4].double()
    u = torch.where(bits[:4] < 0, whole + 2.0**LEVEL_BITS, whole).mul_(2.0**-LEVEL_BITS)
    ends = high[:4]  # signed: both ends of [0, 1) are near 0
    u.masked_fill_((ends >= -_OPEN) & (ends < _OPEN), torch.nan)
    radius = u.log_().mul_(-2.0).sqrt_()
    sin = bits[4:].double().mul_(HALF_TURN).tan_()
    cos = sin.square()
    radius.div_(1.0 + cos)
    return torch.cat([(1.0 - cos).mul_(radius), sin.mul_(2.0).mul_(radius)])


def round_(
    tensors: Sequence[Tensor], layout: Layout, release: Release, words: Words, nearest: Nearest
) -> None:
    """Replace every G by its release, in place.

    Args:
        tensors: flat, float64, on the device of the words.
        layout: flat offset and size of each.
        release: the step, weights and scale of the noise, and the grid.
        words: the keystream of level 0.
        nearest: computes the entries that float64 cannot decide.
    """
    for whole, (offset, size) in zip(tensors, layout, strict=True):
        for low, high in tiles(offset, offset + size, _TILE):
            part = whole[low - offset : high - offset]
            first = low - low % INDICES
            count = -(-(high - first) // INDICES)
            total = torch.zeros(INDICES, count, dtype=torch.float64, device=whole.device)
            for t, weight in enumerate(release.weights):
                found = words(release.oldest + t, first // INDICES, count)
                total += approximate(found).mul_(weight)
            noise = total.T.reshape(-1)[low - first : high - first].mul_(release.ratio)
            noise += part / release.grid
            rounded = noise.round()
            far = (noise - rounded).abs_() + noise.abs() * 2.0**-52
            places = torch.nonzero(~(far < release.room)).view(-1)
            if places.numel():
                pairs = zip(part[places].tolist(), places.tolist(), strict=True)
                decided = [nearest(value, low + place) for value, place in pairs]
                rounded[places] = torch.tensor(decided, dtype=torch.float64, device=whole.device)
            torch.mul(rounded, release.grid, out=part)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Four ChaCha quarter rounds at once, in place."""
    for left, (x, y, z) in zip((16, 12, 8, 7), ((a, b, d), (c, d, b)) * 2, strict=True):
        x.add_(y)
        z.bitwise_xor_(x)
        rest = (z >> (32 - left)).bitwise_and_((1 << left) - 1)
        z.bitwise_left_shift_(left).bitwise_or_(rest)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
