# pyright: basic
"""Sums over examples, each with its factor."""

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
