"""Torch tensors as targets of noise. The only file of the CPU path that imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from corrnoise.noise.backends.cpu import ArrayTarget
from corrnoise.noise.generator.normals import Normals

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_PIECE = 1 << 14


class NarrowTarget:
    """A flat tensor of 16-bit floats in main memory: added in float32, rounded once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def add(self, start: int, stop: int, noise: Normals) -> None:
        """Add ``noise`` to the elements [start, stop)."""
        # In pieces so small that torch uses no threads of its own.
        for low in range(start, stop, _PIECE):
            part = self._tensor[low : min(low + _PIECE, stop)]
            here = torch.from_numpy(noise[low - start : low - start + _PIECE])
            part.copy_(part.float().add_(here))


def check(grads: Sequence[torch.Tensor]) -> tuple[str, list[Any]]:
    """The device of the tensors, and the targets of its backend; raises like ``check_targets``."""
    device = grads[0].device
    for k, grad in enumerate(grads):
        if grad.device != device:
            raise ValueError(
                f"grads[{k}] must be on {device} like grads[0], got {grad.device}; "
                "call once for each device"
            )
        if grad.layout != torch.strided or not grad.is_contiguous():
            raise ValueError(
                f"grads[{k}] must be dense and contiguous, got layout {grad.layout}, strides "
                f"{tuple(grad.stride()) if grad.layout == torch.strided else '-'}; "
                "pass .contiguous() of it"
            )
        if grad.dtype not in DTYPES:
            names = ", ".join(str(kind).removeprefix("torch.") for kind in DTYPES)
            raise ValueError(
                f"grads[{k}] must be one of {names}, got {grad.dtype}; convert it to float32"
            )
    if device.type == "cuda":
        return str(device), list(grads)  # the kernels need only addresses
    if device.type != "cpu":
        raise ValueError(f"grads must be on a CPU or CUDA device, got {device}; move them")
    flat = [grad.detach().view(-1) for grad in grads]
    return "cpu", [
        ArrayTarget(tensor.numpy()) if tensor.dtype == torch.float32 else NarrowTarget(tensor)
        for tensor in flat
    ]


def byte_tensor(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Bytes as a tensor, which ``torch.save`` writes and ``torch.load`` reads safely."""
    return torch.from_numpy(data)
