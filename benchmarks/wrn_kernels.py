"""ReLU followed by GroupNorm in one kernel, its backward pass with every row's sums in another.

A program has some channels of one row. It reads all their positions twice, some at a time: for the
sums, and then for what it writes, which still lies in the cache. Sums are taken of what exceeds the
first position, so that little cancels. Strides are arguments, so that both layouts of pictures are
served. Two more kernels do what torch needs more readings for: they add a convolution's bias in
place, and tell all that clipping needs to know of the gradients of its weight.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _by_group(values, CHANNELS: tl.constexpr, GROUP: tl.constexpr):
    """For each channel the sum over the channels of its group."""
    if GROUP > 1:
        sums = tl.sum(tl.reshape(values, (CHANNELS // GROUP, GROUP)), 1)
        spread = tl.broadcast_to(sums[:, None], (CHANNELS // GROUP, GROUP))
        values = tl.reshape(spread, (CHANNELS,))
    return values


@triton.jit
def _moments(
    first, sums, squares, eps, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The mean of each channel's group, and one over its standard deviation.

    From each channel's sums of what exceeds its first position, and of the squares of that.
    """
    own = sums / POSITIONS
    mean = _by_group(first + own, CHANNELS, GROUP) / GROUP
    between = first + own - mean
    spread = tl.maximum(squares - sums * own, 0.0) + POSITIONS * between * between
    variance = _by_group(spread, CHANNELS, GROUP) / (POSITIONS * GROUP)
    return mean, 1.0 / tl.sqrt(variance + eps)


@triton.jit
def forward(
    inputs, outputs, weight, bias, row_stride, channel_stride, pixel_stride, eps,
    POSITIONS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.arange(0, TILE)
    place = tl.program_id(1).to(tl.int64) * row_stride + channel * channel_stride
    first = tl.maximum(tl.load(inputs + place).to(tl.float32), 0.0)
    sums = tl.zeros((TILE, CHANNELS), tl.float32)
    squares = tl.zeros((TILE, CHANNELS), tl.float32)
    for start in range(0, POSITIONS, TILE):
        real = (start + at < POSITIONS)[:, None]
        here = place[None, :] + (start + at)[:, None] * pixel_stride
        x = tl.maximum(tl.load(inputs + here, mask=real, other=0.0).to(tl.float32), 0.0)
        x = tl.where(real, x - first[None, :], 0.0)
        sums += x
        squares += x * x
    mean, scale = _moments(
        first, tl.sum(sums, 0), tl.sum(squares, 0), eps, POSITIONS, CHANNELS, GROUP
    )
    slope = scale * tl.load(weight + channel)
    offset = tl.load(bias + channel)
    for start in range(0, POSITIONS, TILE):
        real = (start + at < POSITIONS)[:, None]
        here = place[None, :] + (start + at)[:, None] * pixel_stride
        x = tl.maximum(tl.load(inputs + here, mask=real, other=0.0).to(tl.float32), 0.0)
        y = (x - mean[None, :]) * slope[None, :] + offset[None, :]
        tl.store(outputs + here, y.to(outputs.dtype.element_ty), mask=real)


@triton.jit
def backward(
    inputs, grads, found, weight, weights, biases,
    row_stride, channel_stride, pixel_stride, width, eps,
    POSITIONS: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.arange(0, TILE)
    row = tl.program_id(1).to(tl.int64)
    place = row * row_stride + channel * channel_stride
    first = tl.maximum(tl.load(inputs + place).to(tl.float32), 0.0)
    sums = tl.zeros((TILE, CHANNELS), tl.float32)
    squares = tl.zeros((TILE, CHANNELS), tl.float32)
    grad_sums = tl.zeros((TILE, CHANNELS), tl.float32)
    products = tl.zeros((TILE, CHANNELS), tl.float32)
    for start in range(0, POSITIONS, TILE):
        real = (start + at < POSITIONS)[:, None]
        here = place[None, :] + (start + at)[:, None] * pixel_stride
        x = tl.maximum(tl.load(inputs + here, mask=real, other=0.0).to(tl.float32), 0.0)
        grad = tl.load(grads + here, mask=real, other=0.0).to(tl.float32)
        x = tl.where(real, x - first[None, :], 0.0)
        sums += x
        squares += x * x
        grad_sums += grad
        products += grad * x
    mean, scale = _moments(
        first, tl.sum(sums, 0), tl.sum(squares, 0), eps, POSITIONS, CHANNELS, GROUP
    )
    total = tl.sum(grad_sums, 0)
    met = (tl.sum(products, 0) + (first - mean) * total) * scale  # with normalised activations
    tl.store(biases + row * width + channel, total)
    tl.store(weights + row * width + channel, met)
    size: tl.constexpr = POSITIONS * GROUP
    w = tl.load(weight + channel)
    level = _by_group(w * total, CHANNELS, GROUP) / size * scale
    slope = _by_group(w * met, CHANNELS, GROUP) / size * scale * scale
    w *= scale
    for start in range(0, POSITIONS, TILE):
        real = (start + at < POSITIONS)[:, None]
        here = place[None, :] + (start + at)[:, None] * pixel_stride
        x = tl.load(inputs + here, mask=real, other=0.0).to(tl.float32)
        grad = tl.load(grads + here, mask=real, other=0.0).to(tl.float32)
        out = grad * w[None, :] - level[None, :] - (x - mean[None, :]) * slope[None, :]
        out = tl.where(x > 0.0, out, 0.0)
        tl.store(found + here, out.to(found.dtype.element_ty), mask=real)


@triton.jit
def biased(outputs, bias, size, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Add each channel's bias, in place, where channels are neighbours."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    y = tl.load(outputs + at, mask=real).to(tl.float32) + tl.load(bias + at % CHANNELS)
    tl.store(outputs + at, y.to(outputs.dtype.element_ty), mask=real)


@triton.jit
def moments(
    grads, weight, found, examples, rows, width, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Σ g², Σ g and ⟨w, g⟩ over one row of the weight, for some examples."""
    row = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64) * EXAMPLES + tl.arange(0, EXAMPLES)
    real, place = example < examples, example * rows + row
    squares = tl.zeros((EXAMPLES, BLOCK), tl.float32)
    sums = tl.zeros((EXAMPLES, BLOCK), tl.float32)
    met = tl.zeros((EXAMPLES, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        w = tl.load(weight + row * width + at, mask=at < width, other=0.0)
        mask = real[:, None] & (at < width)[None, :]
        g = tl.load(grads + place[:, None] * width + at[None, :], mask=mask, other=0.0)
        g = g.to(tl.float32)
        squares += g * g
        sums += g
        met += g * w[None, :]
    tl.store(found + place * 3, tl.sum(squares, 1), mask=real)
    tl.store(found + place * 3 + 1, tl.sum(sums, 1), mask=real)
    tl.store(found + place * 3 + 2, tl.sum(met, 1), mask=real)
