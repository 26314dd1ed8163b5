"""ReLU followed by GroupNorm in one kernel, its backward pass with every row's sums in another.

A program holds some channels of one row, all their positions, in registers: the input is read once.
Strides are arguments, so that both layouts of pictures are served. Two more kernels do what torch
needs more readings for: they add a convolution's bias in place, and tell all that clipping needs to
know of the gradients of its weight.
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
def _normalised(x, real, eps, SIZE: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr):
    mean = _by_group(tl.sum(x, 0), CHANNELS, GROUP) / SIZE
    centred = tl.where(real, x - mean[None, :], 0.0)
    variance = _by_group(tl.sum(centred * centred, 0), CHANNELS, GROUP) / SIZE
    scale = 1.0 / tl.sqrt(variance + eps)
    return centred * scale[None, :], scale


@triton.jit
def forward(
    inputs, outputs, weight, bias, row_stride, channel_stride, pixel_stride, eps,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.arange(0, BLOCK)
    place = tl.program_id(1).to(tl.int64) * row_stride
    place += at[:, None] * pixel_stride + channel[None, :] * channel_stride
    real = (at < POSITIONS)[:, None]
    x = tl.load(inputs + place, mask=real, other=0.0).to(tl.float32)
    plain, _ = _normalised(tl.maximum(x, 0.0), real, eps, POSITIONS * GROUP, CHANNELS, GROUP)
    y = plain * tl.load(weight + channel)[None, :] + tl.load(bias + channel)[None, :]
    tl.store(outputs + place, y.to(outputs.dtype.element_ty), mask=real)


@triton.jit
def backward(
    inputs, grads, found, weight, weights, biases,
    row_stride, channel_stride, pixel_stride, width, eps,
    POSITIONS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    at = tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    place = row * row_stride + at[:, None] * pixel_stride + channel[None, :] * channel_stride
    real = (at < POSITIONS)[:, None]
    x = tl.load(inputs + place, mask=real, other=0.0).to(tl.float32)
    grad = tl.load(grads + place, mask=real, other=0.0).to(tl.float32)
    size: tl.constexpr = POSITIONS * GROUP
    plain, scale = _normalised(tl.maximum(x, 0.0), real, eps, size, CHANNELS, GROUP)
    w = tl.load(weight + channel)
    sums, met = tl.sum(grad, 0), tl.sum(grad * plain, 0)
    tl.store(biases + row * width + channel, sums)
    tl.store(weights + row * width + channel, met)
    mean = _by_group(w * sums, CHANNELS, GROUP) / size
    slope = _by_group(w * met, CHANNELS, GROUP) / size
    out = (grad * w[None, :] - mean[None, :] - plain * slope[None, :]) * scale[None, :]
    out = tl.where(x > 0.0, out, 0.0)
    tl.store(found + place, out.to(found.dtype.element_ty), mask=real)


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
        squares += g * g
        sums += g
        met += g * w[None, :]
    tl.store(found + place * 3, tl.sum(squares, 1), mask=real)
    tl.store(found + place * 3 + 1, tl.sum(sums, 1), mask=real)
    tl.store(found + place * 3 + 2, tl.sum(met, 1), mask=real)
