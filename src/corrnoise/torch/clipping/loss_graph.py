"""The graph that autograd keeps of a loss: what it divides by, and its second derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

_LEAST = 1e-4  # what may be rounding, relative
_MEAN = 1  # torch's number for reduction="mean"
_REDUCTIONS = {_MEAN: "mean", 2: "sum"}
_OUTPUT = "corrnoise: output of a model"  # a key of what torch notes of a node

# Behind these a trained layer begins: in one pass, and in Opacus's modes.
_LAYERS = ("_TapBackward", "BackwardHookFunctionBackward")

_DISTANCES = ("Cdist", "EuclideanDist")
_TERMS = ("AddBackward0", "SubBackward0", "NegBackward0")
_UNSCALED = (  # what a loss may be computed with that multiplies by no size of a batch
    *("Abs", "AddBackward", "Clamp", "Ctc", "Exp", "LinalgVectorNorm", "Log", "Neg", "Pow", "Relu"),
    *("Gather", "IndexBackward", "Permute", "Select", "Sigmoid", "Slice", "Softplus", "Squeeze"),
    *("Stack", "SubBackward", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
)
_ORDERS = ("Topk", "Sort", "Kthvalue", "Max", "Min", "Median", "Amax", "Amin")


def mark(outputs: Sequence[Tensor], sign: object) -> None:
    """Let the graphs of losses show where the outputs of a model were given.

    Whoever keeps a node keeps the whole graph; so the nodes keep the sign instead.
    """
    for each in outputs:
        if each.grad_fn is not None:
            _notes(each.grad_fn)[_OUTPUT] = sign, each.dim() > 0


@dataclass(frozen=True)
class LossGraph:
    """A loss that ``backward`` is called on.

    Attributes:
        roots: the tensors.
        grads: that ``backward`` is given for them, if any.
        nodes: of autograd, down to what the model gave.
        outputs: where the model's part begins.
    """

    roots: list[Tensor]
    grads: list[Tensor | None]
    nodes: list[Node]
    outputs: list[GradientEdge]

    @staticmethod
    def follow(
        roots: Sequence[Tensor], grads: Sequence[Tensor | None], sign: object
    ) -> LossGraph | None:
        """From the roots to the outputs that have this sign; nothing if there are none.

        Where the model gives the loss itself, down to its last trained layer.
        """
        nodes, found, known, ours = list[Node](), dict[Node, GradientEdge](), set[Node](), False
        todo = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
        for node, number in todo:  # grows
            if node in known:
                continue
            known.add(node)
            here, many = _notes(node).get(_OUTPUT, (None, False))
            ours = ours or here is sign
            if (here is sign and many) or node.name() in _LAYERS:
                found[node] = GradientEdge(node, number)
                continue
            nodes.append(node)
            todo += [(each, at) for each, at in node.next_functions if each is not None]
        if not ours or not found:
            return None
        outputs = list(found.values())
        if len(found) > 1:  # one that others come from would be differentiated through them
            below = set(_below(list(found)))
            outputs = [edge for node, edge in found.items() if node not in below]
        return LossGraph(list(roots), list(grads), nodes, outputs)

    def entropies(self) -> list[Entropy]:
        """Each mean that torch's cross entropy takes."""
        return [
            Entropy(float(_saved(node, "total_weight")), _differ(_saved(node, "weight")))
            for node in self.nodes
            if _averages_targets(node)
        ]

    def divisors(self) -> list[tuple[str, float]]:
        """What numbers of the loss are divided by, by the names of the nodes that do it."""
        values = [(node.name(), _divided_by(node)) for node in self.nodes]
        return [(name, value) for name, value in values if value is not None]

    def reductions(self, rows: int) -> list[str]:
        """How the terms that a loss adds up are taken over all outputs: each a "mean" or a "sum".

        Left out are terms that something multiplies or divides, which may be the size of the batch,
        and what is computed with functions that are not known here.

        Args:
            rows: of the batch.
        """
        found, outputs = list[str](), {edge.node for edge in self.outputs}
        todo = [
            root.grad_fn
            for root, grad in zip(self.roots, self.grads, strict=True)
            if grad is None and root.grad_fn is not None
        ]
        for node in todo:  # grows
            if node.name() in _TERMS and _saved(node, "alpha") in (None, 1):
                todo += [each for each, _ in node.next_functions if each is not None]
            elif kind := _reduces(node, rows):
                below = set(_below([node], outputs))
                apart = all(_unscaled(each, kind) for each in below - outputs)
                found += [kind] * (apart and bool(below & outputs))  # no penalty on parameters
        return found

    def table(self, rows: int) -> bool:
        """Whether one number of each row meets those of all rows, or rows have distances."""
        return any(_meet(node, rows) for node in self.nodes)

    def order(self, rows: int) -> str:
        """What puts one number of each row in order, such as a maximum, or nothing."""
        found = (node.name() for node in self.nodes if _sorts(node, rows))
        return next((name.removesuffix("0").removesuffix("Backward") for name in found), "")

    def coupled(self, rows: int, views: int) -> bool:
        """Whether gradients of some examples change with the outputs for others.

        With one half of the examples for the others, and with every second one. Functions of
        somebody's own might bear only one backward pass, and wait for other processes.

        Args:
            rows: of the batch.
            views: rows for each example, one after the other.
        """
        if _several() or any(map(_own, self.nodes)):
            return False
        examples = range(rows // views)
        halves = [i < len(examples) // 2 for i in examples], [i % 2 == 0 for i in examples]
        with torch.enable_grad():
            grads: Any = torch.autograd.grad(
                self.roots, self.outputs, self.grads, create_graph=True, allow_unused=True
            )
            some = [
                (edge, grad, ways)
                for edge, grad in zip(self.outputs, grads, strict=True)
                if grad is not None and grad.requires_grad and (ways := _ways(grad.shape, rows))
            ]
            # Where the examples may lie along either of two dimensions, they must mix in both.
            choices = range(max((len(ways) for _, _, ways in some), default=0))
            chosen = [[(e, g, ways[c % len(ways)]) for e, g, ways in some] for c in choices]
            return bool(chosen) and all(
                any(_mixed(each, half, views) for half in halves) for each in chosen
            )


@dataclass(frozen=True)
class Entropy:
    """A mean over targets.

    Attributes:
        count: of the targets that count, or the sum of their weights.
        weighted: whether classes have weights that differ.
    """

    count: float
    weighted: bool


_Way = Callable[[Tensor], Tensor]  # a tensor with one row of numbers for each row of the batch


def _mixed(some: Sequence[tuple[GradientEdge, Tensor, _Way]], half: list[bool], views: int) -> bool:
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
    each = [
        way(block).float().reshape(len(half), -1)
        for block, (_, _, way) in zip(found, some, strict=True)
        if block is not None
    ]
    if not each:
        return False
    norms = torch.linalg.vector_norm(torch.cat(each, 1), dim=1)
    return bool((norms[~chosen] > _LEAST * norms[chosen].mean()).any())


def _directions(values: Tensor) -> Tensor:
    """Numbers between 0.5 and 1.5 that no structure of a loss goes with."""
    places = torch.arange(values.numel(), device=values.device, dtype=torch.float32)
    return (1.0 + 0.5 * (places * 1.7).cos()).view(values.shape)


def _ways(shape: torch.Size, rows: int) -> list[_Way]:
    """How the rows of a batch may lie in a tensor."""

    def along(dim: int) -> _Way:
        return lambda x: x.movedim(dim, 0).reshape(rows, -1)

    found = [along(dim) for dim, size in enumerate(shape) if size == rows]
    if not found and shape and shape[0] and shape[0] % rows == 0:
        found = [
            lambda x: x.reshape(rows, -1),
            lambda x: x.unflatten(0, (-1, rows)).movedim(1, 0).reshape(rows, -1),
        ]
    return found


def _below(nodes: list[Node], ends: Set[Node] = frozenset()) -> Iterator[Node]:
    """What some nodes are computed from, without themselves, and with nothing behind the ends."""
    todo, known = list(nodes), set[Node]()
    for node in todo:  # grows
        for each, _ in node.next_functions:
            if each is not None and each not in known:
                known.add(each)
                todo += [] if each in ends else [each]
                yield each


def _notes(node: Node) -> dict[str, Any]:
    """What anybody may note of a node, as long as it lives; torch types it as a method."""
    notes: Any = node.metadata
    return notes


def _shape(node: Node) -> tuple[int, ...] | None:
    """Of what a node computed, where torch tells."""
    known: Any = getattr(node, "_input_metadata", None)
    return tuple(known[0].shape) if known else None


def _saved(node: Node, name: str) -> Any:
    return getattr(node, f"_saved_{name}", None)


def _averages_targets(node: Node) -> bool:
    return node.name().startswith("NllLoss") and _saved(node, "reduction") == _MEAN


def _differ(weights: Tensor | None) -> bool:
    return weights is not None and bool((weights != weights[0]).any())


def _divided_by(node: Node) -> float | None:
    """The number that a node divides the loss by, if it does.

    That is a number of Python's, in float64, only where it divides a single number: else it is a
    temperature.
    """
    single, other = _shape(node) == (), _saved(node, "other")
    if node.name() == "DivBackward0" and isinstance(other, Tensor) and other.numel() == 1:
        return float(other) if single or other.dtype != torch.float64 else None
    if not single:
        return None
    if _averages_targets(node):
        return float(_saved(node, "total_weight"))
    if node.name().startswith("MeanBackward"):
        return float(_saved(node, "self_sym_numel"))
    if _saved(node, "reduction") == _MEAN and _saved(node, "self") is not None:
        return float(_saved(node, "self").numel())
    return None


def _reduces(node: Node, rows: int) -> str:
    """Whether a node takes one "mean" or "sum" of numbers for all rows, or nothing."""
    name, many = node.name(), _saved(node, "self")
    if name in ("MeanBackward0", "SumBackward0"):
        kind = "mean" if name == "MeanBackward0" else "sum"
        count = math.prod(_saved(node, "self_sym_sizes"))
    else:  # one of torch's losses
        if many is None or _saved(node, "weight") is not None:
            return ""
        kind, count = _REDUCTIONS.get(_saved(node, "reduction"), ""), many.numel()
    return kind if count % rows == 0 else ""


def _unscaled(node: Node, kind: str) -> bool:
    """Whether no size of a batch comes in by a node under one that takes a "mean" or a "sum"."""
    reduction = _saved(node, "reduction")
    names = (*_UNSCALED, "Sum") if kind == "sum" else _UNSCALED
    return node.name().startswith(names) if reduction is None else reduction == 0


def _meet(node: Node, rows: int) -> bool:
    """Whether one number of each row stands beside those of all rows, or rows have distances."""
    if _shape(node) != (rows, rows):
        return False
    if node.name().startswith(_DISTANCES):  # which torch cannot differentiate twice
        return True
    below = [_shape(each) for each, _ in node.next_functions if each is not None]
    return any(shape is not None and math.prod(shape) == rows for shape in below)


def _several() -> bool:
    """Whether there are several processes."""
    distributed = torch.distributed
    known = distributed.is_available() and distributed.is_initialized()
    return known and distributed.get_world_size() > 1


def _own(node: Node) -> bool:
    """Whether a node is no function of torch."""
    return isinstance(node, BackwardCFunction) or "CppNode" in node.name()


def _sorts(node: Node, rows: int) -> bool:
    """Whether a node compares one number of each row with those of others."""
    if not node.name().startswith(_ORDERS) or len(node.next_functions) != 1:
        return False
    below = node.next_functions[0][0]
    return below is not None and _shape(below) == (rows,)
