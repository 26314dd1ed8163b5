"""Packed sequences in Opacus's recurrent layers, whose rows torch sorts by their lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from corrnoise.torch.calls import ModelCalls
from corrnoise.torch.clipping.hook import Hook


class PackedOrders:
    """Puts the gradients of recurrent layers into the order of the batch.

    Opacus takes the gradients of a packed sequence in the order of its rows. Beside those of other
    layers, each example would be clipped together with another one.

    Args:
        layers: such layers of the model.
        calls: of the model.
    """

    def __init__(self, layers: Iterable[nn.Module], calls: ModelCalls) -> None:
        self._calls = calls
        # For each parameter, where each example is in the rows of each call of the model.
        self._orders: dict[nn.Parameter, list[tuple[int, Tensor | None]]] = {}
        self._handles = [
            layer.register_forward_pre_hook(Hook(self._saw), with_kwargs=True) for layer in layers
        ]

    def forget(self) -> None:
        """A step ends, or begins again."""
        self._orders.clear()

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self.forget()

    def restore(self, params: Sequence[nn.Parameter]) -> None:
        """Sort the rows of these parameters' gradients as the batches are."""
        for param in params:
            orders = [order for _, order in self._orders.get(param, ())]
            if all(order is None for order in orders):
                continue
            each: Any = param.grad_sample  # type: ignore[attr-defined]
            some = each if isinstance(each, list) else [each]
            if len(some) > len(orders):
                raise ValueError(
                    "the gradients of a batch must be cleared before the next one, got those of an "
                    "earlier step too; call optimizer.zero_grad(): nothing was released"
                )
            latest = orders[-len(some) :]  # gradients of those before were cleared
            found = [g if o is None else g[o] for g, o in zip(some, latest, strict=True)]
            param.grad_sample = found if isinstance(each, list) else found[0]  # type: ignore
        self.forget()

    def _saw(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        number = self._calls.number
        if number < 0 or not part.training or not torch.is_grad_enabled():
            return
        first = args[0] if args else kwargs.get("input")
        order = first.unsorted_indices if isinstance(first, PackedSequence) else None
        for param in part.parameters():
            known = self._orders.setdefault(param, [])
            if not known or known[-1][0] != number:
                known.append((number, order))
            elif not _equal(known[-1][1], order):
                raise ValueError(
                    f"a {type(part).__name__} must be given packed sequences of one order in each "
                    "call of the model, got two, whose gradients cannot be told apart; pad the "
                    "sequences, and do not pack them: nothing was released"
                )


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.equal(second)
