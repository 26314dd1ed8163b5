"""A whole step as one function, which runs as a CUDA graph: for models bound by their launches.

Random batches change their size at every step, and a graph has one size. So a batch is filled up to
a fixed number of rows with copies whose weight is zero, exactly, and a larger one comes in pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from corrnoise.planning import Plan
from corrnoise.torch.draws import undisturbed
from corrnoise.torch.one_pass import OnePassSums

# Before a graph is captured, its work must have run a few times.
_WARM_UP = 3


def usual_size(plan: Plan, world_size: int = 1) -> int:
    """A number of rows that a random batch exceeds with probability 1e-6 at most.

    Args:
        plan: of the run.
        world_size: the number of processes that share a batch.
    """
    from scipy.stats import binom

    share = plan.expected_batch / plan.num_examples
    rows = int(binom.isf(1e-6, plan.num_examples, share)) + 1
    return -(-min(rows, plan.num_examples) // world_size)


class CapturedStep:
    """Forward, backward, clipping, noise and the optimizer's step, for one batch of the loader.

    Args:
        sums: of the run.
        optimizer: the user's.
        loss: of a batch: a mean or a sum over its examples.
        size: examples of the graph.
    """

    def __init__(
        self,
        sums: OnePassSums,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Tensor],
        size: int,
    ) -> None:
        self.size = size * sums.clipper.views
        self._sums, self._optimizer, self._loss = sums, optimizer, loss
        self._inputs: tuple[Tensor, ...] = ()
        self._real, self._count = torch.empty(0), 0  # the rows that are examples
        self._checked = False  # whether the loss was seen to be one of single examples
        self._graph: torch.cuda.CUDAGraph | None = None
        self._value: Tensor | None = None

    def __call__(self, *batch: Tensor) -> Tensor | None:
        """Take a step; the loss of the last piece of the batch, filled up, is returned.

        The loss is not private: it is for looking at, not for publishing.
        """
        self._sums.check_open()
        count = len(batch[0])
        for start in range(0, max(count, 1), self.size):
            self._piece([part[start : start + self.size] for part in batch])
        self._optimizer.step()
        self._optimizer.zero_grad()
        # The graph's own loss is overwritten by the next step. Gradients and what the optimizer
        # makes of them are not of the graph.
        return None if self._value is None else self._value.clone()

    def _piece(self, piece: list[Tensor]) -> None:
        clipper, device = self._sums.clipper, self._sums.params[0].device
        if not self._inputs:
            if not len(piece[0]):
                return  # nothing was seen yet that rows could be filled up with
            self._inputs = tuple(
                part[:1].to(device).expand(self.size, *part.shape[1:]).contiguous()
                for part in piece
            )
            self._real = torch.zeros(self.size, device=device)
        count = len(piece[0])
        if not self._checked and count > 1:
            self._sums.check_loss(self._loss, [part.to(device) for part in piece])
            self._checked = True
        for kept, part in zip(self._inputs, piece, strict=True):
            kept[:count].copy_(part, non_blocking=True)
        if count != self._count:
            self._real[:count] = 1.0
            self._real[count:] = 0.0
            self._count = count
        clipper.real = self._real
        try:
            if self._real.is_cuda:
                self._replay()
            else:
                self._run()
                clipper.collect()
        finally:
            clipper.real = None
        clipper.examples += count // clipper.views

    def _run(self) -> None:
        self._value = self._loss(*self._inputs)
        self._value.backward()
        self._value = self._value.detach()

    def _replay(self) -> None:
        if self._graph is None:
            with undisturbed():
                self._capture()
        assert self._graph is not None
        self._sums.clipper.begin()
        self._graph.replay()

    def _capture(self) -> None:
        """Make the graph, when the sums are empty yet: it adds to them."""
        clipper = self._sums.clipper
        clipper.begin()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._run()
                clipper.collect()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._run()
            clipper.collect()
        clipper.flat.zero_()
