# pyright: basic
"""Sums over examples, each with its factor, and the squared norm of each example."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weighted(
    factors, rows, found, count, share, width, EXAMPLES: tl.constexpr, BLOCK: tl.constexpr
):
    """Some columns of the sum over one share of the examples, some at a time."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    total = tl.zeros((EXAMPLES, BLOCK), tl.float32)
    for start in range(0, share, EXAMPLES):
        example = part * share + start + tl.arange(0, EXAMPLES)
        real = example < count
        factor = tl.load(factors + example, mask=real, other=0.0)
        place = example.to(tl.int64)[:, None] * width + at[None, :]
        mask = real[:, None] & (at < width)[None, :]
        total += tl.load(rows + place, mask=mask, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(found + part.to(tl.int64) * width + at, tl.sum(total, 0), mask=at < width)


@triton.jit
def squares(rows, found, width, share, up, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    """The squares of one share of a row, some at a time in float32, and their sums in float64."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, share, TERMS * BLOCK):
        some = tl.zeros((BLOCK,), tl.float32)
        for term in tl.static_range(TERMS):
            at = part * share + start + term * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(rows + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            some += x * x
        total += some.to(tl.float64)
    tl.store(found + row * tl.num_programs(1) + part, tl.sum(total, 0) * up)
