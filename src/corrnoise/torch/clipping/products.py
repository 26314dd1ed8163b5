"""Products of matrices as clipping makes them: in which precision, and what that rounds away."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

_UNITS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}


def squared(rows: Tensor) -> Tensor:
    """Squared norms of rows, in float32."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).square()


def product(left: Tensor, right: Tensor) -> Tensor:
    """A product of matrices whose sums and result are float32, whatever the factors are."""
    if left.dtype == right.dtype == torch.float32:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype:
        if left.dim() == 2:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def unit(factor: Tensor, *, tf32: bool) -> float:
    """What the factors of a product are rounded by, at most, between the norm and the sum.

    Both factors are cut to the bits of the matrix unit, and the clip factor times one of them is
    cut once more.
    """
    if not factor.is_cuda:  # products are made in float32 there
        return _UNITS[torch.float32]
    if factor.dtype == torch.float32 and tf32:
        return 2.0**-9
    return _UNITS[factor.dtype]


def matmul_unit(factor: Tensor) -> float:
    """The unit of matrix products."""
    return unit(factor, tf32=bool(torch.backends.cuda.matmul.allow_tf32))


@contextlib.contextmanager
def full_precision() -> Generator[None]:
    """A context in which products of float32 matrices are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
