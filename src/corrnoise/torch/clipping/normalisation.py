"""Gradients of the scales and biases of normalisations, for each example."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from corrnoise._extras import has_triton


@functools.cache
def default_eps(kind: torch.dtype) -> float:
    """What ``rms_norm`` adds of itself: ε of the type, or in later versions of float32."""
    candidates = (torch.finfo(kind).eps, torch.finfo(torch.float32).eps)
    small = torch.full((1,), 2.0**-13, dtype=kind)
    found = functional.rms_norm(small, (1,)).item()
    return min(candidates, key=lambda eps: abs(found - 2.0**-13 / math.sqrt(2.0**-26 + eps)))


def rows(
    inputs: Tensor, grads: Tensor, shape: tuple[int, ...], eps: float, *, centred: bool
) -> tuple[Tensor, Tensor]:
    """Σ g·x̂ and Σ g over the positions of each example, for LayerNorm or, not centred, RMSNorm.

    Args:
        inputs: of the layer.
        grads: of its outputs.
        shape: that is normalised.
        eps: of the layer.
        centred: whether the mean is taken off.
    """
    examples = len(grads)
    if _fits(inputs) and math.prod(shape) <= 8192:
        found = _fused_rows(inputs, grads, shape, eps, centred)
    else:
        wide = inputs.float()
        if centred:
            plain = functional.layer_norm(wide, shape, eps=eps)
        else:
            plain = functional.rms_norm(wide, shape, eps=eps)
        between = math.prod(grads.shape[1 : grads.dim() - len(shape)])
        grad = grads.reshape(examples, between, *shape)
        met = grad.float() * plain.reshape(grad.shape)
        found = met.sum(1), grad.sum(1, dtype=torch.float32)
    return found[0].view(examples, *shape), found[1].view(examples, *shape)


def channels(inputs: Tensor, grads: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Σ g·x̂ and Σ g over the positions of each example and channel, for GroupNorm.

    Args:
        inputs: of the layer, (examples, channels, ...).
        grads: of its outputs.
        groups: of channels that are normalised together.
        eps: of the layer.
    """
    inputs, grads = (each[..., None].flatten(2) for each in (inputs, grads))  # perhaps one position
    if _fits(inputs):
        return _fused_channels(inputs, grads, groups, eps)
    plain = functional.group_norm(inputs.float(), groups, eps=eps)
    return torch.linalg.vecdot(grads.float(), plain), grads.sum(2, dtype=torch.float32)


def _fused_rows(
    inputs: Tensor, grads: Tensor, shape: tuple[int, ...], eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    from corrnoise.torch.clipping.norm_kernel import row_sums

    examples = len(grads)
    size = math.prod(shape)
    inputs, grads = inputs.contiguous(), grads.contiguous()
    positions = grads.numel() // (examples * size)
    parts = max(1, min(-(-positions // 4), -(-512 // examples)))  # a few programs for each unit
    chunk = -(-positions // parts)
    found = grads.new_empty(2, examples, parts, size, dtype=torch.float32)
    block = 1 << (size - 1).bit_length()
    kernel: Any = row_sums
    with torch.cuda.device(grads.device):
        kernel[(parts, examples)](
            inputs, grads, found[0], found[1], positions, size, chunk, eps,
            CENTRED=centred, BLOCK=block, TILE=max(1, 2048 // block), num_warps=8,
        )  # fmt: skip
    return tuple(found.sum(2))  # type: ignore[return-value]


def _fused_channels(
    inputs: Tensor, grads: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    from corrnoise.torch.clipping.norm_kernel import channel_sums

    inputs, grads = inputs.contiguous(), grads.contiguous()
    examples, width, size = inputs.shape
    count = examples * width
    found = grads.new_empty(4, examples, groups, width // groups, dtype=torch.float32)
    kernel: Any = channel_sums
    with torch.cuda.device(grads.device):
        kernel[(count,)](
            inputs, grads, found, size, count,
            BLOCK=min(1024, 1 << (size - 1).bit_length()), num_warps=2,
        )  # fmt: skip
    means, squares, biases, met = found
    # The mean and variance of a group from those of its channels.
    mean = means.mean(2, keepdim=True)
    off = means - mean
    variance = (squares + size * off.square()).mean(2, keepdim=True) / size
    scales = (met + off * biases) * torch.rsqrt(variance + eps)
    return scales.view(examples, width), biases.view(examples, width)


def _fits(inputs: Tensor) -> bool:
    return inputs.is_cuda and inputs.numel() > 0 and has_triton()
