"""Empty batches, which random sampling draws now and then: the collate function of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

_PARTS = (torch.Tensor, Mapping, list, tuple)  # of a batch
_PLAIN = (bool, int, float, str, bytes)


def collate(loader: DataLoader[Any], *, batch_first: bool, rand_on_empty: bool) -> Any:
    """The loader's collate function, with empty batches of the right shapes."""
    inner = WithEmpty(loader, batch_first=batch_first, rand_on_empty=rand_on_empty)
    whole = rand_on_empty and hasattr(loader.dataset, "__getitems__")
    return WithStandIn(inner, batch_first=batch_first) if whole else inner


class WithEmpty:
    """A collate function with empty batches.

    An empty batch has the structure, the types and the shapes of a batch of one example, with no
    rows. With ``rand_on_empty`` it has one row of zeros, whose gradient the step replaces by zeros.
    """

    def __init__(self, loader: DataLoader[Any], *, batch_first: bool, rand_on_empty: bool) -> None:
        self._collate, self._dataset = loader.collate_fn, loader.dataset
        self._dim, self._stand_in = 0 if batch_first else 1, rand_on_empty

    def __call__(self, batch: list[Any]) -> Any:
        """The batch, or an empty one."""
        if len(batch):
            return self._collate(batch)
        return self._emptied(self._collate([self._dataset[0]]))

    def _emptied(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if self._stand_in or part.dim() <= self._dim:
                return torch.zeros_like(part)
            return part.narrow(self._dim, 0, 0)
        if isinstance(part, Mapping):
            named = cast(Mapping[Any, Any], part)
            return {name: self._emptied(value) for name, value in named.items()}
        if isinstance(part, (list, tuple)):
            values = cast(Sequence[Any], part)
            if not any(isinstance(value, _PARTS) for value in values):
                return []  # of what the example had, such as its text: nothing of it may be left
            emptied = [self._emptied(value) for value in values]
            return type(part)(*emptied) if hasattr(part, "_fields") else emptied  # a named tuple
        if part is None or isinstance(part, _PLAIN):
            return None if part is None else type(part)()
        raise ValueError(
            f"a batch must consist of tensors, plain values, and lists and dictionaries of them, "
            f"got a {type(part).__name__} for an empty one; return a tensor from collate_fn"
        )


class WithStandIn:
    """A collate function whose empty batches have one row of zeros.

    It is for datasets that read a whole batch at once: an empty one is not an empty list there, but
    tensors with no rows.
    """

    def __init__(self, collate: Callable[[Any], Any], *, batch_first: bool) -> None:
        self._collate, self._dim = collate, 0 if batch_first else 1

    def __call__(self, batch: Any) -> Any:
        """The batch, or one row that stands for none."""
        return self._filled(self._collate(batch))

    def _filled(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if part.dim() <= self._dim or part.shape[self._dim]:
                return part
            shape = list(part.shape)
            shape[self._dim] = 1
            return part.new_zeros(shape)
        if isinstance(part, Mapping):
            named = cast(Mapping[Any, Any], part)
            return {name: self._filled(value) for name, value in named.items()}
        if isinstance(part, (list, tuple)):
            values = cast(Sequence[Any], part)
            return [self._filled(value) for value in values]
        return part
