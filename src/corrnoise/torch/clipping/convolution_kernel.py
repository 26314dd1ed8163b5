# pyright: basic
"""Squared norms of every example's gradient of a convolution's weight, which is never stored.

A program makes one tile of the gradient of one example and group (rows of the weight by channels,
at one or three neighbouring entries of the kernel), as a product over the positions of the output,
and adds up its squares. Where an example has several rows, its gradient is stored instead: that is
little beside what its rows need, and saves the product that adds the gradients up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _patch(right, y, x, channel, channels, real, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH) & real
    mask = (channel < channels)[:, None] & inside[None, :]
    return tl.load(right + (y * WIDTH + x)[None, :], mask=mask, other=0.0)


@triton.jit
def squares(  # noqa: D103
    grads, inputs, found, rows, channels, tiles,
    stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
    KERNEL_X: tl.constexpr, ENTRIES: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One dimension for both: a second one of a grid is too small for many groups.
    tile = tl.program_id(0) % tiles
    which = (tl.program_id(0) // tiles).to(tl.int64)  # example and group
    groups_of_taps: tl.constexpr = ENTRIES // TAPS
    entry = tile % groups_of_taps * TAPS
    across = tl.cdiv(channels, CHANNELS)
    row = (tile // groups_of_taps // across) * ROWS + tl.arange(0, ROWS)
    channel = (tile // groups_of_taps % across) * CHANNELS + tl.arange(0, CHANNELS)
    y_in = entry // KERNEL_X * dilation_y - pad_y
    x_in = entry % KERNEL_X * dilation_x - pad_x
    left = grads + which * rows * POSITIONS + row[:, None] * POSITIONS
    right = inputs + which * channels * (HEIGHT * WIDTH) + channel[:, None] * (HEIGHT * WIDTH)
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    third = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, POSITIONS, DEPTH):
        at = start + tl.arange(0, DEPTH)
        real = at < POSITIONS
        a = tl.load(left + at[None, :], mask=(row < rows)[:, None] & real[None, :], other=0.0)
        y = at // OUT_WIDTH * stride_y + y_in
        x = at % OUT_WIDTH * stride_x + x_in
        b = _patch(right, y, x, channel, channels, real, HEIGHT, WIDTH)
        first = tl.dot(a, tl.trans(b), first, input_precision=PRECISION)
        if TAPS == 3:
            b = _patch(right, y, x + dilation_x, channel, channels, real, HEIGHT, WIDTH)
            second = tl.dot(a, tl.trans(b), second, input_precision=PRECISION)
            b = _patch(right, y, x + 2 * dilation_x, channel, channels, real, HEIGHT, WIDTH)
            third = tl.dot(a, tl.trans(b), third, input_precision=PRECISION)
    total = first * first
    if TAPS == 3:
        total += second * second + third * third
    # A sum of at most 3·128 squares in float32 errs by less than 2⁻¹⁶, and is made larger by it.
    total = tl.sum(tl.sum(total, 1).to(tl.float64), 0) * (1.0 + 2.0**-16)
    tl.store(found + which * tiles + tile, total)


@triton.jit
def _pixels(right, y, x, view, row, pixel, channel, channels, real, HEIGHT, WIDTH):
    inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH) & real
    place = (view * row + (y * WIDTH + x) * pixel)[:, None]
    return tl.load(right + place, mask=inside[:, None] & (channel < channels)[None, :], other=0.0)


@triton.jit
def gradients(  # noqa: D103
    grads, inputs, found, views, rows, channels, groups, tiles,
    grads_row, grads_channel, grads_pixel, inputs_row, inputs_channel, inputs_pixel,
    stride_y, stride_x, pad_y, pad_x, dilation_y, dilation_x,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
    KERNEL_X: tl.constexpr, ENTRIES: tl.constexpr, TAPS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # One dimension for both: a second one of a grid is too small for many groups.
    tile = tl.program_id(0) % tiles
    which = (tl.program_id(0) // tiles).to(tl.int64)  # example and group
    example, group = which // groups, which % groups
    groups_of_taps: tl.constexpr = ENTRIES // TAPS
    entry = tile % groups_of_taps * TAPS
    across = tl.cdiv(channels, CHANNELS)
    row = (tile // groups_of_taps // across) * ROWS + tl.arange(0, ROWS)
    channel = (tile // groups_of_taps % across) * CHANNELS + tl.arange(0, CHANNELS)
    y_in = entry // KERNEL_X * dilation_y - pad_y
    x_in = entry % KERNEL_X * dilation_x - pad_x
    left = grads + example * views * grads_row + group * rows * grads_channel
    left += row[:, None] * grads_channel
    right = inputs + example * views * inputs_row + group * channels * inputs_channel
    right += channel[None, :] * inputs_channel
    first = tl.zeros((ROWS, CHANNELS), tl.float32)
    second = tl.zeros((ROWS, CHANNELS), tl.float32)
    third = tl.zeros((ROWS, CHANNELS), tl.float32)
    for start in range(0, views * POSITIONS, DEPTH):
        place = start + tl.arange(0, DEPTH)
        real = place < views * POSITIONS
        view, at = place // POSITIONS, place % POSITIONS
        a = tl.load(
            left + (view * grads_row + at * grads_pixel)[None, :],
            mask=(row < rows)[:, None] & real[None, :],
            other=0.0,
        )
        y = at // OUT_WIDTH * stride_y + y_in
        x = at % OUT_WIDTH * stride_x + x_in
        b = _pixels(
            right, y, x, view, inputs_row, inputs_pixel, channel, channels, real, HEIGHT, WIDTH
        )
        first = tl.dot(a, b, first, input_precision=PRECISION)
        if TAPS == 3:
            x += dilation_x
            b = _pixels(
                right, y, x, view, inputs_row, inputs_pixel, channel, channels, real, HEIGHT, WIDTH
            )
            second = tl.dot(a, b, second, input_precision=PRECISION)
            x += dilation_x
            b = _pixels(
                right, y, x, view, inputs_row, inputs_pixel, channel, channels, real, HEIGHT, WIDTH
            )
            third = tl.dot(a, b, third, input_precision=PRECISION)
    out = found + ((which * rows + row)[:, None] * ENTRIES + entry) * channels + channel[None, :]
    mask = (row < rows)[:, None] & (channel < channels)[None, :]
    tl.store(out, first.to(found.dtype.element_ty), mask=mask)
    if TAPS == 3:
        tl.store(out + channels, second.to(found.dtype.element_ty), mask=mask)
        tl.store(out + 2 * channels, third.to(found.dtype.element_ty), mask=mask)
