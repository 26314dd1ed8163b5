"""Sums of clipped gradients without rounding, for secure mode.

The gradient of each example is clipped, and each of its entries is rounded toward zero to a
multiple of a public grid g, a power of two in (2⁻³¹C, 2⁻³⁰C]. No norm grows by that. Sums of at
most 2²² such gradients are multiples of g below 2⁵³g, so that float64 adds them without any
rounding, in every order: micro-batches, devices and kernels make no difference.

``noise.exact`` releases these sums; ``docs/proofs/floating-point.md`` has the theorem.
"""

from __future__ import annotations

import math

import torch

from corrnoise.torch.precision import rows_at_a_time

MOST_EXAMPLES = 1 << 22  # of one sum: each adds less than 2^31 units to an entry

_GRID_BITS = 30


def grid(clip_norm: float) -> float:
    """The largest power of two that is at most 2⁻³⁰ of the clip norm.

    >>> grid(1.0) == 2.0**-30, grid(1.99) == 2.0**-30
    (True, True)
    """
    return math.ldexp(1.0, math.frexp(clip_norm)[1] - 1 - _GRID_BITS)


def grid_sum(grad: torch.Tensor, factors: torch.Tensor, unit: float) -> torch.Tensor:
    """Σ a·g over the examples, each entry of a·g rounded toward zero to a multiple of the grid.

    Exact in float64 for at most ``MOST_EXAMPLES`` examples, each of at most 2^31 units.

    Args:
        grad: of single examples, (examples, ...) for one parameter.
        factors: a for each example, in float64.
        unit: of the grid.
    """
    total = torch.zeros(grad.shape[1:].numel(), dtype=torch.float64, device=grad.device)
    start = 0
    for rows in rows_at_a_time(grad):
        some = factors[start : start + len(rows)].to(grad.device) / unit
        total += (rows.double() * some[:, None]).trunc_().sum(dim=0)
        start += len(rows)
    return total.mul_(unit).view(grad.shape[1:])
