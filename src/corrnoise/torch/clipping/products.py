"""Products and sums of matrices as clipping makes them, and in which precision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

from corrnoise._extras import has_triton

_ADDED = 16  # squares that are added in float32
BLOCK = 128  # products that are added in float32 for norms
_UP = 1.0 + 2.0**-19  # for the rounding of their sums

T = TypeVar("T")


def squared(rows: Tensor) -> Tensor:
    """At least the squared norm of each row, which may have several dimensions, in float32.

    A float32 sum over a long row can miss a share of 10⁻³ of it, by how it rounds. So 16 squares at
    a time are added in float32, in any order, and their sums in float64. What is returned is above
    the truth by at most a share of 2⁻¹⁸.
    """
    flat = _in_memory_order(rows)[0].flatten(1)
    if rows.is_cuda and rows.numel() and has_triton():
        return launch_squares(flat)
    count = flat.shape[1] // _ADDED * _ADDED
    blocks, rest = flat[:, :count].unflatten(1, (-1, _ADDED)), flat[:, count:]
    norms = torch.linalg.vector_norm(blocks, dim=2, dtype=torch.float32)
    if rest.shape[1]:
        last = torch.linalg.vector_norm(rest, dim=1, keepdim=True, dtype=torch.float32)
        norms = torch.cat([norms, last], 1)
    norm = torch.linalg.vector_norm(norms, dim=1, dtype=torch.float64)
    return (norm.square() * _UP).float()


def squared_product(left: Tensor, right: Tensor) -> Tensor:
    """At least the product of the squared norms of each row of both, in float64.

    Squares below 2⁻¹²⁶ are lost in float32, and the other factor may be long.
    """
    lengths = [
        squared(rows).double() + 2.0**-126 * math.prod(rows.shape[1:]) for rows in (left, right)
    ]
    return lengths[0] * lengths[1]


def launch_squares(rows: Tensor) -> Tensor:
    """``squared`` of the rows of a matrix by one kernel."""
    from corrnoise.torch.clipping.sum_kernel import squares

    count, width = rows.shape
    block = 1024
    terms = min(_ADDED, 1 << (-(-width // block) - 1).bit_length())
    # Programs for all of a GPU, each with enough of a row to be worth a sum of its own.
    parts = max(1, min(2048 // count, width // (terms * block)))
    share = -(-width // (parts * terms * block)) * terms * block
    dtype = torch.float32 if parts == 1 else torch.float64
    found = rows.new_empty(count, parts, dtype=dtype)
    kernel: Any = squares
    with torch.cuda.device(rows.device):
        kernel[(count, parts)](
            rows.contiguous(), found, width, share, _UP, TERMS=terms, BLOCK=block, num_warps=4
        )
    return found[:, 0] if parts == 1 else found.sum(1).float()


def _in_memory_order(rows: Tensor) -> tuple[Tensor, list[int]]:
    """Rows of several dimensions, with these in the order of the memory, and that order."""
    order = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)
    return rows.permute(0, *order), order


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices for norms, whose sums of ``BLOCK`` products are added up in float64.

    One sum in float32 of thousands of equal numbers can miss a share of 10⁻⁵.

    Args:
        left: (examples, rows, width).
        right: (examples, width, columns).
    """
    shape = (*left.shape[:2], right.shape[2])
    found = torch.zeros(shape, dtype=torch.float64, device=left.device)
    for start in range(0, left.shape[2], BLOCK):
        some = slice(start, start + BLOCK)
        found += product(left[:, :, some], right[:, some])
    return found


def product(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices whose sums and result are float32, whatever the factors are."""
    if left.dtype == right.dtype == torch.float32:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype:
        if left.dim() == 2:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.bmm(left, right, out_dtype=torch.float32)
    # TF32 has all bits of float16, and the range of float32.
    half = left.is_cuda and torch.float16 in (left.dtype, right.dtype)
    with _in_precision("high") if half else contextlib.nullcontext():
        return left.float() @ right.float()


def scaled(tensor: Tensor, factors: Tensor) -> Tensor:
    """Every example's row with its factor, in the tensor's type.

    Products are made in float32 and rounded once, in bfloat16 by a share of 2⁻⁸ at most. float16 is
    for the caller to widen: an element is often so small a part of a clipped gradient that float16
    has few bits of it, or none.

    Args:
        tensor: (examples, ...), in float32 or bfloat16.
        factors: a number for each example, in float32.
    """
    rows = factors.view(-1, *[1] * (tensor.dim() - 1))
    return torch.mul(tensor, rows, out=torch.empty_like(tensor))


def weighted_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """The sum over examples, each with its factor, in float32: no factor of a product is rounded.

    Args:
        factors: a number for each example, in float32.
        rows: (examples, ...), in float32, bfloat16 or float16.
    """
    dense, order = _in_memory_order(rows)
    flat = dense.flatten(1)
    if rows.dtype == torch.bfloat16 and rows.is_cuda and rows.numel() and has_triton():
        found = launch_sum(factors, flat)
    else:
        with full_precision():
            found = factors @ flat.float()
    return found.view(dense.shape[1:]).permute([order.index(i) for i in range(1, rows.dim())])


def launch_sum(factors: Tensor, rows: Tensor) -> Tensor:
    """The sum over the rows of a matrix by a kernel, which reads them as they are."""
    from corrnoise.torch.clipping.sum_kernel import weighted

    count, width = rows.shape
    block, some = 512, 8
    # Programs for all of a GPU, each with examples enough to be worth a sum of its own.
    parts = max(1, min(count // (4 * some), -(-2048 * block // width)))
    share = -(-count // (parts * some)) * some
    found = rows.new_empty(parts, width, dtype=torch.float32)
    kernel: Any = weighted
    with torch.cuda.device(rows.device):
        kernel[(-(-width // block), parts)](
            factors.contiguous(), rows.contiguous(), found, count, share, width,
            EXAMPLES=some, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return found.sum(0)


def precision() -> str:
    """In which products of float32 matrices are made: "highest", "high" or "medium".

    Raises:
        ValueError: the backends have settings of their own, which torch cannot sum up.
    """
    return _setting(
        torch.get_float32_matmul_precision,
        "the precision of matrix products must be set by torch.set_float32_matmul_precision",
    )


def cudnn_rounds() -> bool:
    """Whether convolutions on a GPU may be made in TF32."""
    return _setting(
        lambda: bool(torch.backends.cudnn.allow_tf32),
        "the precision of convolutions must be set by torch.backends.cudnn.allow_tf32",
    )


@contextlib.contextmanager
def full_precision() -> Generator[None]:
    """A context in which products of float32 matrices are made in float32."""
    with _in_precision("highest"):
        yield


@contextlib.contextmanager
def _in_precision(name: str) -> Generator[None]:
    before = precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _setting(read: Callable[[], T], rule: str) -> T:
    try:
        return read()
    except RuntimeError:  # torch's own words for settings that contradict each other
        raise ValueError(
            f"{rule}, got fp32_precision of one backend, which is not the others'; rounding must "
            "be known to count it: set it there alone. Nothing was released"
        ) from None
