"""Small models whose layers have per-example gradients: no BatchNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from corrnoise import _checks as checks

MODELS = ("auto", "linear", "mlp", "convnet")


def build(name: str, shape: Sequence[int], num_classes: int, *, seed: int = 0) -> nn.Module:
    """A classifier for examples of this shape.

    Args:
        name: "linear"; "mlp", one hidden layer of 128; "convnet", the paper's three blocks of two
            3x3 convolutions with 32, 64 and 128 channels and a linear layer, for pictures whose
            sides are at least 8; or "auto".
        shape: the shape of one example.
        num_classes: the number of classes.
        seed: the seed of the initial weights.

    >>> sum(p.numel() for p in build("convnet", (3, 32, 32), 10).parameters())
    307498
    """
    check(name, shape)
    if name == "auto":
        name = "convnet" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"
    # The seed is only for these weights; the caller's generator is not changed.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _build(name, shape, num_classes)


def check(name: str, shape: Sequence[int]) -> None:
    """Raise unless a model of this name exists for examples of this shape."""
    checks.choice("model", name, MODELS)
    if name == "convnet" and (len(shape) != 3 or min(shape[1:]) < 8):
        raise ValueError(
            f"model='convnet' is for pictures of at least 8x8, got examples of shape "
            f"{tuple(shape)}; use 'mlp'"
        )


def _build(name: str, shape: Sequence[int], num_classes: int) -> nn.Module:
    size = math.prod(shape)
    if name == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(size, num_classes))
    if name == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(size, 128), nn.ReLU(), nn.Linear(128, num_classes)
        )
    layers: list[nn.Module] = []
    channels = shape[0]
    for width in (32, 64, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = width
    last = 128 * (shape[1] // 8) * (shape[2] // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(last, num_classes))
