"""A wide residual network of weight-standardised convolutions and GroupNorm, clipped in one pass.

Each layer has a handler, so that its per-example gradients are made for the parameters that are
trained: those before the standardisation. With v_o a row of the weight, m its mean and
s = ‖v_o - m‖, the layer uses w_o = (v_o - m)/s, and with g the gradient with respect to w_o,

    ∂/∂v_o = (g - mean(g) - w_o·⟨w_o, g⟩)/s,

the projection of g that leaves out two directions, the same for all examples of a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corrnoise._extras import has_triton
from corrnoise.torch.clipping import handlers, normalisation
from corrnoise.torch.clipping.convolution import Convolution
from corrnoise.torch.clipping.parts import Direct, Factors, Norms, Part
from corrnoise.torch.clipping.products import full_precision

_LEAST = 1e-4  # of s², as in De et al. (2022)


class StandardConv2d(nn.Conv2d):
    """A convolution without bias whose weight has rows of mean 0 and norm 1, in the input's type.

    The first weights are normal with variance 1/(number of inputs), so that s is about 1.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)

    def standardised(self) -> tuple[Tensor, Tensor]:
        """w, and s of each row."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        norm = centred.square().sum((1, 2, 3), keepdim=True).clamp_min(_LEAST).sqrt()
        return centred / norm, norm.flatten()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.standardised()[0].to(x.dtype)
        if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
            weight = weight.contiguous(memory_format=torch.channels_last)
        return functional.conv2d(x, weight, None, self.stride, self.padding)


class _Standardised(Part):
    """Per-example gradients of a convolution's weight before it is standardised.

    Args:
        part: the gradients with respect to the standardised weight.
        weight: the standardised one.
        norms: s of each row.
    """

    def __init__(self, part: Convolution, weight: Tensor, norms: Tensor) -> None:
        self._part, self._weight, self._sizes = part, weight, norms
        self._kept: Tensor | None = None

    def joined(self, views: int) -> _Standardised:
        return _Standardised(self._part.joined(views), self._weight, self._sizes)

    def each(self) -> Tensor:
        return self._like(self._projected() / self._sizes[None, :, None])

    def norms(self) -> Norms:
        """Of what is kept, and added later: no product is rounded in between."""
        self._kept = self._projected()
        lengths = torch.linalg.vector_norm(self._kept, dim=2) / self._sizes
        squares = lengths.square()
        return Norms(squares, squares, 0.0)

    def weighted(self, factors: Factors) -> Tensor:
        assert self._kept is not None
        rows = Direct(self._kept).weighted(factors) / self._sizes[:, None]
        self._kept = None
        return self._like(rows[None])[0].contiguous()

    def _projected(self) -> Tensor:
        """Times s: (examples, rows, entries of the kernel and channels, which come last)."""
        grads = self._part.each().movedim(2, -1).flatten(2)
        weight = self._weight.movedim(1, -1).flatten(1)
        # A weight that is too short is not scaled to norm 1, and its length matters then.
        lengths = weight.square().sum(1, keepdim=True)
        along = weight * (lengths > 0.999)
        ones = torch.full_like(weight, weight.shape[1] ** -0.5)
        basis = torch.stack([ones, along], 2)  # orthonormal: rows of w have mean 0
        by_row = grads.transpose(0, 1)
        with full_precision():
            met = by_row @ basis
            by_row.baddbmm_(met, basis.transpose(1, 2), alpha=-1.0)
        return grads

    def _like(self, rows: Tensor) -> Tensor:
        """(·, rows, entries and channels) in the shape of the weight."""
        shape = self._weight.shape
        return rows.view(len(rows), shape[0], *shape[2:], shape[1]).movedim(-1, 2)


@handlers.register(StandardConv2d)
def _convolution(
    module: StandardConv2d,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    names: Collection[str],
) -> dict[str, Part]:
    weight, norms = module.standardised()
    part = Convolution(module, inputs[0].to(grads[0].dtype), grads[0])
    return {"weight": _Standardised(part, weight.detach(), norms.detach())}


class NormReLU(nn.GroupNorm):
    """GroupNorm and ReLU; on a GPU by one kernel each way, in the input's type.

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
        return self.fused and x.is_cuda and has_triton() and powers and x[0, 0].numel() <= 1024

    def forward(self, x: Tensor) -> Tensor:
        if self.fits(x):
            return _Fused.apply(x, self, self.weight.detach(), self.bias.detach())  # type: ignore[return-value]
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return functional.relu(functional.group_norm(x, self.num_groups, weight, bias, self.eps))

    def launch(self, x: Tensor) -> tuple[Any, dict[str, Any]]:
        """The grid of the kernels and what both of them are told."""
        positions, group = x[0, 0].numel(), self.num_channels // self.num_groups
        channels, block = max(16, group), 1 << (positions - 1).bit_length()
        return (self.num_channels // channels, len(x)), {
            "POSITIONS": positions, "BLOCK": block, "CHANNELS": channels, "GROUP": group,
            "num_warps": min(16, max(4, block * channels // 1024)),
        }  # fmt: skip


class _Fused(torch.autograd.Function):
    """The weights are constants here: their gradients are the handler's business."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: NormReLU, weight: Tensor, bias: Tensor) -> Tensor:
        import wrn_kernels

        x = _dense(x)
        ctx.module = module
        ctx.save_for_backward(x, weight, bias)
        out = torch.empty_like(x)
        grid, sizes = module.launch(x)
        kernel: Any = wrn_kernels.forward
        kernel[grid](x, out, weight, bias, *_strides(x), module.eps, **sizes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias = ctx.saved_tensors
        kept, ctx.module.kept = ctx.module.kept, None
        if kept is not None and kept[0].data_ptr() == grad.data_ptr():
            return kept[1], None, None, None
        return _backward(ctx.module, x, grad, weight, bias)[0], None, None, None


def _backward(
    module: NormReLU, x: Tensor, grad: Tensor, weight: Tensor, bias: Tensor
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
        x, grad, found, weight, bias, sums[0], sums[1],
        *_strides(x), module.num_channels, module.eps, **sizes,
    )  # fmt: skip
    return found, sums[0], sums[1]


def _dense(x: Tensor) -> Tensor:
    if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return x
    return x.contiguous()


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(3)


@handlers.register(NormReLU)
def _norm(
    module: NormReLU, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    x, grad = inputs[0], grads[0]
    weight, bias = module.weight.detach(), module.bias.detach()
    if module.fits(x):
        back, scales, biases = _backward(module, x, grad, weight, bias)
        module.kept = (grad, back)  # the backward pass comes to it next, with the same gradient
    else:
        wide = functional.group_norm(x.float(), module.num_groups, weight, bias, module.eps)
        grad = torch.where(wide > 0, grad, torch.zeros_like(grad))
        scales, biases = normalisation.channels(x, grad, module.num_groups, module.eps)
    return {name: Direct(scales if name == "weight" else biases) for name in names}


handlers.OUTPUT_UNUSED.update({StandardConv2d, NormReLU})
_FITS = Convolution._fits


def use_kernels(use: bool) -> None:
    """Whether to use kernels where they can be, or torch's operations alone, to compare."""
    NormReLU.fused = use
    Convolution._fits = _FITS if use else lambda self: False


class Residual(nn.Module):
    """Two convolutions, each after a normalisation, and a shortcut where sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = NormReLU(inputs, groups), NormReLU(outputs, groups)
        self.conv1 = StandardConv2d(inputs, outputs, 3, stride)
        self.conv2 = StandardConv2d(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.short = None if same else StandardConv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        short = x if self.short is None else self.short(y)
        return short + self.conv2(self.norm2(self.conv1(y)))


class WideResNet(nn.Module):
    """WRN-depth-widen for pictures of bytes and ten classes.

    Args:
        depth: 4 more than a multiple of 6.
        widen: the factor of the widths 16, 32 and 64.
        groups: of the normalisations.
        dtype: in which pictures go through the blocks; parameters are float32.
        channels_last: the layout.
    """

    def __init__(
        self,
        depth: int = 16,
        widen: int = 4,
        *,
        groups: int = 16,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        width = 16
        self.stem = StandardConv2d(3, width, 3)
        blocks: list[nn.Module] = []
        for stage in range(3):
            for i in range((depth - 4) // 6):
                wider = 16 * widen * 2**stage
                blocks.append(Residual(width, wider, 2 if stage and not i else 1, groups))
                width = wider
        self.blocks, self.norm = nn.Sequential(*blocks), NormReLU(width, groups)
        self.head = nn.Linear(width, 10)
        nn.init.normal_(self.head.weight, std=width**-0.5)
        nn.init.zeros_(self.head.bias)

    def forward(self, pictures: Tensor) -> Tensor:
        x = ((pictures.float() - 128.0) / 64.0).to(self.dtype, memory_format=self.layout)
        x = self.norm(self.blocks(self.stem(x)))
        return self.head(x.mean((2, 3), dtype=torch.float32))
