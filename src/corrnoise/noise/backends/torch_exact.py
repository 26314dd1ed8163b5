"""Exact releases on a torch device, in plain torch operations: the counterpart of ``exact._tile``.

The words of ChaCha are computed in int32, whose additions wrap around, and are equal bit for bit to
those of ``chacha``; the normals may differ in their last bits from NumPy's, and the releases may
not: both round the same real numbers. What float64 leaves undecided comes to the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from corrnoise.noise.backends.cpu import Layout
from corrnoise.noise.generator.reals import INDICES, LEVEL_BITS, OPEN_BITS, TURN
from corrnoise.noise.generator.stream import tiles

# From G and an index of the flat vector to the release in units of the grid.
Nearest = Callable[[float, int], int]

_SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_TILE = 1 << 22  # indices at a time: 200 MiB on the device
_OPEN = 1 << (32 - OPEN_BITS)


def words(
    key: bytes, *, stream: int, step: int, block: int, count: int, rounds: int, device: torch.device
) -> Tensor:
    """The keystream of ``count`` blocks from ``block`` on, shape (16, count), in int32."""
    numbers = torch.arange(block, block + count, device=device)
    fixed = [*_SIGMA, *np.frombuffer(key, "<u4").tolist()]
    state = torch.empty(16, count, dtype=torch.int32, device=device)
    for place, word in [*enumerate(fixed), (14, step), (15, stream)]:
        state[place] = _signed(word)
    state[12] = (numbers & 0xFFFFFFFF).to(torch.int32)
    state[13] = (numbers >> 32).to(torch.int32)
    a, b, c, d = (row.clone() for row in state.view(4, 4, count))
    for _ in range(rounds // 2):
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_rounds(a, b, c, d)
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([a, b, c, d]).add_(state)


def approximate(found: Tensor) -> Tensor:
    """The normals of whole blocks, or NaN where level 0 says too little, as ``reals.approximate``.

    Args:
        found: words of level 0, (16, blocks).

    Returns:
        (8·blocks) normals, in the order of the indices.
    """
    low, high = found[0::2].long() & 0xFFFFFFFF, found[1::2].long()
    bits = high << 32 | low  # as signed numbers
    whole = bits[:4].double()
    u = torch.where(bits[:4] < 0, whole + 2.0**LEVEL_BITS, whole).mul_(2.0**-LEVEL_BITS)
    ends = high[:4]  # signed: both ends of [0, 1) lie around 0
    u.masked_fill_((ends >= -_OPEN) & (ends < _OPEN), torch.nan)
    radius = u.log_().mul_(-2.0).sqrt_()
    angle = bits[4:].double().mul_(TURN)
    return torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)]).T.reshape(-1)


def round_(
    values: Sequence[Tensor],
    layout: Layout,
    nearest: Nearest,
    *,
    key: bytes,
    stream: int,
    rounds: int,
    oldest: int,
    weights: Sequence[float],
    grid: float,
    ratio: float,
    room: float,
) -> None:
    """Replace every G by its release, in place.

    Args:
        values: flat float64 tensors on one device.
        layout: flat offset and size of each.
        nearest: decides what float64 does not.
        key: of level 0.
        stream: its id.
        rounds: of ChaCha.
        oldest: the step of the first weight.
        weights: of consecutive steps.
        grid: γ.
        ratio: the scale over γ.
        room: how near to a multiple of γ an entry must be to be decided, in units of γ.
    """
    for whole, (offset, size) in zip(values, layout, strict=True):
        for low, high in tiles(offset, offset + size, _TILE):
            part = whole[low - offset : high - offset]
            first = low - low % INDICES
            count = -(-(high - first) // INDICES)
            noise = torch.zeros(INDICES * count, dtype=torch.float64, device=whole.device)
            for t, weight in enumerate(weights):
                found = words(
                    key,
                    stream=stream,
                    step=oldest + t,
                    block=first // INDICES,
                    count=count,
                    rounds=rounds,
                    device=whole.device,
                )
                noise += approximate(found).mul_(weight)
            noise = noise[low - first : high - first].mul_(ratio).add_(part / grid)
            rounded = noise.round()
            far = (noise - rounded).abs_() + noise.abs() * 2.0**-52
            places = torch.nonzero(~(far < room)).view(-1)
            if places.numel():
                open_values = part[places].tolist()
                found = [
                    nearest(g, low + k) for g, k in zip(open_values, places.tolist(), strict=True)
                ]
                rounded[places] = torch.tensor(found, dtype=torch.float64, device=whole.device)
            torch.mul(rounded, grid, out=part)


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Four of them at once, in place."""
    for left, (x, y, z) in zip((16, 12, 8, 7), ((a, b, d), (c, d, b)) * 2, strict=True):
        x.add_(y)
        z.bitwise_xor_(x)
        rest = (z >> (32 - left)).bitwise_and_((1 << left) - 1)
        z.bitwise_left_shift_(left).bitwise_or_(rest)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
