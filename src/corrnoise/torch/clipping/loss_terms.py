"""What autograd's graph of a loss shows: how it adds up, divides, compares and orders examples."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.graph import Node

from corrnoise.torch.clipping.loss_graph import (
    SEVERAL,
    Edge,
    LossGraph,
    computed,
    edges,
    saved,
    signed,
)

_MEAN = 1  # torch's number for reduction="mean"
_REDUCTIONS = {_MEAN: "mean", 2: "sum"}

_TERMS = ("AddBackward0", "SubBackward0", "NegBackward0")
_UNSCALED = (  # what a loss may be computed with that multiplies by no size of a batch
    *("Abs", "AddBackward", "Clamp", "Ctc", "Exp", "LinalgVectorNorm", "Log", "Neg", "Pow", "Relu"),
    *("Cat", "Gather", "Index", "MaskedFill", "Permute", "Select", "Sigmoid", "Slice", "Softplus"),
    *("Split", "Squeeze", "Stack", "SubBackward", "ToCopy", "Transpose", "Unbind", "UnsafeView"),
    *("Unsqueeze", "View"),
)
_PAIRS = (  # what is computed of two tensors, number by number
    *("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Maximum", "Minimum", "Where", "Hypot", "Atan2"),
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
    *("SoftMarginLoss", "KlDiv", "Xlogy"),
)
_DISTANCES = ("Cdist", "EuclideanDist", "Pdist")
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
    values = [(node.name(), _divided_by(node, loss.rows)) for node in loss.shared()]
    return [(name, value) for name, value in values if value is not None]


def reductions(loss: LossGraph) -> list[tuple[str, float]]:
    """How the terms that a loss adds up are taken over all outputs: each a "mean" or a "sum".

    With the number that multiplies it. Terms of every example by itself are a sum. Left out is what
    is computed with functions that are not known here, among them products with tensors.
    """
    found, alone = list[tuple[str, float]](), dict[int, float]()
    roots = zip(loss.roots, loss.grads, strict=True)
    todo = [(root.grad_fn, 1.0) for root, grad in roots if grad is None]
    for node, factor in todo:  # grows
        if node is None or node not in loss.nodes:
            continue
        if (one := loss.nodes[node]) != SEVERAL:
            alone[one] = factor if _plain(loss, node, "sum") else 0.0
        elif node.name() in _TERMS and saved(node, "alpha") in (None, 1):
            todo += [(each, factor) for each, _ in edges(node)]
        elif times := _factor(node):
            todo += [(each, factor * times) for each, _ in edges(node)]
        elif (kind := _reduces(node, loss.rows)) and _plain(loss, node, kind):
            found.append((kind, factor))
    factors = set(alone.values())
    if len(alone) == loss.rows // loss.views and len(factors) == 1 and any(factors):
        found.append(("sum", factors.pop()))
    return found


def table(loss: LossGraph) -> bool:
    """Whether one number of each row meets those of all rows, or rows have distances.

    Distances of three dimensions are those within each example.
    """
    square = (loss.rows, loss.rows)

    def spread(edge: Edge) -> Edge:
        """What a tensor has repeated."""
        while _kind(edge[0]) in _SPREADS and edge not in loss.outputs:
            edge = edges(edge[0])[0]
        return edge

    for node in loss.shared():
        given = [edge for edge in edges(node) if loss.whose(edge) is not None]
        if _kind(node) in _DISTANCES:  # which torch cannot differentiate twice
            if len(_shape(node)) < 3 and len(given) == len(node.next_functions):
                return True
        elif _kind(node) in _PAIRS:
            shapes = [_shape(node), *(_shape(*edge) for edge in given)]
            large = square in [tuple(size for size in shape if size != 1) for shape in shapes]
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


def _divided_by(node: Node, rows: int) -> float | None:
    """The number that a node divides the loss by, if it does.

    Where it divides many numbers, a count of something: else it is a temperature, as it is where
    Python's own number divides more numbers than one of each row. What is learned is no count, nor
    is a number of Python's that multiplies: it may be a weight that grows.
    """
    single, other = _shape(node) == (), _constant(node)
    if other is not None:
        value, plain = float(other), other.dtype == torch.float64
        if _kind(node) == "Mul":
            return 1.0 / value if single and not plain and 0.0 < abs(value) < 1.0 else None
        counts = not plain or math.prod(_shape(node)) == rows
        return value if single or (counts and value >= 2 and value == round(value)) else None
    if not single:
        return None
    if _averages_targets(node):
        return float(saved(node, "total_weight"))
    if node.name().startswith("MeanBackward"):
        return float(saved(node, "self_sym_numel"))
    if saved(node, "reduction") == _MEAN and saved(node, "self") is not None:
        return float(saved(node, "self").numel())
    return None


def _constant(node: Node) -> Tensor | None:
    """The single number by which a node multiplies or divides, if it is not learned.

    Python's numbers are float64.
    """
    kind, given = _kind(node), [each is not None for each, _ in node.next_functions]
    if kind not in ("Div", "Mul") or given.count(True) != 1 or (kind == "Div" and not given[0]):
        return None
    found = saved(node, "other" if given[0] else "self")
    if isinstance(found, (int, float)):
        return torch.tensor(found, dtype=torch.float64)
    known = isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex()
    return found if known else None


def _factor(node: Node) -> float:
    """What a node multiplies by, if it is a single number; else 0."""
    number = _constant(node)
    if number is None or not float(number):
        return 0.0
    return float(number) if _kind(node) == "Mul" else 1.0 / float(number)


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


def _plain(loss: LossGraph, top: Node, kind: str) -> bool:
    """Whether no size of a batch comes in under a node that takes a "mean" or a "sum"."""
    under, outputs = {top: None}, {node for node, _ in loss.outputs}
    todo = [top]
    for node in todo:  # grows
        news = [at for at, _ in edges(node) if at in loss.nodes and at not in under]
        under.update(dict.fromkeys(news))
        todo += dict.fromkeys(news)
    names = (*_UNSCALED, "Sum") if kind == "sum" else _UNSCALED
    for node in under:
        one, reduction = loss.nodes[node] != SEVERAL, saved(node, "reduction")
        if node in outputs or (node is top and not one):
            continue
        if one and (reduction or node.name().startswith("Mean")):
            continue
        if reduction or (reduction is None and not node.name().startswith(names)):
            return False
    return True


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
