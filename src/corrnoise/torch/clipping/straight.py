"""Gradients of instance normalisation in the layout that torch's backward pass can read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corrnoise.torch.clipping.hook import Hook

_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.contiguous()


def straighten(model: nn.Module) -> list[RemovableHandle]:
    """Let instance normalisation get its gradients row by row.

    It looks at all examples as channels of one, and torch 2.13 reads gradients whose examples lie
    behind positions in memory, as before recurrent layers, in another order than they have: those
    of one example would be computed from those of others.
    """

    def after(_: nn.Module, args: Any, output: Tensor) -> Any:
        return _Straight.apply(output) if output.requires_grad else output

    hook = Hook(after)
    parts = [part for part in model.modules() if isinstance(part, _INSTANCE)]
    return [part.register_forward_hook(hook) for part in parts]
