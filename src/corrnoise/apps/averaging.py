"""Averaged weights: the mean over the last part of a run, which costs no privacy."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from corrnoise import _checks as checks


class Average:
    """The mean of the weights over the last part of a run.

    Attributes:
        num_steps: how many steps it has processed.
    """

    def __init__(self, params: Sequence[nn.Parameter], num_steps: int, part: float) -> None:
        self._params = list(params)
        self._first = num_steps - round(num_steps * checks.fraction("average_last", part))
        self.num_steps, self._count = 0, 0
        self._means = [p.detach().clone() for p in self._params]

    def update(self) -> None:
        """Add the weights after a step to the mean."""
        self.num_steps += 1
        if self.num_steps > self._first:
            self._count += 1
            with torch.no_grad():
                for mean, param in zip(self._means, self._params, strict=True):
                    mean.lerp_(param, 1.0 / self._count)

    @contextmanager
    def weights(self) -> Generator[None]:
        """Give the model its mean weights within the block, if there are any."""
        if not self._count:
            yield
            return
        own = [p.detach().clone() for p in self._params]
        self._put(self._means)
        try:
            yield
        finally:
            self._put(own)

    def state(self) -> dict[str, Any]:
        """The state of the average, for a checkpoint."""
        return {"step": self.num_steps, "count": self._count, "means": self._means}

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state``."""
        self.num_steps, self._count = state["step"], state["count"]
        self._means = [
            mean.to(p.device) for mean, p in zip(state["means"], self._params, strict=True)
        ]

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(self._params, values, strict=True):
                param.copy_(value)
