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

    def stand_aside(self) -> list[Tensor]:
        """Put constants in the place of the parameters; what was there is returned."""
        before: list[Tensor] = []
        for name in self.params:
            owner, key = self._slot(name)
            before.append(owner[key])
            owner[key] = before[-1].detach()
        return before

    def come_back(self, before: Sequence[Tensor]) -> None:
        """Put them back."""
        for name, value in zip(self.params, before, strict=True):
            owner, key = self._slot(name)
            owner[key] = value

    def _slot(self, name: str) -> tuple[Any, str]:
        path, _, last = name.rpartition(".")
        return self.module.get_submodule(path)._parameters, last  # pyright: ignore[reportPrivateUsage]


def layers(model: nn.Module, trained: set[int]) -> Iterator[Layer]:
    """The modules with trained parameters, the insides of those that are taken whole left out."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        whole = isinstance(module, handlers.WHOLE)
        if whole:
            inside.update(id(part) for part in module.modules())
        own = module.named_parameters(recurse=whole, remove_duplicate=False)
        params = {key: param for key, param in own if id(param) in trained}
        if params:
            yield Layer(name, module, params, handlers.find(module))
