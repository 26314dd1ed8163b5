"""Whose parameters are private: they are changed by the optimizer of their run alone.

Gradients that another optimizer would find in them are raw in Opacus's modes, and none with our own
clipping, so that its steps would either break the guarantee or do nothing.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

_owners: Any = WeakIdKeyDictionary()  # of each parameter: a weak reference to its optimizer
# Those that have had a run, with the fingerprint of its key.
_private: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()
# Of the first parameter that a run trained: its version after the last step, and that fingerprint.
_trained: Any = WeakIdKeyDictionary()
_running: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that own all that they hold
_stepping: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those whose step was allowed, and runs
_watched: list[Any] = []  # the hooks, once there is a run
# What torch puts around the ``step`` of every class, and calls the hooks in.
_AROUND: Any = Optimizer.profile_hook_step(lambda _: None).__code__
_KEPT = (
    "the model has the weights of an earlier run of this process, and the ε of this run counts "
    "this run alone: make the model again, also where a cell of a notebook runs once more, or add "
    "the ε and δ of both runs"
)


def check_new(optimizer: Optimizer) -> None:
    """Raise if an optimizer belongs to another run."""
    inside = getattr(optimizer, "original_optimizer", optimizer)  # of Opacus's wrapper
    if inside in _private:
        raise ValueError(
            "optimizer must be a new one for each run, got one that has had a run; make it again "
            "from module.parameters(), of a new model too, or count the ε of both runs: the "
            "weights come from the first"
        )


def own(module: nn.Module, optimizer: Optimizer, fingerprint: str) -> None:
    """From now on no other optimizer may take a step of a module's parameters, frozen ones too.

    Warns where the module has the weights that another run of this process has left.

    Args:
        module: the model.
        optimizer: of the run.
        fingerprint: of its key.
    """
    if not _watched:
        _watched.append(register_optimizer_step_pre_hook(_before))
        _watched.append(register_optimizer_step_post_hook(_after))
    for param in module.parameters():
        version, key = _trained.get(param, (None, fingerprint))
        # Nobody has set them since. A frozen parameter of inference mode has no version.
        if key != fingerprint and version == param._version:
            warnings.warn(_KEPT, stacklevel=5)
        if param in _owners and (before := _owners[param]()) is not None:
            _running.discard(before)
        _owners[param] = weakref.ref(optimizer)
    _private[optimizer] = fingerprint
    _running.add(optimizer)


def disown(optimizer: Optimizer) -> None:
    """The run is over: any optimizer may change its parameters, unless a later run has them."""
    _running.discard(optimizer)
    for param in [param for param, owner in _owners.items() if owner() is optimizer]:
        del _owners[param]


def steps(optimizer: Optimizer) -> None:
    """An owner takes a step that was checked. It may take one of another optimizer inside of it."""
    _stepping.add(optimizer)


def stops(optimizer: Optimizer) -> None:
    """What an owner began is dropped, as after Ctrl-C in the middle of a step."""
    _stepping.discard(optimizer)


def inside(optimizer: Optimizer) -> bool:
    """Whether this step runs inside one of the same optimizer that was allowed.

    Torch calls the hooks of an optimizer once more where the ``step`` of a subclass calls
    ``super().step()``. The stack tells that from a step that follows one that was interrupted.
    """
    return optimizer in _stepping and _depth(optimizer) > 1


def _depth(optimizer: Optimizer) -> int:
    """How many steps of an optimizer are running, one inside the other."""
    frame, found = sys._getframe(), 0  # pyright: ignore[reportPrivateUsage]
    while frame := frame.f_back:
        found += frame.f_code is _AROUND and frame.f_locals["args"][0] is optimizer
    return found


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _running:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    # Where the owner is gone no step of the run can come any more.
    owners = [_owners[param]() for param in params if param in _owners] if len(_owners) else []
    if any(owner not in (None, optimizer) and owner not in _stepping for owner in owners):
        raise ValueError(
            "the parameters of a private run must be changed by the optimizer that make_private "
            "returned alone, got a step of another one, whose gradients are neither clipped nor "
            "noisy; call engine.close() when the run is over, or train another model, with the "
            "state_dict of this one"
        )


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if inside(optimizer):
        return
    stops(optimizer)
    if optimizer in _private:
        params = (param for group in optimizer.param_groups for param in group["params"])
        if (first := next((param for param in params if param.requires_grad), None)) is not None:
            _trained[first] = first._version, _private[optimizer]
