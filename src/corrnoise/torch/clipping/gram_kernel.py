# pyright: basic
"""The kernel of ``gram``: a program makes one tile of both Gram matrices of one example."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(
    base, stride, low, other, positions, width,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = (low + tl.arange(0, TILE)).to(tl.int64)
    second = (other + tl.arange(0, TILE)).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    products = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, width, DEPTH):
        inside = (start + depth)[None, :] < width
        a = tl.load(
            base + first[:, None] * stride + (start + depth)[None, :],
            mask=inside & (first < positions)[:, None], other=0.0,
        )  # fmt: skip
        b = tl.load(
            base + second[:, None] * stride + (start + depth)[None, :],
            mask=inside & (second < positions)[:, None], other=0.0,
        )  # fmt: skip
        products = tl.dot(a, tl.trans(b), products, input_precision=PRECISION)
    return products


@triton.jit
def gram(  # noqa: D103
    left, right, squares, spread, positions, rows, columns,
    left_example, left_position, right_example, right_position, pairs, left_lift, right_lift,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    # The pair (i, j) with j ≤ i of a triangle, counted row by row.
    i = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    j = pair - i * (i + 1) // 2
    low, other = i * TILE, j * TILE
    lefts = _tile(
        left + example * left_example, left_position, low, other, positions, rows,
        TILE, DEPTH, PRECISION,
    )  # fmt: skip
    rights = _tile(
        right + example * right_example, right_position, low, other, positions, columns,
        TILE, DEPTH, PRECISION,
    )  # fmt: skip
    rank = tl.arange(0, TILE)
    diagonal = (rank[:, None] == rank[None, :]) & (i == j)
    lefts = tl.where(diagonal, lefts + left_lift, lefts)
    rights = tl.where(diagonal, rights + right_lift, rights)
    met = lefts * rights
    total = tl.sum(tl.sum(met, 1), 0)
    at = example * pairs + pair
    if i == j:
        lengths = tl.sqrt(tl.maximum(tl.sum(tl.where(diagonal, met, 0.0), 1), 0.0))
        length = tl.sum(lengths, 0)
        tl.store(spread + at, length * length if SQUARED else length)
    else:
        total *= 2.0
    tl.store(squares + at, total)
