"""CIFAR-10 on the GPU, with random crops and flips of a whole batch in one gather.

The crop and the flip of a row are a function of the seed, the step, the example and the number of
the view, as in the library's loader workers: what one example looks like does not depend on who
else is in the batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

PADDING = 4


def load(path: Path | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures of bytes, (examples, 3, 32, 32), and labels: of training and of the test."""
    path = path or Path(os.environ["CORRNOISE_DATA"]) / "cifar10.npz"
    with np.load(path) as file:
        parts = [
            torch.from_numpy(file[name]) for name in ("x_train", "y_train", "x_test", "y_test")
        ]
    x, y, x_test, y_test = parts
    if x.shape[-1] == 3:
        x, x_test = x.permute(0, 3, 1, 2), x_test.permute(0, 3, 1, 2)
    return x.contiguous(), y.flatten().long(), x_test.contiguous(), y_test.flatten().long()


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures whose batches come augmented.

    Args:
        pictures: of bytes, (examples, channels, side, side), on the device where batches are made.
        labels: there too.
        views: rows of a batch for each example, one after the other.
        seed: of the augmentation.
        step: the step that a batch is for.
    """

    def __init__(
        self, pictures: Tensor, labels: Tensor, views: int, seed: int, step: Callable[[], int]
    ) -> None:
        # Of bytes, which cannot be padded by reflection: by an index instead.
        self._side = side = pictures.shape[-1]
        at = torch.arange(-PADDING, side + PADDING, device=pictures.device).abs()
        at = torch.where(at >= side, 2 * (side - 1) - at, at)
        self._padded = pictures[:, :, at][:, :, :, at].contiguous()
        self.labels, self._views, self._seed, self._step = labels, views, seed, step

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        middle = slice(PADDING, PADDING + self._side)
        return self._padded[index, :, middle, middle], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        device, side = self.labels.device, self._side
        rows = torch.as_tensor(indices, dtype=torch.int64).to(device)
        view = torch.arange(len(rows), device=device) % self._views
        drawn = random(self._seed, self._step(), rows, view)
        count = 2 * PADDING + 1
        down, right, flip = drawn % count, drawn // count % count, drawn // count**2 % 2
        at = torch.arange(side, device=device)
        x = torch.where(flip[:, None] == 1, side - 1 - at, at) + right[:, None]
        y = at + down[:, None]
        channel = torch.arange(self._padded.shape[1], device=device)[:, None, None]
        found = self._padded[
            rows[:, None, None, None], channel, y[:, None, :, None], x[:, None, None]
        ]
        return found, self.labels[rows]


def random(seed: int, step: int, example: Tensor, view: Tensor) -> Tensor:
    """31 random bits of each (seed, step, example, view), by the mixing of SplitMix64."""
    state = torch.zeros_like(example)
    for value in (seed, step, example, view):
        state = _mixed(state + value)
    return (state >> 16) & 0x7FFFFFFF


def _mixed(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
