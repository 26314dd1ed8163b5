"""The specification of clipping: one example after another, as its definition says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def clipped_sums(
    loss: Callable[[int], Tensor],
    params: Sequence[nn.Parameter],
    num_examples: int,
    clip_norm: float,
) -> list[Tensor]:
    """Sums of clipped gradients.

    Args:
        loss: of one example, by its index.
        params: what the gradients are of.
        num_examples: in the batch.
        clip_norm: C.
    """
    sums = [torch.zeros_like(param) for param in params]
    for i in range(num_examples):
        grads: Any = torch.autograd.grad(loss(i), params, allow_unused=True)
        found = [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, params, strict=True)
        ]
        norm = torch.stack([g.double().square().sum() for g in found]).sum().sqrt()
        factor = float(clip_norm / norm.clamp_min(clip_norm))
        for total, g in zip(sums, found, strict=True):
            total += factor * g
    return sums
