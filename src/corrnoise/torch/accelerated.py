"""What Accelerate wraps around an optimizer, and what it expects of a loader."""

from __future__ import annotations

from typing import Any

import torch


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper; any other as it is.

    Raises:
        ValueError: with a loss scaler, whose factor changes from step to step.
    """
    if type(optimizer).__module__.partition(".")[0] != "accelerate":
        return optimizer
    if getattr(optimizer, "scaler", None) is not None:
        raise ValueError(
            "mixed_precision must be 'no' or 'bf16' for private training, got 'fp16', whose loss "
            "scaling changes from step to step"
        )
    return unwrapped(optimizer.optimizer)


def rewrapped(found: Any, inner: torch.optim.Optimizer, outer: Any) -> Any:
    """What ``make_private`` returns, with Accelerate's optimizer in its place.

    Batches come on the model's device, as Accelerate's loaders deliver them.

    Args:
        found: model and optimizer at first, and the loader at last.
        inner: the optimizer itself.
        outer: Accelerate's wrapper of it.

    Raises:
        ValueError: the mode is one of Opacus's, which wraps the optimizer itself.
    """
    if inner is outer:
        return found
    if found[1] is not inner:
        raise ValueError(
            "grad_sample_mode must be 'one_pass' for an optimizer that Accelerate has prepared, "
            "got one of Opacus's modes, which wraps it anew"
        )
    found[-1].device = inner.param_groups[0]["params"][0].device
    return found[0], outer, *found[2:]
