"""The graph that autograd keeps of a loss, from what a model gave up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

_OUTPUT = "corrnoise: outputs of models"  # a key of what torch notes of a node
_MIXED = "corrnoise: numbers that mix examples"

TAP = "_TapBackward"  # behind which a trained layer begins, in one pass
_HOOKED = "BackwardHookFunctionBackward"  # which torch puts upon what a module with hooks gives

SEVERAL = -1  # examples

_PARTS = ("UnbindBackward", "SplitBackward", "SplitWithSizesBackward")

Edge = tuple[Node, int]  # a node, and which of its results


def mark(outputs: Sequence[Tensor], sign: object, rows: int) -> None:
    """Let the graphs of losses show where a model, or a layer of it, has given its outputs.

    Whoever keeps a node keeps the whole graph; so the nodes keep the sign instead.
    """
    for each in outputs:
        if each.grad_fn is not None:
            results = notes(each.grad_fn).setdefault(_OUTPUT, {})
            results.setdefault(each.output_nr, {})[sign] = rows


def mark_mixed(numbers: Sequence[Tensor], sign: object) -> None:
    """Let the graphs of losses show which numbers of a model are no sums over examples."""
    for each in numbers:
        if each.grad_fn is not None:
            notes(each.grad_fn)[_MIXED] = sign


@dataclass(frozen=True)
class LossGraph:
    """A loss that ``backward`` is called on.

    Attributes:
        roots: the tensors.
        grads: that ``backward`` is given for them, if any.
        outputs: what the model gave, or its last trained layers.
        nodes: of autograd, from the outputs to the roots, in the order in which they were computed;
            with the only example that each is of, or ``SEVERAL``.
        rows: of the batch.
        views: rows for each example, one after the other.
    """

    roots: list[Tensor]
    grads: list[Tensor | None]
    outputs: list[Edge]
    nodes: dict[Node, int]
    rows: int
    views: int

    @staticmethod
    def follow(
        roots: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        sign: object,
        *,
        views: int = 1,
    ) -> LossGraph | None:
        """From the roots to the outputs that have this sign; nothing if there are none.

        What else the loss is computed from is left out: other models, and penalties on parameters.
        """
        below, outputs = dict[Node, list[Edge]](), dict[Edge, int]()
        todo = [(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None]
        known = set(todo)
        for node, number in todo:  # grows
            if rows := _given(node, number, sign):
                outputs[node, number] = rows
                continue
            below[node] = edges(node)
            news = [at for at in below[node] if at not in known]
            known.update(news)
            todo += news
        if len(set(outputs.values())) != 1:  # or there are batches of several sizes in it
            return None
        rows = next(iter(outputs.values()))
        graph = LossGraph(list(roots), list(grads), list(outputs), {}, rows, views)
        order = TopologicalSorter(
            {node: [at[0] for at in found if at not in outputs] for node, found in below.items()}
        )
        for node in order.static_order():
            ones = {one for edge in below.get(node, []) if (one := graph.whose(edge)) is not None}
            if ones:
                one = ones.pop() if len(ones) == 1 else SEVERAL
                graph.nodes[node] = graph._chosen(node) if one == SEVERAL else one
        return graph

    def mixed(self, sign: object) -> bool:
        """Whether numbers of the model that are no sums over examples are in the loss."""
        return any(notes(node).get(_MIXED) is sign for node in self.nodes)

    def shared(self) -> list[Node]:
        """What is computed of several examples."""
        return [node for node, one in self.nodes.items() if one == SEVERAL]

    def whose(self, edge: Edge) -> int | None:
        """The only example that a result is of, or ``SEVERAL``; nothing if no output is in it."""
        if edge in self.outputs:
            return SEVERAL
        node, number = edge
        one, parts = self.nodes.get(node), len(computed(node))
        if one == SEVERAL and node.name().startswith(_PARTS) and saved(node, "dim") == 0:
            if parts == self.rows:  # each row, or what belongs to each
                return number // self.views
            if parts * self.views == self.rows:
                return number
        return one

    def _chosen(self, node: Node) -> int:
        """The only example that a node takes out of several."""
        sizes = saved(node, "self_sym_sizes") or ()
        if self.rows not in sizes:
            return SEVERAL
        dim, places = _taken(node, self.views)
        if dim % len(sizes) != sizes.index(self.rows):
            return SEVERAL
        chosen = {place % self.rows // self.views for place in places}
        return chosen.pop() if len(chosen) == 1 else SEVERAL


def _given(node: Node, number: int, sign: object) -> int:
    """The rows of the batch for which a model gave this result, or 0 if it is none."""

    def rows(node: Node | None, number: int) -> int:
        return 0 if node is None else notes(node).get(_OUTPUT, {}).get(number, {}).get(sign, 0)

    if found := rows(node, number):
        return found
    below = node.next_functions if node.name() == _HOOKED else ()
    return rows(*below[number]) if number < len(below) else 0


def _taken(node: Node, most: int) -> tuple[int, list[int]]:
    """The dimension along which a node takes a few places, and which; none if it takes others."""
    name = node.name()
    if name == "SelectBackward0":
        return signed(saved(node, "dim")), [signed(saved(node, "index"))]
    if name == "SliceBackward0" and saved(node, "step") == 1:
        dim, first = signed(saved(node, "dim")), signed(saved(node, "start"))
        count = int(computed(node)[0].shape[dim])
        return dim, list(range(first, first + count)) if count <= most else []
    places, dim = None, 0
    if name == "IndexSelectBackward0":
        places, dim = saved(node, "index"), signed(saved(node, "dim"))
    elif name == "IndexBackward0":
        places = saved(node, "indices")[0]
    if places is None or places.dtype == torch.bool or places.numel() > most:
        return dim, []
    return dim, places.reshape(-1).tolist()


def edges(node: Node) -> list[Edge]:
    """What a node was computed from."""
    return [(each, number) for each, number in node.next_functions if each is not None]


def notes(node: Node) -> dict[str, Any]:
    """What anybody may note of a node, as long as it lives; torch types it as a method."""
    noted: Any = node.metadata
    return noted


def computed(node: Node) -> Sequence[Any]:
    """What torch notes of each result of a node: its ``shape`` and ``dtype``."""
    known: Any = getattr(node, "_input_metadata")  # noqa: B009
    return known


def saved(node: Node, name: str) -> Any:
    """What a node keeps of its arguments, or nothing."""
    return getattr(node, f"_saved_{name}", None)


def signed(number: int) -> int:
    """A place or dimension, of which torch keeps negative ones without their sign."""
    return number - 2**64 if number >= 2**63 else number
