"""Watches the layers of a model: what each call saw, and the gradient that came back to it.

While a layer runs, its trained parameters stand aside as constants, so that autograd computes no
gradients for them; the call's output goes through a ``_Tap``, which keeps the inputs for the
backward pass and notes the gradient of the output there. The model itself stays as it is: the same
classes, the same parameters, the same ``state_dict``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from corrnoise.torch.clipping import fallback, handlers
from corrnoise.torch.clipping.hook import Hook
from corrnoise.torch.clipping.layers import Layer, layers
from corrnoise.torch.clipping.loop_loss import LoopLoss
from corrnoise.torch.clipping.parts import Part
from corrnoise.torch.clipping.separate import Separate
from corrnoise.torch.clipping.straight import straighten

# Torch has no public name for it.
_task: Any = torch._C._current_graph_task_id  # type: ignore[attr-defined]  # pyright: ignore


@dataclass(frozen=True)
class Call:
    """One call of a layer whose gradient came back.

    Attributes:
        layer: which.
        examples: how many it was for.
        number: which call of the whole model it belongs to.
        summed: whether the gradient is that of a sum over the rows of the batch.
        make: the parts of its parameters. A handler has made them already, so that what only small
            ones need is not kept; the fallback waits, since it runs the layer again.
    """

    layer: Layer
    examples: int
    number: int
    summed: bool
    make: Callable[[], Mapping[str, Part]]


class _Pending:
    """A call between forward and backward: its arguments, but for their tensors."""

    def __init__(
        self,
        recorder: Recorder,
        layer: Layer,
        spec: Any = None,
        plain: Mapping[int, Any] | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.recorder, self.layer, self.number = recorder, layer, recorder.number
        self.spec, self.plain, self.autocast = spec, plain or {}, autocast

    def complete(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        layer = self.layer
        if layer.handler is not None:
            with torch.autocast(grads[0].device.type, enabled=False):
                parts = layer.handler(layer.module, inputs, grads, layer.params)
            self._note(len(grads[0]), lambda: parts)
            return
        kept = iter(inputs)
        size = len(self.plain) + len(inputs)
        leaves = [self.plain[i] if i in self.plain else next(kept) for i in range(size)]
        arguments = pytree.tree_unflatten(leaves, self.spec)
        outputs = fallback.examples_first(layer.module, outputs)
        grads = fallback.examples_first(layer.module, grads)
        make = functools.partial(
            fallback.contribute,
            layer.module,
            layer.name,
            arguments,
            outputs,
            grads,
            layer.params,
            self.autocast,
        )
        self._note(len(grads[0]), make)

    def _note(self, examples: int, make: Callable[[], Mapping[str, Part]]) -> None:
        recorder = self.recorder
        recorder.calls.append(Call(self.layer, examples, self.number, recorder.summed, make))


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, token: Tensor, count: int, *tensors: Tensor) -> Any:
        outputs, inputs = tensors[:count], tensors[count:]
        ctx.pending, ctx.size = pending, len(inputs)
        ctx.blocked = False  # where a loss is only looked at
        # New tensors, neither views nor inputs, so that the model may go on to change them in
        # place. Layers that read their own output in the backward pass need theirs unchanged.
        shared = type(pending.layer.module) in handlers.OUTPUT_UNUSED
        outputs = tuple(_same(output) if shared else output.clone() for output in outputs)
        ctx.save_for_backward(*inputs, *(outputs if pending.layer.handler is None else ()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.blocked:
            return (None,) * (3 + len(grads) + ctx.size)
        return _complete(ctx, *grads)


@once_differentiable
def _complete(ctx: Any, *grads: Tensor) -> Any:
    saved = ctx.saved_tensors
    ctx.pending.complete(saved[: ctx.size], saved[ctx.size :], grads)
    return None, None, None, *grads, *(None for _ in range(ctx.size))


CALLED_TWICE = (
    "the model must be called once for each backward pass, got gradients of several calls; their "
    "rows might be different examples: make one module that calls it several times, or call "
    "backward after each: nothing was released"
)


CLOSED = (
    "steps must be taken before engine.close(), which ended the run; to train the model further, "
    "make a new optimizer, or begin another run: nothing was released"
)


def outside(layer: Layer) -> ValueError:
    """What to raise where a layer is called while its model does not run."""
    return ValueError(
        f"the layer {layer.name!r} must be called by the model that make_private saw, got a call "
        "from outside, whose rows might be other examples than the model's; call the model, or use "
        "torch.no_grad() where nothing is trained: nothing was released"
    )


COPIED = (
    "a private run trains the model that make_private saw, got a copy of it that was made since "
    "then, whose gradients are neither clipped nor noisy; call a copy in evaluation mode or under "
    "torch.no_grad(), or make it after engine.close()"
)


def backward_pass() -> int:
    """Which backward pass runs, or -1: checkpointing calls layers once more in it."""
    return _task()


def _same(tensor: Tensor) -> Tensor:
    """A tensor on the same memory that is not a view, for autograd."""
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]


class Recorder:
    """The calls of a model's layers since they were last taken.

    Args:
        model: not wrapped, and not changed but for hooks.
        params: the trained ones.
        probe: whether to see, at the first batch, that the model treats its examples apart. The
            processes of a sharded model cannot run it on examples of their own.
        mean: whether the loss is a mean over the examples of a batch, else a sum.
        views: rows of a batch for each example, one after the other.

    Attributes:
        calls: whose gradients have come back.
        number: of the latest call of the whole model.
        summed: whether gradients that come back now are those of a sum over the rows of the batch.
        layers: with trained parameters.
        loss: looks at the first losses of a loop.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        *,
        probe: bool = True,
        mean: bool = True,
        views: int = 1,
    ) -> None:
        trained = {id(param) for param in params}
        self.calls: list[Call] = []
        self.layers = list(layers(model, trained))
        self.examples = 0  # in the batch that the model runs on
        self.number = 0
        self.summed = not mean
        self._first: int | None = None  # of them on several examples
        self._inside = False  # whether the whole model runs
        self._model, self._closed = model, False
        self._away: list[tuple[Layer, list[list[Tensor]]]] = []  # what stands aside, by layer
        self.paused = False
        self._separate = Separate(model, self.layers if probe else ())
        self.loss = LoopLoss(mean=mean, views=views)
        if not probe:
            self.loss.close()
        self._shared: dict[str, set[bool]] = {}  # whether layers saw one row for all examples
        self.on_start: Any = lambda: None  # called when the model starts on a batch
        self._token: dict[torch.device, Tensor] = {}
        self._handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._starts), with_kwargs=True, prepend=True),
            model.register_forward_hook(Hook(self._ends), always_call=True),
        ]
        for layer in self.layers:
            self._watch(layer)
        self._handles += straighten(model)

    def take(self) -> list[Call]:
        """The calls since the last time; they are forgotten here."""
        calls, self.calls = self.calls, []
        return calls

    def recover(self) -> None:
        """Put back what an interrupted call left: torch calls no hooks then."""
        for layer, away in self._away:
            if away:
                layer.come_back(away[0])
                away.clear()
        self._inside = self.paused = False

    def close(self) -> None:
        """Leave the model alone from now on."""
        self.recover()
        self._closed = True
        self._separate.close()
        self.loss.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _recording(self) -> bool:
        return torch.is_grad_enabled() and not self.paused

    def _starts(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._recording():
            return
        if module is not self._model:  # a copy of it has the hooks too
            if module.training and not self._closed:
                raise ValueError(COPIED)
            return
        self.recover()
        found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not found or found[0].dim() == 0:
            raise ValueError(
                "the model must be called with a tensor whose first dimension is the examples of "
                "the batch, got none"
            )
        self.on_start()
        self.examples, self.number = len(found[0]), self.number + 1
        if self._first is None and self.examples > 1:
            self._first = self.number
        self.paused = True
        try:
            self._separate.check(args, kwargs, self.examples)
        finally:
            self.paused = False
        self.loss.starts(self.examples)
        self._inside = True

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._recording() and module is self._model:
            self._inside = False
            if backward_pass() < 0:
                self.loss.gives(fallback.tensors(output), self._separate.mixed)

    def _watch(self, layer: Layer) -> None:
        away: list[list[Tensor]] = []
        self._away.append((layer, away))

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not self._recording() or module is not layer.module:
                return None
            if not self._inside and backward_pass() < 0:
                raise outside(layer)
            away.append([])
            layer.stand_aside(away[-1])
            if any(value.grad_fn is not None for value in away[-1]):
                layer.come_back(away.pop())
                raise ValueError(
                    f"the layer {layer.name!r} must be called with its own parameters, got others "
                    "that are computed, as by torch.func.functional_call, whose gradients go "
                    "further: put what computes them into a module that holds the parameters, or "
                    "freeze the layer: nothing was released"
                )
            args = handlers.in_autocast(module, self._expanded(layer, args))
            return args, kwargs

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if module is not layer.module:
                return None
            if away:
                layer.come_back(away.pop())
            if output is None or not self._recording():  # the layer itself failed
                return None
            return self._tapped(layer, (args, kwargs), output)

        early, late = Hook(before), Hook(after)
        module = layer.module
        self._handles += [
            module.register_forward_pre_hook(early, with_kwargs=True),
            module.register_forward_hook(late, with_kwargs=True, prepend=True, always_call=True),
        ]

    def _expanded(self, layer: Layer, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first argument with a row for each example: some models let rows be shared."""
        if not args or not isinstance(args[0], Tensor) or layer.handler is None:
            return args
        first = args[0]
        strange = first.dim() == 0 or len(first) not in (1, self.examples)
        if not strange and self.examples > 1:
            # A dimension that is no batch can have one row at first, and later as many as examples.
            shared = len(first) == 1
            known = self._shared.setdefault(layer.name, {shared})
            if self.number == self._first:
                known.add(shared)
            strange = shared not in known
        if strange:
            raise ValueError(
                f"the layer {layer.name!r} must see one row for each of the {self.examples} "
                f"examples of the batch, got an input of shape {tuple(first.shape)}; its gradient "
                "cannot be told apart by examples: keep the batch as the first dimension (for "
                "positions that all examples share, torch.arange(length)[None]), or freeze the "
                "layer"
            )
        if len(first) == self.examples:
            return args
        return first.expand(self.examples, *first.shape[1:]), *args[1:]

    def _tapped(self, layer: Layer, arguments: Any, output: Any) -> Any:
        if layer.handler is not None:
            if not isinstance(output, Tensor) or not arguments[0]:
                raise ValueError(
                    f"the layer {layer.name!r} must take its input first and give one tensor, as "
                    f"{type(layer.module).__name__} does"
                )
            self._check(layer, output)
            pending = _Pending(self, layer)
            first = arguments[0][0].detach()
            tapped = _Tap.apply(pending, self._token_on(output.device), 1, output, first)
            self.loss.gives(tapped)
            return tapped[0]
        leaves, spec = pytree.tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if fallback.tensors(leaf)]
        for leaf in fallback.examples_first(layer.module, [leaves[i] for i in places]):
            self._check(layer, leaf)
        flat, inner = pytree.tree_flatten(arguments)
        plain = {i: leaf for i, leaf in enumerate(flat) if not isinstance(leaf, Tensor)}
        inputs = [leaf.detach() for leaf in flat if isinstance(leaf, Tensor)]
        device = leaves[places[0]].device
        enabled = torch.is_autocast_enabled(device.type)
        autocast = torch.get_autocast_dtype(device.type) if enabled else None
        pending = _Pending(self, layer, inner, plain, autocast)
        token = self._token_on(device)
        tapped = _Tap.apply(pending, token, len(places), *[leaves[i] for i in places], *inputs)
        self.loss.gives(tapped)
        for i, leaf in zip(places, tapped, strict=True):
            leaves[i] = leaf
        return pytree.tree_unflatten(leaves, spec)

    def _check(self, layer: Layer, output: Tensor) -> None:
        if output.dim() == 0 or len(output) != self.examples:
            raise ValueError(
                f"the layer {layer.name!r} must give one row for each of the {self.examples} "
                f"examples of the batch, got an output of shape {tuple(output.shape)}; keep the "
                "batch as the first dimension, or freeze the layer"
            )

    def _token_on(self, device: torch.device) -> Tensor:
        if device not in self._token:
            self._token[device] = torch.zeros((), device=device, requires_grad=True)
        return self._token[device]
