"""Norms for Opacus's ghost clipping that are never too small.

Opacus computes the norms of a linear layer's gradients from Gram matrices in float32. Where the
gradients of an example's positions nearly cancel, rounding can make such a norm 0 while the
gradient is many times longer than the clip norm. These are bounds of it instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from corrnoise.torch.clipping import gram
from corrnoise.torch.clipping.parts import Norms, bound
from corrnoise.torch.clipping.products import squared_product
from corrnoise.torch.clipping.rounding import matmul_rounding

# For what Opacus rounds: the norm over up to 500 parameters in float32, and the clip factor.
_UP = 1.0 + 2.0**-16


def linear_norms(
    layer: nn.Linear, activations: list[Tensor], backprops: Tensor
) -> dict[Tensor, Tensor]:
    """Bounds of the norms of each example's gradients, for each trained parameter of the layer.

    They have the type of the gradients, so that other types than float32 can be told and refused.

    Args:
        layer: that was called.
        activations: its inputs, (examples, ..., columns).
        backprops: gradients of its outputs, (examples, ..., rows).
    """
    left = backprops.flatten(1, -2) if backprops.dim() > 2 else backprops[:, None]
    right = activations[0].to(left.dtype).reshape(*left.shape[:2], activations[0].shape[-1])
    found: dict[Tensor, Tensor] = {}
    if layer.weight.requires_grad:
        found[layer.weight] = _bound(left, right)
    bias: Any = layer.bias
    if bias is not None and bias.requires_grad:
        found[bias] = _bound(left, torch.ones_like(left[..., :1]))
    return found


def _bound(left: Tensor, right: Tensor) -> Tensor:
    """Of a sum of outer products that is made again for the sum, by torch: ``Norms.terms``."""
    positions, rounding = left.shape[1], matmul_rounding(left)
    if positions == 1:
        squares = squared_product(left[:, 0], right[:, 0])
        norms = Norms.of(squares, squares, rounding, 2)
    else:
        inner = gram.inner(left, right)
        norms = Norms(*gram.norms(left, right), rounding, 2 * positions, inner)
    return (bound([norms]) * _UP).to(left.dtype)
