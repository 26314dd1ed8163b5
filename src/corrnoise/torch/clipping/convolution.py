"""The gradient of a convolution's weight, example by example."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from corrnoise._extras import has_triton
from corrnoise.torch.clipping import gram
from corrnoise.torch.clipping.parts import Factors, Norms, Part
from corrnoise.torch.clipping.products import (
    cudnn_rounds,
    product,
    scaled,
    squared,
    squared_product,
    weighted_sum,
)
from corrnoise.torch.clipping.rounding import EXACT, convolution_rounding

_CHUNK = {"cuda": 1 << 27, "cpu": 1 << 21}  # elements of patches that are made at once
# Gradients of single examples are kept that have at most so many times the elements of the inputs.
_KEPT = {"cuda": 16, "cpu": 4}
# Tiles of at most so many elements share the gradients of outputs between three entries.
_SHARED = 1 << 12


@dataclass(frozen=True)
class _Geometry:
    """How a convolution walks over its input, which is padded already."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int

    def patches(self, inputs: Tensor, sizes: Sequence[int]) -> Tensor:
        """What each output position sees: (examples, groups, channels·kernel, positions)."""
        if any(self.padding):
            inputs = functional.pad(inputs, [p for p in reversed(self.padding) for _ in (0, 1)])
        steps = inputs.stride()
        view = inputs.as_strided(
            (*inputs.shape[:2], *self.kernel, *sizes),
            (
                *steps[:2],
                *(a * d for a, d in zip(steps[2:], self.dilation, strict=True)),
                *(a * s for a, s in zip(steps[2:], self.stride, strict=True)),
            ),
            inputs.storage_offset(),
        )
        return view.reshape(len(inputs), self.groups, -1, math.prod(sizes))


class Convolution(Part):
    """Outer products over the positions of the output, of gradients and patches of the input.

    Args:
        module: a convolution of one, two or three dimensions.
        inputs: (examples, channels, *sizes).
        grads: of the outputs, (examples, rows of the weight, *sizes).
    """

    def __init__(self, module: Any, inputs: Tensor, grads: Tensor) -> None:
        padding, self._inputs = _padded(module, inputs)
        self._geometry = _Geometry(
            module.kernel_size, module.stride, module.dilation, padding, module.groups
        )
        self.shape, self._left, self._views = module.weight.shape, grads, 1
        self._kept: Tensor | None = None

    def joined(self, views: int) -> Convolution:
        """Every ``views`` rows as one example: the positions of all of them are added up."""
        found = copy.copy(self)
        found._views = self._views * views
        return found

    @property
    def positions(self) -> int:
        """That are added up for an entry of an example's gradient."""
        return self._views * math.prod(self._left.shape[2:])

    def each(self) -> Tensor:
        """The gradient of every example."""
        if self._fits():
            return self._stored(torch.float32)
        return torch.cat([_grads(*pair) for pair in self._pieces()]).view(-1, *self.shape)

    def stored(self) -> Tensor:
        """The gradient of every example, in bfloat16 where a kernel makes it of such factors.

        That is half of what must be written, and read for norms and sums. Who measures these
        values, and adds up the same ones, rounds nothing in between.
        """
        if self._fits() and self._left.dtype == torch.bfloat16:
            return self._stored(torch.bfloat16)
        return self.each()

    def norms(self) -> Norms:
        """For each example, by whichever way is cheaper at these sizes."""
        rounding, size = convolution_rounding(self._left), self._inputs[0].numel()
        # In float32 additions over many positions count, unless the gradient is kept.
        if self._fits() and self._views == 1 and (rounding.cut or math.prod(self.shape) > size):
            return self._fused()
        rows, columns = self.shape[0] // self._geometry.groups, math.prod(self.shape[1:])
        positions = self.positions
        found: list[tuple[Tensor, ...]] = []
        by_gram = not self._fits() and gram.pays(positions, rows, columns, self._left)
        most = _KEPT.get(self._left.device.type, 4) * self._views * size
        if not by_gram and math.prod(self.shape) <= most:
            # What is measured is what is added, with no further rounding of factors.
            self._kept = self.stored()
            squares = squared(self._kept)
            return Norms.of(squares, squares, EXACT)
        terms, inner = positions if by_gram else 2 * positions, 0
        for left, patches in self._pieces():
            if by_gram:
                factors = [each.flatten(0, 1).transpose(1, 2) for each in (left, patches)]
                inner = gram.inner(*factors)
                found.append(tuple(part.reshape(len(left), -1) for part in gram.norms(*factors)))
                continue
            squares = squared(_grads(left, patches).flatten(1))
            spread = squared_product(left.flatten(1), patches.flatten(1))
            found.append((squares[:, None], spread[:, None]))
        squares, spread = (torch.cat(some) for some in zip(*found, strict=True))
        return Norms(squares, spread, rounding, terms, inner)

    def _fused(self) -> Norms:
        """By one kernel, which stores neither patches nor gradients."""
        from corrnoise.torch.clipping.convolution_kernel import squares

        geometry = self._geometry
        inputs, left = self._inputs.contiguous(), self._left.contiguous()
        rows, channels = self.shape[0] // geometry.groups, self.shape[1]
        entries, positions = math.prod(self.shape[2:]), left.shape[2] * left.shape[3]
        # Measured on an H200. Wide tiles are the better, and narrow ones share a tile of gradients
        # between three neighbouring entries of the kernel.
        taps = 3 if self.shape[3] == 3 and max(rows, channels) <= 64 else 1
        tall, wide = _tile(rows), _tile(channels)
        large = tall * wide > _SHARED
        depth, warps, stages = (64, 8, 2) if large and positions <= 64 else (32, 4, 3)
        tiles = -(-rows // tall) * -(-channels // wide) * (entries // taps)
        found = left.new_empty(len(left) * geometry.groups, tiles, dtype=torch.float32)
        exact = left.dtype == torch.float32 and not cudnn_rounds()
        kernel: Any = squares
        with torch.cuda.device(left.device):
            kernel[(tiles * len(found),)](
                left, inputs, found, rows, channels, tiles,
                *geometry.stride, *geometry.padding, *geometry.dilation,
                HEIGHT=inputs.shape[2], WIDTH=inputs.shape[3], OUT_WIDTH=left.shape[3],
                POSITIONS=positions, KERNEL_X=self.shape[3], ENTRIES=entries, TAPS=taps,
                ROWS=tall, CHANNELS=wide, DEPTH=depth, PRECISION="ieee" if exact else "tf32",
                num_warps=warps, num_stages=stages,
            )  # fmt: skip
        spread, rounding = self.spread()[:, None], convolution_rounding(left)
        return Norms(found.view(len(left), -1), spread, rounding, 2 * positions)

    def _stored(self, dtype: torch.dtype) -> Tensor:
        """Every example's gradient by one kernel, which stores no patches."""
        from corrnoise.torch.clipping.convolution_kernel import gradients

        geometry, views, left = self._geometry, self._views, self._left
        channels_last = left.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        left = left.contiguous(memory_format=layout)
        inputs = self._inputs.contiguous(memory_format=layout)
        rows, channels = self.shape[0] // geometry.groups, self.shape[1]
        entries, positions = math.prod(self.shape[2:]), left.shape[2] * left.shape[3]
        examples = len(left) // views
        tall, wide = _tile(rows), _tile(channels)
        taps = 3 if self.shape[3] == 3 and tall * wide <= _SHARED else 1
        tiles = -(-rows // tall) * -(-channels // wide) * (entries // taps)
        # Entries of the kernel before channels, so that neighbours are stored together.
        found = left.new_empty(examples, self.shape[0], *self.shape[2:], channels, dtype=dtype)
        exact = left.dtype == torch.float32 and not cudnn_rounds()
        kernel: Any = gradients
        large = tall * wide > _SHARED
        with torch.cuda.device(left.device):
            kernel[(tiles * examples * geometry.groups,)](
                left, inputs, found, views, rows, channels, geometry.groups, tiles,
                *strides(left, layout), *strides(inputs, layout),
                *geometry.stride, *geometry.padding, *geometry.dilation,
                HEIGHT=inputs.shape[2], WIDTH=inputs.shape[3], OUT_WIDTH=left.shape[3],
                POSITIONS=positions, KERNEL_X=self.shape[3], ENTRIES=entries, TAPS=taps,
                ROWS=tall, CHANNELS=wide, DEPTH=32 if left.element_size() == 4 else 64,
                PRECISION="ieee" if exact else "tf32", num_warps=8 if large else 4, num_stages=3,
            )  # fmt: skip
        return found.movedim(-1, 2)

    def spread(self) -> Tensor:
        """What R² is at most, for each example, without patches: by Cauchy and Schwarz.

        A pixel is in at most as many patches as the kernel has entries.
        """
        entries = math.prod(self.shape[2:])
        return squared_product(self._left, self._inputs) * entries

    def weighted(self, factors: Factors) -> Tensor:
        """The sum over examples, each with its factor."""
        if self._kept is not None:
            return weighted_sum(factors.values, self._kept)
        # In float32: a convolution gives its sums over all examples in the type of its factors.
        values = factors.values
        if self._views > 1:
            values = values.repeat_interleave(self._views)
        left = scaled(self._left.float(), values)
        geometry = self._geometry
        dims = len(geometry.kernel)
        found = torch.ops.aten.convolution_backward(
            left, self._inputs.float(), left.new_empty(self.shape), None, geometry.stride,
            geometry.padding, geometry.dilation, False, [0] * dims, geometry.groups,
            [False, True, False],
        )  # fmt: skip
        return found[1]

    def _fits(self) -> bool:
        """Whether there are kernels for it."""
        return self._left.is_cuda and self._left.dim() == 4 and has_triton()

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients and patches of some examples at a time: (examples, groups, ·, positions)."""
        sizes, views = self._left.shape[2:], self._views
        one = views * math.prod(self.shape[1:]) * self._geometry.groups * math.prod(sizes)
        size = views * max(1, _CHUNK.get(self._left.device.type, 1 << 21) // one)
        for start in range(0, len(self._left), size):
            left = self._left[start : start + size]
            left = left.reshape(len(left), self._geometry.groups, -1, math.prod(sizes))
            patches = self._geometry.patches(self._inputs[start : start + size], sizes)
            yield _together(left, views), _together(patches, views)


def strides(pictures: Tensor, layout: torch.memory_format) -> tuple[int, int, int]:
    """Of examples, channels and pixels, in a tensor that is contiguous in its layout.

    By its sizes: torch gives a dimension of size 1 any stride, also one that leads to the next
    example.
    """
    channels, pixels = pictures.shape[1], math.prod(pictures.shape[2:])
    channel, pixel = (1, channels) if layout == torch.channels_last else (pixels, 1)
    return channels * pixels, channel, pixel


def _tile(size: int) -> int:
    return min(128, max(16, 1 << (size - 1).bit_length()))


def _together(rows: Tensor, views: int) -> Tensor:
    """(K·examples, groups, ·, positions) as (examples, groups, ·, K·positions)."""
    if views == 1:
        return rows
    return rows.unflatten(0, (-1, views)).permute(0, 2, 3, 1, 4).flatten(3)


def _grads(left: Tensor, patches: Tensor) -> Tensor:
    return product(left.flatten(0, 1), patches.flatten(0, 1).transpose(1, 2)).view(
        *left.shape[:3], patches.shape[2]
    )


def _padded(module: Any, inputs: Tensor) -> tuple[tuple[int, ...], Tensor]:
    """The zeros around the input that are still to be thought, and the input with all others."""
    around = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros":
        return (0,) * len(module.kernel_size), functional.pad(inputs, around, module.padding_mode)
    if around[::2] != around[1::2]:  # "same" can need one more on one side
        return (0,) * len(module.kernel_size), functional.pad(inputs, around)
    return tuple(reversed(around[::2])), inputs


CONVOLUTIONS: tuple[type[nn.Module], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
