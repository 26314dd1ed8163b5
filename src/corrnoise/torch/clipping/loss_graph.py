"""The graph that autograd keeps of a loss, from what a model gave up to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

_OUTPUT = "corrnoise: outputs of models"  # a key of what torch notes of a node

# Behind these a trained layer begins: in one pass, and in Opacus's modes.
TAP = "_TapBackward"
_LAYERS = (TAP, "BackwardHookFunctionBackward")

SEVERAL = -1  # examples

Edge = tuple[Node, int]  # a node, and which of its results


def mark(outputs: Sequence[Tensor], sign: object) -> None:
    """Let the graphs of losses show where the outputs of a model were given.

    Whoever keeps a node keeps the whole graph; so the nodes keep the sign instead.
    """
    for each in outputs:
        if each.grad_fn is not None:
            results = notes(each.grad_fn).setdefault(_OUTPUT, {})
            results.setdefault(each.output_nr, {})[sign] = each.dim() > 0


@dataclass(frozen=True)
class LossGraph:
    """A loss that ``backward`` is called on.

    Attributes:
        roots: the tensors.
        grads: that ``backward`` is given for them, if any.
        outputs: what the model gave.
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
        rows: int,
        views: int = 1,
    ) -> LossGraph | None:
        """From the roots to the outputs that have this sign; nothing if there are none.

        Where the model gives the loss itself, down to its last trained layers. What else the loss
        is computed from is left out: other models, and penalties on parameters.
        """
        below, outputs = dict[Node, list[Edge]](), dict[Edge, None]()
        todo = [(root.grad_fn, root.output_nr, False) for root in roots if root.grad_fn is not None]
        known = set(todo)
        for node, number, inside in todo:  # grows
            many = notes(node).get(_OUTPUT, {}).get(number, {}).get(sign)
            loss = inside or many is False  # a single number is a loss
            if many or (loss and node.name() in _LAYERS):
                outputs[node, number] = None
                continue
            below[node] = edges(node)
            news = [each for at in below[node] if (each := (*at, loss)) not in known]
            known.update(news)
            todo += news
        if not outputs:
            return None
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

    def shared(self) -> list[Node]:
        """What is computed of several examples."""
        return [node for node, one in self.nodes.items() if one == SEVERAL]

    def whose(self, edge: Edge) -> int | None:
        """The only example that a result is of, or ``SEVERAL``; nothing if no output is in it."""
        if edge in self.outputs:
            return SEVERAL
        node, number = edge
        one = self.nodes.get(node)
        name = node.name()
        parts = name == "UnbindBackward0" or (
            name == "SplitBackward0" and saved(node, "split_size") == 1
        )
        if (
            one == SEVERAL
            and parts
            and len(computed(node)) == self.rows
            and saved(node, "dim") == 0
        ):
            return number // self.views
        return one

    def _chosen(self, node: Node) -> int:
        """The only example that a node takes out of several."""
        sizes = saved(node, "self_sym_sizes")
        if saved(node, "dim") != 0 or not sizes or sizes[0] != self.rows:
            return SEVERAL
        if node.name() == "SelectBackward0":
            place = saved(node, "index")
        elif node.name() == "SliceBackward0" and computed(node)[0].shape[0] == 1:
            place = saved(node, "start")
        else:
            return SEVERAL
        return signed(place) % self.rows // self.views


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
