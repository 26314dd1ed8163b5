"""Whether a model treats the examples of a batch apart, as clipping each of them needs."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from corrnoise.torch.clipping.fallback import examples_first, tensors
from corrnoise.torch.clipping.hook import Hook
from corrnoise.torch.clipping.layers import Layer
from corrnoise.torch.looking import check_buffers, looking, noted, same_draws

# What other rows may change by where nothing varies by itself, relative: the shapes are the same,
# and so are the additions.
_LEAST = 1e-6

_ADDED = 1e-5  # what additions in float32 may change of a sum, relative

_OUTPUT = "the output"

_SHIFTS = 8  # ways to replace rows that are tried until one changes something

_Call = tuple[str, list[Tensor]]  # of a layer, by a name, and what it was given; the output at last


class MixedError(ValueError):
    """A model does not treat the examples of a batch apart."""


class Separate:
    """Looks at a model's first batch of several examples in training mode, and never again.

    The model runs without gradients, each time from the same buffers and with the same random
    numbers: on a few examples alone, twice on the whole batch, and on batches in which the first
    half, the second half or one in the middle is replaced by others. Nothing of those that stay may
    change then: neither what trained layers are given of them, nor the outputs, nor buffers. And
    trained layers must have one row for each example. A first batch in evaluation mode is looked at
    as well. A single number among the outputs, such as a loss, is only noted if it is no sum over
    examples: perhaps nobody trains on it.

    Args:
        model: whoever watches its calls must look away during the check.
        layers: with trained parameters. They are watched from now on: a model that is compiled
            later would not know of hooks that come then.
        beside: layers that are only looked at for what they are given.

    Attributes:
        mixed: which of the floating-point outputs are such numbers.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], beside: Sequence[Layer] = ()
    ) -> None:
        self._model, self._layers = model, layers
        self.mixed: list[int] = []
        self._modes: set[bool] = set()  # in which it was looked at: whether for training
        self._given: Callable[[Layer, Any], None] | None = None
        self._gave: Callable[[Layer, Any], None] | None = None
        self._handles: list[Any] = []
        for layer in layers:
            self._watch(layer)
        for layer in beside:
            self._watch(layer, gives=False)

    def check(self, args: Any, kwargs: Any, examples: int) -> None:
        """Raise if one example changes what the model does with the others.

        Args:
            args: of the call.
            kwargs: of the call.
            examples: in the batch; a single one says nothing.
        """
        if not self._handles or examples < 2 or self._model.training in self._modes:
            return
        seen = False
        batch, whole = _Batch(args, kwargs, examples), list[_Call]()
        # Here alone: whoever leaves ``catch_warnings`` has Python say again what it has said.
        with torch.no_grad(), looking(self._model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left = self._run(batch.whole(), lambda *call: whole.append(call))
            few = _Few(whole, examples)
            with _explained():
                self._run(batch.first(), few, batch.check_rows)
            again = _Again(whole, examples)
            self._run(batch.whole(), again)
            limit = again.limit()
            half, every = examples // 2, list(range(examples))
            for gone in (every[:half], every[half:], [half]):
                other = batch.replaced(gone)
                if other is not None:
                    seen = True
                    with _explained():
                        found = self._run(other, _Others(whole, few, gone, limit))
                    check_buffers(left, found)
            self.mixed = self._mixed(batch, whole[-1][1], limit)
        if seen:  # not all rows were equal
            self._modes.add(self._model.training)
        if True in self._modes:
            self.close()

    def close(self) -> None:
        """Watch no layer any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _mixed(self, batch: _Batch, outputs: Sequence[Tensor], limit: float) -> list[int]:
        """Which of the outputs are single numbers that are neither sums nor means over examples.

        For those that are, f with one half replaced and f with the other half replaced add up to f
        with none and f with both replaced.
        """
        first, second = batch.orders_of_halves()
        places = [i for i, each in enumerate(outputs) if not each.dim()]
        if not places or first is None or second is None:
            return []
        half = len(first) // 2
        found = [[outputs[i] for i in places]]
        last: list[Tensor] = []

        def keep(_: str, given: list[Tensor]) -> None:
            last[:] = given

        for order in (first, second, first[:half] + second[half:]):
            with _explained():
                self._run(batch.in_order(order), keep)
            found.append([last[i] for i in places if i < len(last)])
        if len({len(some) for some in found}) > 1:
            return []
        mixed: list[int] = []
        for place, *values in zip(places, *found, strict=True):
            whole, one, other, both = (float(value) for value in values)
            share = limit + _ADDED + 4 * torch.finfo(values[0].dtype).eps
            if abs(one + other - both - whole) > share * max(map(abs, (whole, one, other, both))):
                mixed.append(place)
        return mixed

    def _run(
        self,
        arguments: tuple[Any, Any],
        see: Callable[[str, list[Tensor]], None],
        gave: Callable[[Layer, Any], None] | None = None,
    ) -> dict[str, Tensor]:
        """The buffers that are left.

        Args:
            arguments: of the model.
            see: gets what layers are given, and the outputs at last. What it does not keep is free
                before the next layer runs.
            gave: gets what layers give.
        """

        def given(layer: Layer, inputs: Any) -> None:
            leaves = map(_by_rows, pytree.tree_leaves(inputs, is_leaf=_is_packed))
            see(f"the layer {layer.name!r}", [x for x in leaves if isinstance(x, Tensor)])

        same_draws()
        self._given, self._gave = given, gave
        try:
            args, kwargs = arguments
            outputs, left = noted(self._model, lambda: tensors(self._model(*args, **kwargs)))
        finally:
            self._given = self._gave = None
        see(_OUTPUT, outputs)
        return left

    def _watch(self, layer: Layer, *, gives: bool = True) -> None:
        # Where the model is a layer itself, this is called once more, without keywords, after it
        # was removed.
        def before(_: nn.Module, args: Any, kwargs: Any = None) -> None:
            if self._given is not None:
                self._given(layer, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if self._gave is not None:
                self._gave(layer, output)

        early = layer.module.register_forward_pre_hook(Hook(before), with_kwargs=True)
        self._handles.append(early)
        if gives:
            self._handles.append(layer.module.register_forward_hook(Hook(after)))


@contextmanager
def _explained() -> Generator[None]:
    """Says why the model ran on a batch that the loop has not given it, if it fails there."""
    try:
        yield
    except (MixedError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise MixedError(
            "the model must run on a few examples of a batch, and with others in the place of some "
            f"of them, to see that it treats them apart, but it raises {type(error).__name__}: "
            f"{error}. Give what belongs to examples as tensors with one row for each, and let "
            "packed sequences be sorted by torch (enforce_sorted=False): nothing was released"
        ) from error


class _Batch:
    """The arguments of a call, whose tensors with as many rows as examples are the batch."""

    def __init__(self, args: Any, kwargs: Any, examples: int) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs))
        self._examples, self._rows = examples, _few(examples)

    def whole(self) -> tuple[Any, Any]:
        return self._with(lambda leaf: leaf)

    def first(self) -> tuple[Any, Any]:
        """A few examples."""
        return self._with(lambda leaf: leaf[: self._rows])

    def replaced(self, gone: Sequence[int]) -> tuple[Any, Any] | None:
        """With others in the place of some examples, if any of these then differs."""
        order = self._order(gone)
        return None if order is None else self.in_order(order)

    def in_order(self, order: list[int]) -> tuple[Any, Any]:
        """With these examples."""
        return self._with(functools.partial(_rows, order=order))

    def orders_of_halves(self) -> tuple[list[int] | None, list[int] | None]:
        """With others in the place of the first half, and of the second."""
        half, every = self._examples // 2, list(range(self._examples))
        return self._order(every[:half]), self._order(every[half:])

    def _order(self, gone: Sequence[int]) -> list[int] | None:
        kept = sorted(set(range(self._examples)) - set(gone))
        for shift in range(min(len(kept), _SHIFTS)):
            order = list(range(self._examples))
            for place, row in enumerate(gone):
                order[row] = kept[(place + shift) % len(kept)]
            if not all(leaf[order].equal(leaf) for leaf in self._leaves if self._many(leaf)):
                return order
        return None

    def check_rows(self, layer: Layer, output: Any) -> None:
        """Raise if a layer's first dimension is the batch by chance: by its size alone."""
        for tensor in examples_first(layer.module, tensors(output)):
            if tensor.dim() and len(tensor) not in (1, self._rows):
                raise MixedError(
                    f"the layer {layer.name!r} must see one row for each of the {self._examples} "
                    f"examples of the batch, but for {self._rows} of them alone it has a tensor of "
                    f"shape {tuple(tensor.shape)}: its first dimension is not the batch; keep the "
                    "batch as the first dimension, or freeze the layer: nothing was released"
                )

    def _with(self, change: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
        # Copies, which the model may change in place.
        some = [change(leaf).clone() if self._many(leaf) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(some, self._spec)
        return args, kwargs

    def _many(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == self._examples


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)


def _by_rows(leaf: Any) -> Any:
    """Packed sequences as one row for each: what they add up to, however long others are."""
    if not isinstance(leaf, PackedSequence):
        return leaf
    return pad_packed_sequence(leaf, batch_first=True)[0].double().sum(1)


def _few(examples: int) -> int:
    return min(2, examples - 1)


def _rows(leaf: Tensor, order: list[int]) -> Tensor:
    return leaf[order]


class _Beside(ABC):
    """Sees a run beside that of the whole batch, tensor by tensor.

    From where other layers are called than there, only the outputs are looked at.
    """

    def __init__(self, whole: Sequence[_Call], examples: int) -> None:
        self._whole, self.examples, self._at = whole, examples, 0

    def __call__(self, name: str, found: list[Tensor]) -> None:
        """What a layer is given, or the outputs."""
        last = len(self._whole) - 1
        at = last if name == _OUTPUT else self._at
        self._at = at + 1
        if at > last or self._whole[at][0] != name or len(self._whole[at][1]) != len(found):
            self._at = last + 1
            return
        for number, (before, after) in enumerate(zip(self._whole[at][1], found, strict=True)):
            self.judge((at, number), name, before, after)

    @abstractmethod
    def judge(self, place: tuple[int, int], name: str, before: Tensor, after: Tensor) -> None:
        """See a tensor of this run, and what it was with the whole batch."""


class _Few(_Beside):
    """Finds the dimension of every tensor that grows with the number of examples, if one does."""

    def __init__(self, whole: Sequence[_Call], examples: int) -> None:
        super().__init__(whole, examples)
        self.rows = _few(examples)
        self.axes: dict[tuple[int, int], int | None] = {}
        self.skipped: set[tuple[int, int]] = set()

    def judge(self, place: tuple[int, int], name: str, before: Tensor, after: Tensor) -> None:
        if before.dim() == after.dim():
            pairs = list(zip(before.shape, after.shape, strict=True))
            axes = [k for k, (many, few) in enumerate(pairs) if many != few]
            if not axes:
                self.axes[place] = None
            elif (
                len(axes) == 1
                and pairs[axes[0]][0] * self.rows == pairs[axes[0]][1] * self.examples
            ):
                self.axes[place] = axes[0]
            else:  # such as the tokens that are no padding
                self.skipped.add(place)


class _Again(_Beside):
    """How much two equal runs differ."""

    _most, _low = 0.0, False

    def judge(self, place: tuple[int, int], name: str, before: Tensor, after: Tensor) -> None:
        self._low = self._low or before.dtype in (torch.bfloat16, torch.float16)
        self._most = max(self._most, float(_far(before, after)))

    def limit(self) -> float:
        """What may change without a reason, relative: ten times what did.

        Raises:
            ValueError: it is more than rounding.
        """
        if not self._most <= (0.05 if self._low else 1e-3):
            raise MixedError(
                "the model must do the same with the same batch and the same random numbers, but "
                f"it changes by {self._most:.1%} from one call to the next: it keeps what it sees, "
                "or draws from a generator of its own; keep nothing of examples, and draw from "
                "torch's global generator: nothing was released"
            )
        return max(_LEAST, 10.0 * self._most)


class _Others(_Beside):
    """Raises if something of other examples has changed with one of them.

    What has no row for each example must not change at all, but for outputs, such as a loss.
    """

    def __init__(
        self, whole: Sequence[_Call], few: _Few, gone: Sequence[int], limit: float
    ) -> None:
        super().__init__(whole, few.examples)
        self._few, self._limit = few, limit
        self._kept = sorted(set(range(few.examples)) - set(gone))

    def judge(self, place: tuple[int, int], name: str, before: Tensor, after: Tensor) -> None:
        first = 0 if before.dim() and len(before) == self.examples else None
        axis = self._few.axes.get(place, first)
        known = axis is not None or (place in self._few.axes and name != _OUTPUT)
        if before.shape != after.shape or not known or place in self._few.skipped:
            return
        far = _far(before, after) if axis is None else self._far_rows(before, after, axis)
        if not far <= self._limit:
            what = name if name == _OUTPUT else f"the input of {name}"
            raise MixedError(
                "the model must treat the examples of a batch apart, but with others in the place "
                f"of some {what} changes for those that stay, by {float(far):.2%}; replace what "
                "mixes or sorts them, such as batch normalisation, or draws as many random numbers "
                "as other examples ask for: nothing was released"
            )

    def _far_rows(self, before: Tensor, after: Tensor, axis: int) -> Tensor:
        pair, examples = (before.movedim(axis, 0), after.movedim(axis, 0)), self.examples
        if len(pair[0]) % examples:
            return torch.zeros(())
        # Several rows of an example lie beside each other, or with those of others in between.
        ways = [[each.unflatten(0, (examples, -1)) for each in pair]]
        if len(pair[0]) > examples:
            ways.append([each.unflatten(0, (-1, examples)).transpose(0, 1) for each in pair])
        return torch.stack([_far(a[self._kept], b[self._kept]) for a, b in ways]).min()


def _far(before: Tensor, after: Tensor) -> Tensor:
    """How far two tensors are apart, relative; what is NaN in both is equal."""
    if before.shape != after.shape:
        return torch.full((), torch.inf)
    equal = (before == after) | (before.isnan() & after.isnan())
    far = (before.float() - after.float()).masked_fill(equal, 0.0)
    size = torch.linalg.vector_norm(before.float().nan_to_num(0.0, 0.0, 0.0))
    return torch.where(equal.all(), 0.0, torch.linalg.vector_norm(far) / size).cpu()
