# pyright: basic
"""One pass over inputs and gradients of normalisations, for the gradients of scales and biases."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def channel_sums(inputs, grads, found, size, count, BLOCK: tl.constexpr):
    """For each example and channel: mean, squares around it, Σg and Σg(x - mean)."""
    which = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + at < size
        total += tl.load(inputs + which * size + start + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / size
    squares = tl.zeros((BLOCK,), tl.float32)
    grad_sum = tl.zeros((BLOCK,), tl.float32)
    met = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        inside = start + at < size
        x = tl.load(inputs + which * size + start + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grads + which * size + start + at, mask=inside, other=0.0).to(tl.float32)
        off = tl.where(inside, x - mean, 0.0)
        squares += off * off
        grad_sum += g
        met += g * off
    tl.store(found + which, mean)
    tl.store(found + count + which, tl.sum(squares, 0))
    tl.store(found + 2 * count + which, tl.sum(grad_sum, 0))
    tl.store(found + 3 * count + which, tl.sum(met, 0))


@triton.jit
def row_sums(
    inputs, grads, scales, biases, positions, size, chunk, eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For each example and some of its positions: Σ g·x̂ and Σ g, x̂ the normalised rows."""
    part = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < size
    scale = tl.zeros((BLOCK,), tl.float32)
    bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, chunk, TILE):
        row = part * chunk + start + tl.arange(0, TILE)
        inside = ((start + tl.arange(0, TILE) < chunk) & (row < positions))[:, None] & real[None, :]
        at = (example * positions + row)[:, None] * size + column[None, :]
        x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            mean = tl.sum(x, 1) / size
            x = tl.where(inside, x - mean[:, None], 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
        scale += tl.sum(g * x, 0)
        bias += tl.sum(g, 0)
    at = (example * tl.num_programs(0) + part) * size + column
    tl.store(scales + at, scale, mask=real)
    tl.store(biases + at, bias, mask=real)
