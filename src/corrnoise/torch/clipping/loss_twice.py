"""The second derivative of a loss: do gradients of some examples change with others' outputs?"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from corrnoise.torch.clipping.loss_graph import TAP, Edge, LossGraph, computed, edges

_LEAST = 1e-4  # what may be rounding, relative to the second derivative of each by itself
_ROUNDED = 2e-3  # where it was computed in half precision
_CANCELLED = 1e-4  # what may be rounding, relative to the gradient


def coupled(loss: LossGraph, largest: int) -> bool | None:
    """Whether gradients of some examples change with the outputs for others.

    With one half of the examples for the others, and with every second one. Nothing is returned
    where that cannot be seen, as where the second derivative is zero. Functions of somebody's own
    might bear only one backward pass, and wait for other processes.

    Args:
        loss: what is differentiated twice.
        largest: numbers of outputs for which that is done.
    """
    size = sum(math.prod(computed(node)[number].shape) for node, number in loss.outputs)
    if _several() or size > largest or any(map(_own, loss.nodes)):
        return None
    outputs, taps = _apart(loss.outputs)
    examples = range(loss.rows // loss.views)
    halves = [i < len(examples) // 2 for i in examples], [i % 2 == 0 for i in examples]
    with torch.enable_grad(), _blocked(taps):
        grads: Any = torch.autograd.grad(
            loss.roots, outputs, loss.grads, create_graph=True, allow_unused=True
        )
        some = [
            (edge, grad, ways)
            for edge, grad in zip(outputs, grads, strict=True)
            if grad is not None and grad.requires_grad and (ways := _ways(grad.shape, loss.rows))
        ]
        if not some:
            return None
        # Where the examples may lie along either of two dimensions, they must mix in both.
        least = _ROUNDED if _half(loss, grads) else _LEAST
        found = list[bool | None]()
        for c in range(max(len(ways) for _, _, ways in some)):
            chosen = [(edge, grad, ways[c % len(ways)]) for edge, grad, ways in some]
            each = [_mixed(chosen, half, loss.views, least) for half in halves]
            found.append(any(each) if any(each) or None not in each else None)
        return False if False in found else None if None in found else True


_Way = Callable[[Tensor], Tensor]  # a tensor with one row of numbers for each row of the batch


def _mixed(
    some: Sequence[tuple[GradientEdge, Tensor, _Way]], half: list[bool], views: int, least: float
) -> bool | None:
    """Whether gradients of the examples of one half change with outputs for the other."""
    device = some[0][1].device
    chosen = torch.tensor(half, device=device)
    rows, total = chosen.repeat_interleave(views), torch.zeros((), device=device)
    for _, grad, way in some:
        values = way(grad)[rows].float()
        total = total + (values * _directions(values)).sum()
    found: Any = torch.autograd.grad(
        total, [edge for edge, _, _ in some], retain_graph=True, allow_unused=True
    )

    def norms(tensors: Sequence[Tensor | None]) -> Tensor:
        each = [
            way(block.detach()).float().reshape(len(half), -1)
            for block, (_, _, way) in zip(tensors, some, strict=True)
            if block is not None
        ]
        return torch.linalg.vector_norm(torch.cat(each, 1), dim=1) if each else torch.zeros(())

    twice, once = norms(found), norms([grad for _, grad, _ in some])
    if not twice.any() or not twice.isfinite().all():
        return None
    own = twice[chosen].mean()
    rounding = least * own + _CANCELLED * once.mean()
    if (twice[~chosen] > rounding).any():
        return True
    return False if own > rounding else None


def _directions(values: Tensor) -> Tensor:
    """Numbers between 0.5 and 1.5 that no structure of a loss goes with."""
    places = torch.arange(values.numel(), device=values.device, dtype=torch.float32)
    return places.mul_(1.7).cos_().mul_(0.5).add_(1.0).view(values.shape)


def _ways(shape: torch.Size, rows: int) -> list[_Way]:
    """How the rows of a batch may lie in a tensor."""

    def along(dim: int) -> _Way:
        return lambda x: x.movedim(dim, 0).reshape(rows, -1)

    found = [along(dim) for dim, size in enumerate(shape) if size == rows]
    if shape and shape[0] > rows and shape[0] % rows == 0:
        found += [
            lambda x: x.reshape(rows, -1),
            lambda x: x.unflatten(0, (-1, rows)).movedim(1, 0).reshape(rows, -1),
        ]
    return found


def _apart(outputs: Sequence[Edge]) -> tuple[list[GradientEdge], list[Any]]:
    """The outputs to differentiate at, and the trained layers between some and others.

    Gradients go no further than to the outputs. Where others than our own functions stand between
    two of them, only the last is left.
    """
    below, todo = dict[Node, list[Node]](), [node for node, _ in outputs]
    for node in todo if len(outputs) > 1 else ():  # grows
        if node not in below:
            below[node] = [each for each, _ in edges(node)]
            todo += below[node]
    under = {each for found in below.values() for each in found}
    leads = {node for node, _ in outputs} & under
    for node in TopologicalSorter(below).static_order():
        if leads.intersection(below[node]):
            leads.add(node)
    between = [node for node in leads if _own(node) and leads.intersection(below[node])]
    if any(node.name() != TAP for node in between):
        outputs, between = [edge for edge in outputs if edge[0] not in under], []
    return [GradientEdge(*edge) for edge in outputs], between


@contextmanager
def _blocked(taps: Sequence[Any]) -> Generator[None]:
    for tap in taps:
        tap.blocked = True
    try:
        yield
    finally:
        for tap in taps:
            tap.blocked = False


def _half(loss: LossGraph, grads: Sequence[Tensor | None]) -> bool:
    """Whether something was computed in half precision."""
    kinds = {each.dtype for node in loss.nodes for each in computed(node)}
    kinds |= {grad.dtype for grad in grads if grad is not None}
    return not kinds.isdisjoint({torch.bfloat16, torch.float16})


def _several() -> bool:
    """Whether there are several processes."""
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    return known and distributed.get_world_size() > 1


def _own(node: Node) -> bool:
    """Whether a node is no function of torch."""
    return isinstance(node, BackwardCFunction) or "CppNode" in node.name()
