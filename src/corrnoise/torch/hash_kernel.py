# pyright: basic
"""The row sums of ``fingerprint.PositionHash`` on a CUDA device, in one pass over the tensor."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _row_sums(bits, columns, sums, size, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row: Σ_c bits[c]·columns[c], products mod 2^32, their sum in 64 bits."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, ROW, BLOCK):
        place = row * ROW + start + offsets
        found = tl.load(bits + place, mask=place < size, other=0).to(tl.int32)
        factor = tl.load(columns + start + offsets)
        total += (found * factor).to(tl.int64)
    tl.store(sums + row, tl.sum(total, axis=0))


def row_sums(bits: torch.Tensor, columns: torch.Tensor) -> Any:
    """The sums of all rows of a flat tensor of 16- or 32-bit integers, the last one padded."""
    width = columns.numel()
    rows = -(-bits.numel() // width)
    sums = torch.empty(rows, dtype=torch.int64, device=bits.device)
    launch: Any = _row_sums[(rows,)]
    launch(bits, columns, sums, bits.numel(), ROW=width, BLOCK=_BLOCK)
    return sums
