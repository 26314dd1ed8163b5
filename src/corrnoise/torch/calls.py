"""Calls of a model in Opacus's modes, which clip whatever rows they find: are they examples?"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from corrnoise.torch.clipping.fallback import examples_first, tensors
from corrnoise.torch.clipping.hook import Hook
from corrnoise.torch.clipping.layers import Layer, layers
from corrnoise.torch.clipping.loop_loss import LoopLoss
from corrnoise.torch.clipping.recorder import backward_pass, outside
from corrnoise.torch.clipping.separate import Separate
from corrnoise.torch.clipping.straight import straighten


class ModelCalls:
    """Sees that a model treats examples apart, and is called once for each backward pass.

    Args:
        called: what the loop calls: Opacus's wrapper, or the model.
        model: without the wrapper.
        params: the trained ones.
        own: layers that are not looked into: Opacus's hooks know the dimensions inside of them.
        mixing: layers that mix examples, or keep statistics of them, in training mode.
        batch_first: whether the first dimension of a batch is the examples. Else the model is not
            looked at.
        mean: whether the loss is a mean over the examples of a batch, else a sum.

    Attributes:
        twice: whether gradients of two calls came in one backward pass.
        loss: looks at the first losses of a loop.
    """

    def __init__(
        self,
        called: nn.Module,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        *,
        own: tuple[type[nn.Module], ...],
        mixing: Callable[[nn.Module], bool],
        batch_first: bool,
        mean: bool,
    ) -> None:
        self.twice = False
        self._model = model
        self._mixing = [(name, part) for name, part in model.named_modules() if mixing(part)]
        whole = {name: part for name, part in model.named_modules() if isinstance(part, own)}
        inside = {id(part) for layer in whole.values() for part in layer.modules()}
        trained = {id(param) for param in params}
        found = [layer for layer in layers(model, trained) if id(layer.module) not in inside]
        beside = [Layer(name, part, {}, None) for name, part in whole.items()]
        self._separate = Separate(
            model, found if batch_first else (), beside if batch_first else ()
        )
        self.loss = LoopLoss(mean=mean)
        if not batch_first:
            self.loss.close()
        self._looking, self._inside, self._number = False, False, 0
        self._examples: int | None = 0  # in the batch, where the call shows it
        self._layers, self._noted = found, 0
        self._passes: dict[int, set[int]] = {}
        self._handles: list[Any] = list(straighten(model))
        for layer in found if batch_first else ():
            self._watch(layer)
        self._handles += [  # the last one after that of a layer which is the model itself
            called.register_forward_pre_hook(Hook(self._starts), with_kwargs=True, prepend=True),
            called.register_forward_hook(Hook(self._ends), always_call=True),
        ]

    @property
    def number(self) -> int:
        """Of the latest call of the model in training, or -1 while it is looked at."""
        return -1 if self._looking else self._number

    def forget(self) -> None:
        """A step ends, or begins again."""
        self.twice = False
        self._passes.clear()

    def close(self) -> None:
        """Watch the model no more."""
        self._separate.close()
        self.loss.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @contextmanager
    def unwatched(self) -> Generator[None]:
        """The model runs to be looked at."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False

    def _recording(self) -> bool:
        # Opacus's hooks ask each layer for its mode.
        training = any(layer.module.training for layer in self._layers)
        return torch.is_grad_enabled() and training and not self._looking

    def _starts(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._recording():
            return
        for name, part in self._mixing:
            if part.training:
                raise ValueError(
                    f"the model must treat the examples of a batch apart, but {name!r}, a "
                    f"{type(part).__name__}, mixes them or keeps their statistics in training "
                    "mode; call PrivacyEngine.get_compatible_module(model), or keep that layer in "
                    "evaluation mode: nothing was released"
                )
        leaves = pytree.tree_leaves((args, kwargs))
        sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
        self._examples = sizes[0] if sizes else None
        with self.unwatched():
            self._separate.check(args, kwargs, self._examples or 0)
        self.loss.starts(self._examples or 0)
        self._number += 1
        self._inside = True

    def _watch(self, layer: Layer) -> None:
        def gave(module: nn.Module, _: Any, output: Any) -> None:
            # A copy of the model has the hooks too.
            if module is not layer.module or not self._recording() or backward_pass() >= 0:
                return
            if not self._inside:
                raise outside(layer)
            self._note(output)
            self.loss.gives(tensors(output))
            for tensor in examples_first(module, tensors(output)):
                if self._examples is None:
                    break
                if tensor.dim() == 0 or len(tensor) != self._examples:
                    raise ValueError(
                        f"the layer {layer.name!r} must give one row for each of the "
                        f"{self._examples} examples of the batch, got an output of shape "
                        f"{tuple(tensor.shape)}; keep the batch as the first dimension, or freeze "
                        "the layer: nothing was released"
                    )

        self._handles.append(layer.module.register_forward_hook(Hook(gave)))

    def _ends(self, _: nn.Module, args: Any, output: Any) -> None:
        if self._recording():
            self._inside = False
            self._note(output)
            if backward_pass() < 0:
                self.loss.gives(tensors(output), self._separate.mixed)

    def _note(self, output: Any) -> None:
        """See in which backward pass the gradients of a call come, once for each call."""
        found = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if not found or self._noted == self._number:
            return
        self._noted = number = self._number

        def back(grad: Tensor) -> None:
            calls = self._passes.setdefault(backward_pass(), set())
            calls.add(number)
            self.twice = self.twice or len(calls) > 1

        for tensor in found:
            tensor.register_hook(back)
