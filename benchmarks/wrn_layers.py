"""A wide residual network of weight-standardised convolutions and GroupNorm, clipped in one pass.

Each layer has a handler, so that its per-example gradients are made for the parameters that are
trained: those before the standardisation. With v_o a row of the weight, m its mean, s = ‖v_o - m‖
and a_o a gain, the layer uses a_o·w_o, w_o = (v_o - m)/s, and with g the gradient with respect to
a_o·w_o,

    ∂/∂a_o = ⟨w_o, g⟩        ∂/∂v_o = (g - mean(g) - w_o·⟨w_o, g⟩)·a_o/s,

the projection of g that leaves out two directions, the same for all examples of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corrnoise._extras import has_triton
from corrnoise.torch.clipping import handlers
from corrnoise.torch.clipping.convolution import Convolution
from corrnoise.torch.clipping.parts import Direct, Factors, Norms, Part
from corrnoise.torch.clipping.products import full_precision, weighted_sum
from corrnoise.torch.clipping.rounding import EXACT
from wrn_norm import ReluNorm

_LEAST = 1e-4  # of s², as in De et al. (2022)
# What rounding can take from a projected square, as a share of the whole one. A lane of the kernel
# adds at most 9 products of a row, and a tree of 8 levels the lanes; with u = 2⁻²⁴ that is at most
# 18 u of Σ g², and twice as much, and a little, of each of the squares that are left out.
_SLACK, _WIDEST = 2.0**-17, 9 * 256
# Of the colours of CIFAR-10, published and used by everyone; from 0 to 1.
_MEANS, _DEVIATIONS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class StandardConv2d(nn.Conv2d):
    """A convolution whose weight has rows of mean 0 and norm 1, times a gain, in the input's type.

    The first weights are normal with variance 1/(number of inputs), so that s is about 1.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, kernel // 2)
        self.gain = nn.Parameter(torch.ones(outputs))
        nn.init.normal_(self.weight, std=self.weight[0].numel() ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def standardised(self) -> tuple[Tensor, Tensor]:
        """w, and s of each row."""
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        norm = centred.square().sum((1, 2, 3), keepdim=True).clamp_min(_LEAST).sqrt()
        return centred / norm, norm.flatten()

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        weight = (self.standardised()[0] * self.gain[:, None, None, None]).to(x.dtype)
        if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
            weight = weight.contiguous(memory_format=torch.channels_last)
            if _fused(x):
                y = functional.conv2d(x, weight, None, self.stride, self.padding)
                return Biased.apply(y, self.bias.detach())  # type: ignore[return-value]
        return functional.conv2d(x, weight, self.bias.to(x.dtype), self.stride, self.padding)


def _fused(x: Tensor) -> bool:
    """Whether there are kernels for it, and they are to be used."""
    return x.is_cuda and ReluNorm.fused and has_triton()


class Biased(torch.autograd.Function):
    """A bias for each channel, added in place; its gradient is the handler's business.

    Torch adds the bias of a convolution in this layout at less than half the speed.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        import wrn_kernels

        if not y.is_contiguous(memory_format=torch.channels_last):
            raise ValueError("channels must be neighbours in memory")
        kernel: Any = wrn_kernels.biased
        kernel[(-(-y.numel() // 4096),)](y, bias, y.numel(), CHANNELS=y.shape[1], BLOCK=4096)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Weight(Part):
    """Per-example gradients of a convolution's weight before it is standardised.

    The projection is the same for all examples: the gradients are added up first and projected
    once, and their projected norms come from Σ g², Σ g and ⟨w, g⟩ of each row.

    Args:
        part: the gradients with respect to the standardised weight times the gain.
        weight: the standardised one.
        scales: gain/s of each row.
    """

    def __init__(self, part: Convolution, weight: Tensor, scales: Tensor) -> None:
        self._part, self._shape, self._scales = part, weight.shape, scales
        self._rows = weight.movedim(1, -1).flatten(1).contiguous()
        if self._rows.shape[1] > _WIDEST:
            raise ValueError(
                f"a row must have at most {_WIDEST} weights, got {self._rows.shape[1]}"
            )
        self._squares = self._rows.square().sum(1)
        # A weight that is too short is not scaled to norm 1, and its length matters then.
        self._scaled = self._squares > 0.999
        self._kept: Tensor | None = None
        self._whole: dict[int, _Weight] = {}  # by views
        self.gains: Tensor | None = None  # of every example, from the latest pass

    def joined(self, views: int) -> _Weight:
        """The same object for weight and gain, whose gradients are made together."""
        if views not in self._whole:
            found = self._whole[views] = copy.copy(self)
            found._part, found._whole = self._part.joined(views), {}
            found._kept = found.gains = None
        return self._whole[views]

    def each(self) -> Tensor:
        return self._projected(self._measured()[0].to(self._rows.dtype))

    def norms(self) -> Norms:
        """Of what is kept, and added later: no product is rounded in between."""
        self._kept, moments = self._measured()
        squares, sums, met = moments.unbind(2)
        sums, met = sums * self._rows.shape[1] ** -0.5, met * self._scaled
        # ‖g - (Σ g/n)·1 - ⟨w, g⟩·w‖². Rows of w have norm 1 and mean 0, but for rounding.
        mean = self._rows.sum(1) * self._rows.shape[1] ** -0.5
        left_out = sums.square() + met.square() * (2.0 - self._squares) - 2.0 * sums * met * mean
        left = ((1.0 + _SLACK) * squares - left_out).clamp_min(0.0)
        left = torch.where(squares.isfinite(), left, torch.inf)
        squares = left * self._scales.square()
        return Norms(squares, squares, EXACT)

    def weighted(self, factors: Factors) -> Tensor:
        assert self._kept is not None
        rows = weighted_sum(factors.values, self._kept)
        self._kept = None
        return self._projected(rows[None])[0].contiguous()

    def _measured(self) -> tuple[Tensor, Tensor]:
        """Gradients and their moments.

        The first are (examples, rows, entries and channels of the kernel, in this order), in
        bfloat16 where the layer's gradients are.
        """
        grads = self._part.stored().movedim(2, -1).flatten(2)
        moments = moments_of(grads, self._rows)
        self.gains = moments[:, :, 2]
        return grads, moments

    def _projected(self, rows: Tensor) -> Tensor:
        """Gradients of the trained weight, in its shape, from (·, rows, entries and channels)."""
        sums, met = moments_of(rows, self._rows)[:, :, 1:, None].unbind(2)
        along = self._rows * self._scaled[:, None]
        rows = (rows - sums / self._rows.shape[1] - met * along) * self._scales[:, None]
        shape = self._shape
        return rows.view(len(rows), shape[0], *shape[2:], shape[1]).movedim(-1, 2)


def moments_of(grads: Tensor, weight: Tensor) -> Tensor:
    """Σ g², Σ g and ⟨w, g⟩ of every example and row, (examples, rows, 3), from one reading.

    Args:
        grads: (examples, rows, width).
        weight: (rows, width), contiguous as well.
    """
    if _fused(grads):
        return launch_moments(grads.contiguous(), weight)
    grads = grads.to(weight.dtype)
    with full_precision():
        met = torch.einsum("erw,rw->er", grads, weight)
    return torch.stack([torch.linalg.vector_norm(grads, dim=2).square(), grads.sum(2), met], 2)


def launch_moments(grads: Tensor, weight: Tensor) -> Tensor:
    """The same by the kernel."""
    import wrn_kernels

    examples, rows, width = grads.shape
    found = weight.new_empty(examples, rows, 3)
    kernel: Any = wrn_kernels.moments
    kernel[(rows, -(-examples // 4))](
        grads, weight, found, examples, rows, width, EXAMPLES=4, BLOCK=256, num_warps=4
    )
    return found


class _Gain(Part):
    """Per-example gradients of a convolution's gain, found on the way to those of its weight.

    Args:
        weight: the part of the weight.
    """

    def __init__(self, weight: _Weight) -> None:
        self._weight = weight

    def joined(self, views: int) -> _Gain:
        return _Gain(self._weight.joined(views))

    def each(self) -> Tensor:
        if self._weight.gains is None:
            self._weight.each()
        assert self._weight.gains is not None
        return self._weight.gains

    def norms(self) -> Norms:
        return Direct(self.each()).norms()

    def weighted(self, factors: Factors) -> Tensor:
        return Direct(self.each()).weighted(factors)


@handlers.register(StandardConv2d)
def _convolution(
    module: StandardConv2d,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    names: Collection[str],
) -> dict[str, Part]:
    grad = grads[0]
    weight, sizes = module.standardised()
    part = _Weight(
        Convolution(module, inputs[0].to(grad.dtype), grad),
        weight.detach(),
        (module.gain / sizes).detach(),
    )
    bias = Direct(grad.flatten(2).sum(2, dtype=torch.float32))
    found: dict[str, Part] = {"weight": part, "gain": _Gain(part), "bias": bias}
    return {name: found[name] for name in found if name in names}


handlers.OUTPUT_UNUSED.add(StandardConv2d)
_FITS = Convolution._fits


def use_kernels(use: bool) -> None:
    """Whether to use kernels where they can be, or torch's operations alone, to compare."""
    ReluNorm.fused = use
    Convolution._fits = _FITS if use else lambda self: False


class Residual(nn.Module):
    """Two convolutions, each of normalised activations, and a shortcut of the same kind or none."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = ReluNorm(inputs, groups), ReluNorm(outputs, groups)
        self.conv1 = StandardConv2d(inputs, outputs, 3, stride)
        self.conv2 = StandardConv2d(outputs, outputs, 3)
        self.short: nn.Module | None = None
        if inputs != outputs or stride > 1:
            self.short = nn.Sequential(
                ReluNorm(inputs, groups), StandardConv2d(inputs, outputs, 1, stride)
            )

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.short is None else self.short(x)
        return short + self.conv2(self.norm2(self.conv1(self.norm1(x))))


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
        self.blocks, self.norm = nn.Sequential(*blocks), ReluNorm(width, groups)
        self.head = nn.Linear(width, 10)
        nn.init.normal_(self.head.weight, std=width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.colours: Tensor
        colours = 255.0 * torch.tensor([_MEANS, _DEVIATIONS]).view(2, 3, 1, 1)
        self.register_buffer("colours", colours, persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        x = (pictures.float() - self.colours[0]) / self.colours[1]
        x = self.norm(self.blocks(self.stem(x.to(self.dtype, memory_format=self.layout))))
        return self.head(x.mean((2, 3), dtype=torch.float32))
