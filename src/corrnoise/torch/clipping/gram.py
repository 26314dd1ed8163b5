"""Norms of sums of outer products by Gram matrices: Σ_{t,s} (l_t·l_s)(r_t·r_s).

On a GPU one kernel makes both Gram matrices tile by tile, multiplies them where they are, and never
stores them; both are symmetric, so that half of the tiles is enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from corrnoise._extras import has_triton
from corrnoise.torch.clipping.products import BLOCK, precision, wide_product

TILE = 128


def pays(positions: int, rows: int, columns: int, left: Tensor) -> bool:
    """Whether Gram matrices are cheaper than the gradients themselves."""
    halved = 0.5 if left.is_cuda and positions > TILE else 1.0
    return halved * positions * (rows + columns) < rows * columns


def inner(left: Tensor, right: Tensor) -> int:
    """How many additions in float32 an entry of one matrix times one of the other takes, at most.

    The kernel adds all rows and columns up in float32, and the entries of a tile.
    """
    return left.shape[2] + right.shape[2] + 2 * TILE if _fits(left) else 2 * BLOCK


def norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """What adds up to Σ_{t,s} (l_t·l_s)(r_t·r_s), and to the square of Σ_t ‖l_t‖·‖r_t‖.

    Both have a row for each example.

    Args:
        left: (examples, positions, rows).
        right: (examples, positions, columns), of the same type.
    """
    if _fits(left):
        return _fused(left, right)
    lefts, rights = (wide_product(each, each.transpose(1, 2)) for each in (left, right))
    for each, matrix in ((left, lefts), (right, rights)):
        matrix.diagonal(dim1=1, dim2=2).add_(_lift(each))
    squares = torch.linalg.vecdot(lefts.flatten(1), rights.flatten(1)).float()
    diagonals = lefts.diagonal(dim1=1, dim2=2) * rights.diagonal(dim1=1, dim2=2)
    lengths = diagonals.clamp_min(0.0).sqrt().sum(1, keepdim=True)
    return squares[:, None], lengths.square().float()


def _fits(left: Tensor) -> bool:
    """Whether the kernel makes them."""
    return left.is_cuda and left.shape[1] >= 32 and has_triton()


def _lift(factor: Tensor) -> float:
    """What is added to the diagonal of a Gram matrix, for products that are lost below 2⁻¹²⁶.

    They change an entry by at most 2⁻¹²⁶ for each element of a row, and the other matrix may be
    large: with T on the diagonal, T·Σ_t ‖r_t‖² is at least (Σ_t ‖r_t‖)². Twice that is for what
    else is multiplied by such entries.
    """
    return 2.0**-125 * factor.shape[1] * factor.shape[2]


def _fused(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    from corrnoise.torch.clipping.gram_kernel import gram

    examples, positions, rows = left.shape
    columns = right.shape[2]
    left, right = _rowwise(left), _rowwise(right)
    tiles = -(-positions // TILE)
    pairs = tiles * (tiles + 1) // 2
    squares = torch.empty(examples, pairs, device=left.device, dtype=torch.float32)
    one = pairs == 1
    make = torch.empty if one else torch.zeros
    spread = make(examples, pairs, device=left.device, dtype=torch.float32)
    kernel: Any = gram
    wide = left.dtype == torch.float32
    exact = wide and precision() == "highest"
    with torch.cuda.device(left.device):
        kernel[(pairs, examples)](
            left, right, squares, spread, positions, rows, columns,
            left.stride(0), left.stride(1), right.stride(0), right.stride(1), pairs,
            _lift(left), _lift(right),
            TILE=TILE, DEPTH=32 if wide else 64, PRECISION="ieee" if exact else "tf32",
            SQUARED=one, num_warps=8, num_stages=3,
        )  # fmt: skip
    return squares, spread if one else spread.sum(1, keepdim=True).square()


def _rowwise(factor: Tensor) -> Tensor:
    return factor if factor.stride(2) == 1 else factor.contiguous()
