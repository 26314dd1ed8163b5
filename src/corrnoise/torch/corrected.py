"""Gradients of single examples where those of Opacus's hooks are not the gradients of torch.

Each is a function of a layer, its inputs and the gradients of its output, as Opacus asks for; most
are made from Opacus's own, which they call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Sampler = Callable[[Any, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


def convolution(theirs: Sampler) -> Sampler:
    """Of a convolution with any ``padding_mode``: Opacus takes all for zeros."""

    def gradients(layer: Any, inputs: list[Tensor], grads: Tensor) -> dict[nn.Parameter, Tensor]:
        if layer.padding_mode != "zeros" and len(inputs[0]):
            around = layer._reversed_padding_repeated_twice
            inputs = [nn.functional.pad(inputs[0], around, mode=layer.padding_mode)]
            layer = copy.copy(layer)
            layer.padding = (0,) * len(layer.kernel_size)
        return theirs(layer, inputs, grads)

    return gradients


def embedding(theirs: Sampler) -> Sampler:
    """Of an embedding without the row for padding, which torch does not train."""

    def gradients(layer: Any, inputs: list[Tensor], grads: Tensor) -> dict[nn.Parameter, Tensor]:
        found = theirs(layer, inputs, grads)
        if layer.padding_idx is not None and layer.weight in found:
            found[layer.weight][:, layer.padding_idx] = 0.0
        return found

    return gradients


def layer_norm(theirs: Sampler) -> Sampler:
    """Of a LayerNorm that may have no bias."""

    def gradients(layer: Any, inputs: list[Tensor], grads: Tensor) -> dict[nn.Parameter, Tensor]:
        if layer.bias is None:
            layer = SimpleNamespace(
                weight=layer.weight,
                bias=layer.weight.detach(),  # a constant, so that it gets no gradient
                normalized_shape=layer.normalized_shape,
                eps=layer.eps,
            )
        return theirs(layer, inputs, grads)

    return gradients


def bags(layer: Any, inputs: list[Tensor], grads: Tensor) -> dict[nn.Parameter, Tensor]:
    """Of bags with a row for each: Opacus counts a row that a bag has twice once."""
    index, *rest = inputs
    options = layer.include_last_offset or layer.padding_idx is not None
    if options or layer.mode == "max" or rest[1:]:
        raise ValueError(
            "an EmbeddingBag must have no mode='max', include_last_offset, padding_idx or "
            "per_sample_weights in Opacus's modes, which do not know them: take "
            "grad_sample_mode='one_pass', with a row of indices for each example: nothing was "
            "released"
        )
    count = len(grads)
    if index.dim() == 2:
        sizes = torch.full((count,), index.shape[1], device=index.device)
    else:
        sizes = torch.diff(rest[0], append=rest[0].new_full((1,), len(index)))
    rows = torch.arange(count, device=index.device).repeat_interleave(sizes)
    if layer.mode == "mean":
        grads = grads / sizes.clamp_min(1)[:, None]
    table = grads.new_zeros(count, *layer.weight.shape)
    return {layer.weight: table.index_put_((rows, index.flatten()), grads[rows], accumulate=True)}
