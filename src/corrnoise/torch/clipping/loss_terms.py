"""What autograd's graph of a loss shows: how it adds up, divides, compares and orders examples."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from corrnoise.torch.clipping.loss_graph import Edge, LossGraph, computed, edges, saved, signed

_MEAN = 1  # torch's number for reduction="mean"
_REDUCTIONS = {_MEAN: "mean", 2: "sum"}

_TERMS = ("AddBackward0", "SubBackward0", "NegBackward0")
_UNSCALED = (  # what a loss may be computed with that multiplies by no size of a batch
    *("Abs", "AddBackward", "Clamp", "Ctc", "Exp", "LinalgVectorNorm", "Log", "Neg", "Pow", "Relu"),
    *("Gather", "IndexBackward", "Permute", "Select", "Sigmoid", "Slice", "Softplus", "Squeeze"),
    *("Stack", "SubBackward", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze", "View"),
)
_PAIRS = (  # what is computed of two tensors, number by number
    *("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Maximum", "Minimum", "Where", "Hypot", "Atan2"),
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
    *("SoftMarginLoss", "KlDiv", "Xlogy"),
)
_DISTANCES = ("Cdist", "EuclideanDist")
_SPREADS = ("Expand", "Repeat")
_ORDERS = (
    *("Topk", "Sort", "Kthvalue", "Max", "Min", "Median", "Nanmedian", "Amax", "Amin", "Aminmax"),
    *("Cummax", "Cummin"),
)


def class_weights(loss: LossGraph) -> bool:
    """Whether torch's cross entropy divides by weights of classes of several examples."""
    return any(_averages_targets(node) and _differ(node) for node in loss.shared())


def parts(loss: LossGraph) -> float | None:
    """How many targets torch's cross entropy takes a mean over, if no multiple of the rows."""
    counts = [
        float(saved(node, "total_weight")) for node in loss.shared() if _averages_targets(node)
    ]
    return next((count for count in counts if count > loss.rows and count % loss.rows), None)


def divisors(loss: LossGraph) -> list[tuple[str, float]]:
    """What numbers of several examples are divided by, by the names of the nodes that do it."""
    values = [(node.name(), _divided_by(node)) for node in loss.shared()]
    return [(name, value) for name, value in values if value is not None]


def reductions(loss: LossGraph) -> list[str]:
    """How the terms that a loss adds up are taken over all outputs: each a "mean" or a "sum".

    Left out are terms that something multiplies or divides, which may be the size of the batch,
    what is computed with functions that are not known here, and terms of one example.
    """
    found = list[str]()
    shared, outputs = set(loss.shared()), {node for node, _ in loss.outputs}
    todo = [root.grad_fn for root, grad in zip(loss.roots, loss.grads, strict=True) if grad is None]
    for node in todo:  # grows
        if node is None or node not in shared:
            continue
        if node.name() in _TERMS and saved(node, "alpha") in (None, 1):
            todo += [each for each, _ in edges(node)]
        elif kind := _reduces(node, loss.rows):
            under = [node]
            for each in under:  # grows
                under += {at for at, _ in edges(each)}.intersection(loss.nodes).difference(under)
            found += [kind] * all(
                _unscaled(each, kind) for each in under[1:] if each not in outputs
            )
    return found


def table(loss: LossGraph) -> bool:
    """Whether one number of each row meets those of all rows, or rows have distances."""
    square = (loss.rows, loss.rows)

    def spread(edge: Edge) -> Edge:
        """What a tensor has repeated."""
        while _kind(edge[0]) in _SPREADS and edge not in loss.outputs:
            edge = edges(edge[0])[0]
        return edge

    for node in loss.shared():
        given = [edge for edge in edges(node) if loss.whose(edge) is not None]
        if _kind(node) in _DISTANCES:  # which torch cannot differentiate twice
            if _shape(node) == square and len(given) == len(node.next_functions):
                return True
        elif _kind(node) in _PAIRS:
            large = square in (_shape(node), *(_shape(*edge) for edge in given))
            if large and all(math.prod(_shape(*spread(edge))) == loss.rows for edge in given):
                return True
    return False


def order(loss: LossGraph) -> str:
    """What puts numbers of all rows in order, such as a maximum, or nothing."""
    found = (_kind(node) for node in loss.shared() if _orders(node, loss.rows))
    return next(found, "")


def _kind(node: Node) -> str:
    return node.name().partition("Backward")[0]


def _shape(node: Node, number: int = 0) -> tuple[int, ...]:
    return tuple(computed(node)[number].shape)


def _averages_targets(node: Node) -> bool:
    return node.name().startswith("NllLoss") and saved(node, "reduction") == _MEAN


def _differ(node: Node) -> bool:
    weights: Tensor | None = saved(node, "weight")
    return weights is not None and bool((weights != weights[0]).any())


def _divided_by(node: Node) -> float | None:
    """The number that a node divides the loss by, if it does.

    Where it divides many numbers, a count of something: else it is a temperature. What is learned
    is no count.
    """
    single, other = _shape(node) == (), saved(node, "other")
    if node.name() == "DivBackward0" and isinstance(other, Tensor) and other.numel() == 1:
        value: Any = other.item()
        if node.next_functions[1][0] is not None or isinstance(value, complex):
            return None
        counts = other.dtype != torch.float64 and value >= 2 and value == round(value)
        return float(value) if single or counts else None
    if not single:
        return None
    if _averages_targets(node):
        return float(saved(node, "total_weight"))
    if node.name().startswith("MeanBackward"):
        return float(saved(node, "self_sym_numel"))
    if saved(node, "reduction") == _MEAN and saved(node, "self") is not None:
        return float(saved(node, "self").numel())
    return None


def _reduces(node: Node, rows: int) -> str:
    """Whether a node takes one "mean" or "sum" of numbers for all rows, or nothing."""
    name, many = node.name(), saved(node, "self")
    if name in ("MeanBackward0", "SumBackward0"):
        kind = "mean" if name == "MeanBackward0" else "sum"
        count = math.prod(saved(node, "self_sym_sizes"))
    else:  # one of torch's losses
        if many is None or saved(node, "weight") is not None:
            return ""
        kind, count = _REDUCTIONS.get(saved(node, "reduction"), ""), many.numel()
    return kind if count % rows == 0 else ""


def _unscaled(node: Node, kind: str) -> bool:
    """Whether no size of a batch comes in by a node under one that takes a "mean" or a "sum"."""
    reduction = saved(node, "reduction")
    names = (*_UNSCALED, "Sum") if kind == "sum" else _UNSCALED
    return node.name().startswith(names) if reduction is None else reduction == 0


def _orders(node: Node, rows: int) -> bool:
    """Whether a node compares numbers of each row with those of others.

    Of all numbers together only where there is one for each row: a maximum that is taken away from
    all cancels in a softmax.
    """
    if _kind(node) not in _ORDERS:
        return False
    sizes, dims = _shape(*edges(node)[0]), saved(node, "dim")
    if dims in (None, ()):
        return math.prod(sizes) == rows
    dims = {signed(dim) % len(sizes) for dim in (dims if isinstance(dims, tuple) else (dims,))}
    if math.prod(sizes) == rows:
        return any(sizes[dim] == rows for dim in dims)
    return sizes[0] == rows and dims == {0}
