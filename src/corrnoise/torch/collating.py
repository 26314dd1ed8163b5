"""The collate function of a run: with empty batches, which random sampling draws now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from corrnoise.torch.draws import undisturbed

_PARTS = (torch.Tensor, Mapping, list, tuple)  # of a batch
_PLAIN = (bool, int, float, str, bytes)
_LOOKS = 3  # at how many batches


def collate(
    loader: DataLoader[Any], *, batch_first: bool, rand_on_empty: bool, views: int = 1
) -> Any:
    """The loader's collate function, with empty batches of the right shapes.

    Args:
        loader: the user's.
        batch_first: whether the examples are the first dimension.
        rand_on_empty: whether an empty batch has one row of zeros.
        views: rows of a batch for each example, which must stay side by side.
    """
    inner: Any = WithEmpty(loader, batch_first=batch_first, rand_on_empty=rand_on_empty)
    inner = InOrder(inner) if views > 1 else inner
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


class InOrder:
    """A collate function that was seen to keep the order of its rows, in the first batches.

    The views of an example are rows side by side, and are clipped as one. A collate function that
    sorts its rows, as by length, would have one example count several times.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate, self._left = collate, _LOOKS

    def __call__(self, batch: Any) -> Any:
        """The batch.

        Raises:
            ValueError: rows in reverse do not give the same batch in reverse.
        """
        made = self._collate(batch)
        if self._left and isinstance(batch, list) and len(cast(list[Any], batch)) > 1:
            self._left -= 1
            with undisturbed():
                turned = self._collate(batch[::-1])
                again = self._collate(batch)
            if _rows(made, len(batch)) == _rows(again, len(batch)):  # else it draws what it does
                self._check(made, turned, len(batch))
        return made

    def _check(self, made: Any, turned: Any, count: int) -> None:
        if _rows(made, count) != [rows[::-1] for rows in _rows(turned, count)]:
            raise ValueError(
                "collate_fn must keep the order of its rows with several views, got one that "
                "changes it: the views of an example are clipped as one, and must stay side by "
                "side; sort in the model, or train with views=1"
            )


def _rows(batch: Any, count: int) -> list[list[bytes]]:
    """The rows of every tensor that has one for each row of the batch, bit by bit."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return [
        [row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for row in rows]
        for tensor in tensors
        if tensor.dim() and len(tensor) == count
        for rows in [tensor.reshape(count, -1)]
    ]


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
