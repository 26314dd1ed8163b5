"""ReLU and then GroupNorm as one layer, with a handler that clips it in one pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corrnoise._extras import has_triton
from corrnoise.torch.clipping import handlers, normalisation
from corrnoise.torch.clipping.convolution import strides
from corrnoise.torch.clipping.parts import Direct, Part


class ReluNorm(nn.GroupNorm):
    """ReLU, then GroupNorm; on a GPU by one kernel each way, in the input's type.

    Attributes:
        fused: whether the kernels are used where they can be.
    """

    fused = True

    def __init__(self, width: int, groups: int = 16) -> None:
        super().__init__(groups, width)
        self.kept: tuple[Tensor, Tensor] | None = None  # a gradient of the output, of the input

    def fits(self, x: Tensor) -> bool:
        group = self.num_channels // self.num_groups
        powers = group & (group - 1) == 0 and self.num_channels % max(16, group) == 0
        return self.fused and x.is_cuda and has_triton() and powers

    def forward(self, x: Tensor) -> Tensor:
        if self.fits(x):
            return _Fused.apply(x, self, self.weight.detach())  # type: ignore[return-value]
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.group_norm(functional.relu(x), self.num_groups, weight, bias, self.eps)

    def launch(self, x: Tensor) -> tuple[Any, dict[str, Any]]:
        """The grid of the kernels and what both of them are told."""
        positions, group = x[0, 0].numel(), self.num_channels // self.num_groups
        # Measured on an H200: of large pictures fewer channels, so that rows in work fit the cache.
        large = positions > 512
        channels = max(16, group)
        while channels < (32 if large else 64) and self.num_channels % (2 * channels) == 0:
            channels *= 2
        tile = min(1 << (positions - 1).bit_length(), max(16, 4096 // channels))
        return (self.num_channels // channels, len(x)), {
            "POSITIONS": positions, "TILE": tile, "CHANNELS": channels, "GROUP": group,
            "num_warps": 16 if large and channels > 16 else 8,
        }  # fmt: skip


class _Fused(torch.autograd.Function):
    """The weights are constants here: their gradients are the handler's business."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: ReluNorm, weight: Tensor) -> Tensor:
        import wrn_kernels

        x = _dense(x)
        ctx.module = module
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x)
        grid, sizes = module.launch(x)
        kernel: Any = wrn_kernels.forward
        kernel[grid](x, out, weight, module.bias.detach(), *_strides(x), module.eps, **sizes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        kept, ctx.module.kept = ctx.module.kept, None
        if kept is not None and kept[0].data_ptr() == grad.data_ptr():
            return kept[1], None, None
        return _backward(ctx.module, x, grad, weight)[0], None, None


def _backward(
    module: ReluNorm, x: Tensor, grad: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input, and of weight and bias for each row."""
    import wrn_kernels

    x = _dense(x)
    layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    grad = grad.contiguous(memory_format=layout)
    found = torch.empty_like(x)
    sums = torch.empty(2, len(x), module.num_channels, device=x.device)
    grid, sizes = module.launch(x)
    kernel: Any = wrn_kernels.backward
    kernel[grid](
        x, grad, found, weight, sums[0], sums[1],
        *_strides(x), module.num_channels, module.eps, **sizes,
    )  # fmt: skip
    return found, sums[0], sums[1]


def _dense(x: Tensor) -> Tensor:
    if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
    return strides(x, layout)


@handlers.register(ReluNorm)
def _norm(
    module: ReluNorm, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    x, grad = inputs[0], grads[0]
    if module.fits(x):
        back, scales, biases = _backward(module, x, grad, module.weight.detach())
        module.kept = (grad, back)  # the backward pass comes to it next, with the same gradient
    else:
        scales, biases = normalisation.channels(
            functional.relu(x), grad, module.num_groups, module.eps
        )
    return {name: Direct(scales if name == "weight" else biases) for name in names}


handlers.OUTPUT_UNUSED.add(ReluNorm)
