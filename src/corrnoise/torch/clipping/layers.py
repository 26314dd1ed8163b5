"""The layers of a model that clipping watches: the modules with trained parameters of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from corrnoise.torch.clipping import handlers


@dataclass(frozen=True)
class Layer:
    """A module with trained parameters of its own.

    Attributes:
        name: in the model.
        module: itself.
        params: its own trained parameters by name.
        handler: ``None`` for the fallback.
    """

    name: str
    module: nn.Module
    params: dict[str, nn.Parameter]
    handler: handlers.Handler | None

    def stand_aside(self, before: list[Tensor]) -> None:
        """Put constants in the place of the parameters; each is noted first, also for Ctrl-C."""
        for name in self.params:
            owner, key = self._slot(name)
            before.append(owner[key])
            owner[key] = before[-1].detach()

    def come_back(self, before: Sequence[Tensor]) -> None:
        """Put back those that were noted."""
        for name, value in zip(self.params, before, strict=False):
            owner, key = self._slot(name)
            owner[key] = value

    def _slot(self, name: str) -> tuple[Any, str]:
        path, _, last = name.rpartition(".")
        return self.module.get_submodule(path)._parameters, last  # pyright: ignore[reportPrivateUsage]


def layers(model: nn.Module, trained: set[int]) -> Iterator[Layer]:
    """The modules with trained parameters, the insides of those that are taken whole left out."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or _uncalled(module):
            continue
        whole, handler = isinstance(module, handlers.WHOLE), handlers.find(module)
        if whole:
            inside.update(id(part) for part in module.modules())
        own = dict(module.named_parameters(recurse=whole, remove_duplicate=False))
        if handler is None:  # which knows the parameters of its own layer alone
            own.update(_held(module))
        params = {key: param for key, param in own.items() if id(param) in trained}
        if params:
            yield Layer(name, module, params, handler)


def _uncalled(module: nn.Module) -> bool:
    """Whether it only holds things, as ``ParameterDict`` does: whoever holds it uses them."""
    return type(module).forward is nn.Module.forward


def _held(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters in what it holds, where adapters have theirs, by their full names.

    What a layer inside holds too counts there: it would be seen twice.
    """
    called = (part for part in module.modules() if part is not module and not _uncalled(part))
    inner = {id(holder) for part in called for _, holder in _holders(part)}
    for name, holder in _holders(module):
        if id(holder) not in inner:
            for key, param in holder.named_parameters(recurse=False, remove_duplicate=False):
                yield f"{name}.{key}", param


def _holders(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is held without a layer between, also inside one another."""
    for name, child in module.named_children():
        if _uncalled(child):
            yield name, child
            yield from ((f"{name}.{key}", holder) for key, holder in _holders(child))
