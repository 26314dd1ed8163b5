"""Examples whose gradients are not finite: such an example counts as zero.

Clipping is any map of a gradient into the ball of radius C, and a proof uses nothing else of it. So
a gradient that is NaN or infinite, or whose norm overflows, may be mapped to 0: the guarantee holds
for every input, and whether there was such an example stays hidden in the noise. An exception in
its place would tell.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor


def finite_rows(grads: Sequence[Tensor]) -> Tensor:
    """Whether the gradient of each example has a finite norm, in float32 or wider.

    Args:
        grads: of single examples, (examples, ...) for each parameter.
    """
    device = grads[0].device
    norms: list[Tensor] = []
    for grad in grads:
        wide = torch.float32 if grad.element_size() < 4 else grad.dtype
        rows = grad.detach().reshape(len(grad), -1) if len(grad) else grad.new_empty(0, 1)
        norms.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide).to(device))
    return torch.linalg.vector_norm(torch.stack(norms), dim=0).isfinite()


def looks_free(tensor: Tensor) -> bool:
    """Whether reading a tensor's values waits for nothing: on a GPU it would wait for all work."""
    return tensor.device.type == "cpu"


def without(tensor: Tensor, rows: Tensor) -> Tensor:
    """The tensor with zeros for some of its examples, exactly: 0·NaN would be NaN.

    Args:
        tensor: (examples, ...).
        rows: whether an example is to be zero.
    """
    return tensor.masked_fill(_beside(rows, tensor), 0.0)


def clear_(tensor: Tensor, rows: Tensor) -> Tensor:
    """As ``without``, in place where no two elements share memory.

    Gradients of single examples are the largest thing in memory, and there should not be two.
    """
    if not tensor.is_contiguous():
        return without(tensor, rows)
    with torch.no_grad():
        return tensor.masked_fill_(_beside(rows, tensor), 0.0)


def announce(count: int, examples: int, step: int) -> None:
    """Tell the operator that examples count as zero, and what to do."""
    warnings.warn(
        f"{count} of the {examples} examples of step {step} have gradients that are not finite, "
        "and count as zero; the guarantee holds. If it is most of them, the model has diverged: "
        "lower the learning rate or the clip norm; if it is a few, look at the data. This is said "
        "once in a run. The number is not private: it is for looking at, not for publishing",
        stacklevel=2,
    )


def _beside(rows: Tensor, tensor: Tensor) -> Tensor:
    return rows.to(tensor.device).view(-1, *[1] * (tensor.dim() - 1))
