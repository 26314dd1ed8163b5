"""Validation of gradients: the backend that they need, and whether it can add noise to them."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from corrnoise import _checks as checks
from corrnoise.noise.backends.cpu import ArrayTarget, Layout
from corrnoise.noise.generator.stream import LARGEST_INDEX


@dataclass(frozen=True, eq=False)
class Targets:
    """Validated gradients: every check passes before any of them is changed.

    Attributes:
        device: "numpy", "cpu" (torch in main memory) or a CUDA device such as "cuda:0".
        layout: flat offset and size of each gradient.
        items: the targets that the backend writes to.
    """

    device: str
    layout: Layout
    items: Sequence[Any]

    @property
    def size(self) -> int:
        """Number of elements of all gradients."""
        return sum(size for _, size in self.layout)


def check_targets(grads: object, offsets: object = None) -> Targets:
    """Check a list of NumPy arrays or torch tensors and their places in the parameter vector.

    Raises:
        ValueError: the list is empty or has mixed devices, or a gradient has an unsupported dtype,
            memory that is not contiguous, a duplicate in the list or a wrong offset.
    """
    if not isinstance(grads, (list, tuple)) or not grads:
        got = "an empty list" if isinstance(grads, (list, tuple)) else type(grads).__name__
        raise ValueError(
            f"grads must be a non-empty list of tensors or arrays, got {got}; "
            "pass [p.grad for p in parameters]"
        )
    torch = sys.modules.get("torch")
    if torch is not None and all(isinstance(g, torch.Tensor) for g in grads):
        from corrnoise.noise.backends import torch_targets

        device, items = torch_targets.check(grads)
        sizes = [int(g.numel()) for g in grads]
        places = [int(g.data_ptr()) for g in grads]
    elif all(isinstance(g, np.ndarray) for g in grads):
        device, items = "numpy", [ArrayTarget(_check_array(k, g)) for k, g in enumerate(grads)]
        sizes = [int(g.size) for g in grads]
        places = [int(g.__array_interface__["data"][0]) for g in grads]
    else:
        names = ", ".join(sorted({type(g).__name__ for g in grads}))
        raise ValueError(
            f"grads must be all torch tensors or all NumPy arrays, got {names}; convert them"
        )
    used = [place for place, size in zip(places, sizes, strict=True) if size]
    if len(set(used)) != len(used):
        raise ValueError("grads must not share memory, got one tensor twice; pass each once")
    return Targets(device, check_layout(sizes, offsets), items)


def check_wide_targets(grads: object) -> tuple[list[Any], str]:
    """Flat views of float64 gradients, and their device: "numpy", "cpu" or a CUDA device.

    On the CPU the views are NumPy arrays, on CUDA they are tensors.

    Raises:
        ValueError: as ``check_targets``.
    """
    if not isinstance(grads, (list, tuple)) or not grads:
        raise ValueError("grads must be a non-empty list of float64 tensors or arrays, got none")
    torch = sys.modules.get("torch")
    for k, grad in enumerate(grads):
        if isinstance(grad, np.ndarray):
            kind, whole = str(grad.dtype), grad.flags.c_contiguous and grad.flags.writeable
        elif torch is not None and isinstance(grad, torch.Tensor):
            kind, whole = str(grad.dtype).removeprefix("torch."), grad.is_contiguous()
        else:
            kind, whole = type(grad).__name__, True
        if kind != "float64" or not whole:
            raise ValueError(
                f"grads[{k}] must be float64 and contiguous for an exact release, got {kind}; "
                "sum clipped gradients on a grid, in float64"
            )
    devices = {"numpy" if isinstance(g, np.ndarray) else str(g.device) for g in grads}
    if len(devices) > 1:
        raise ValueError(f"grads must be on one device, got {', '.join(sorted(devices))}")
    (device,) = devices
    if device == "numpy":
        return [grad.reshape(-1) for grad in grads], device
    flat = [grad.detach().view(-1) for grad in grads]
    if device == "cpu":
        return [grad.numpy() for grad in flat], device
    if not device.startswith("cuda"):
        raise ValueError(f"grads must be on a CPU or CUDA device, got {device}; move them")
    return flat, device


def check_scale(scale: object) -> float:
    """Return ``scale`` if it is finite and not negative, or raise."""
    number = scale
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise ValueError(f"scale must be a number, got {number!r}; pass noise_multiplier·clip_norm")
    value = float(number)
    if not (math.isfinite(value) and 0.0 <= value <= float(np.finfo(np.float32).max)):
        raise ValueError(
            f"scale must be finite in float32 and at least 0, got {value}; "
            "pass noise_multiplier·clip_norm"
        )
    return value


def check_layout(sizes: Sequence[int], offsets: object) -> Layout:
    """Flat offset and size of each gradient; raises if they overlap."""
    if offsets is None:
        starts, total = list[int](), 0
        for size in sizes:
            starts.append(total)
            total += size
    else:
        if not isinstance(offsets, (list, tuple)) or len(offsets) != len(sizes):
            raise ValueError(
                f"offsets must have one entry for each of the {len(sizes)} grads, "
                f"got {offsets!r}; pass where each begins in the flat parameter vector"
            )
        starts = [
            checks.integer(f"offsets[{k}]", start, 0, LARGEST_INDEX - sizes[k], "63-bit indices")
            for k, start in enumerate(offsets)
        ]
        spans = sorted((a, a + b) for a, b in zip(starts, sizes, strict=True) if b)
        for (_, end), (start, _) in pairwise(spans):
            if start < end:
                raise ValueError(
                    f"offsets must keep grads apart, got one that begins at {start} inside "
                    f"another that ends at {end}; two tensors would get the same noise"
                )
    return tuple(zip(starts, sizes, strict=True))


def _check_array(k: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(
            f"grads[{k}] must be float32 or float64, got {array.dtype}; convert it to float32"
        )
    if not (array.flags.c_contiguous and array.flags.writeable and array.flags.aligned):
        raise ValueError(
            f"grads[{k}] must be contiguous and writeable, got strides {array.strides} for shape "
            f"{array.shape}; pass np.ascontiguousarray of it"
        )
    return array.reshape(-1)
