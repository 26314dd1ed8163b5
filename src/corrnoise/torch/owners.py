"""Whose parameters are private: they are changed by the optimizer of their run alone.

Gradients that another optimizer would find in them are raw in Opacus's modes, and none with our own
clipping, so that its steps would either break the guarantee or do nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

_owners: Any = WeakIdKeyDictionary()  # of each parameter: a weak reference to its optimizer
_private: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that have had a run
_watched: list[Any] = []  # the hook, once there is a run


def check_parameters(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Raise unless the trained parameters of an optimizer are those of a module, all of them."""
    names = {id(param): name for name, param in module.named_parameters()}
    held = {id(param) for param in params}
    strange = [param for param in params if id(param) not in names]
    if strange:
        raise ValueError(
            f"optimizer must hold parameters of the module alone, got one of shape "
            f"{tuple(strange[0].shape)} that the module does not have; make it from "
            "module.parameters()"
        )
    left = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        raise ValueError(
            f"optimizer must hold every parameter of the module that requires a gradient, got none "
            f"of {', '.join(map(repr, left[:3]))}{' and others' if left[3:] else ''}, whose "
            "gradients would be neither clipped nor noisy; freeze what is not trained "
            "(requires_grad_(False)), or give it to the optimizer"
        )


def check_new(optimizer: Optimizer) -> None:
    """Raise if an optimizer belongs to another run."""
    inside = getattr(optimizer, "original_optimizer", optimizer)  # of Opacus's wrapper
    if inside in _private:
        raise ValueError(
            "optimizer must be a new one for each run, got that of another engine; make it again "
            "from module.parameters(), and close the other engine"
        )


def own(params: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
    """From now on no other optimizer may take a step of these parameters."""
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_before))
    _private.add(optimizer)
    for param in params:
        _owners[param] = weakref.ref(optimizer)


def disown(params: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
    """The run is over: any optimizer may change its parameters, unless a later run has them."""
    for param in params:
        if (owner := _owners.get(param)) is not None and owner() is optimizer:
            del _owners[param]


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _private or not len(_owners):
        return
    for group in optimizer.param_groups:
        if any(param in _owners and not _inside(group, param) for param in group["params"]):
            raise ValueError(
                "the parameters of a private run must be changed by the optimizer that "
                "make_private returned alone, got a step of another one, whose gradients are "
                "neither clipped nor noisy; call engine.close() when the run is over, or train a "
                "copy of the model"
            )


def _inside(group: dict[str, Any], param: nn.Parameter) -> bool:
    """Whether a group is one of the owner's too, which then wraps another optimizer."""
    owner = _owners[param]()
    return owner is not None and any(each is group for each in owner.param_groups)
