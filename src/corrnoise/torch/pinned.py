"""What a plan was priced for, and must find unchanged at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from corrnoise.planning import Plan
from corrnoise.torch.options import Options
from corrnoise.torch.placement import trained

_REASONS = {
    "noise_multiplier": "the plan has one noise level: drop the noise scheduler",
    "max_grad_norm": "the plan has one clip norm: drop the clip scheduler or adaptive clipping",
    "max_grad_norms": "the plan has one clip norm for each layer",
    "expected_batch_size": "the divisor must not depend on the batch",
    "loss_reduction": "it belongs to the divisor",
}


@dataclass(frozen=True)
class Pinned:
    """What the plan was priced for and must find unchanged at every step, by Opacus's names."""

    noise_multiplier: float
    max_grad_norm: float
    max_grad_norms: tuple[float, ...]
    expected_batch_size: float
    loss_reduction: str

    @staticmethod
    def of(optimizer: Any) -> Pinned:
        """As the optimizer, Opacus's or one that was marked, has them now."""
        return Pinned(
            optimizer.noise_multiplier,
            optimizer.max_grad_norm,
            tuple(getattr(optimizer, "max_grad_norms", ())),
            optimizer.expected_batch_size,
            optimizer.loss_reduction,
        )

    def check(self, now: Pinned) -> None:
        """Raise if something has changed."""
        for name, reason in _REASONS.items():
            before, after = getattr(self, name), getattr(now, name)
            if before != after:
                raise ValueError(
                    f"{name} must stay {before!r} for the whole run, got {after!r}; {reason}"
                )


def mark(optimizer: Any, plan: Plan, world_size: int, options: Options) -> Pinned:
    """Give an optimizer that Opacus did not wrap the attributes that its scripts read."""
    optimizer.noise_multiplier = plan.noise_multiplier
    optimizer.max_grad_norm = options.max_grad_norm
    optimizer.expected_batch_size = plan.divisor / world_size
    optimizer.loss_reduction = options.loss_reduction
    return Pinned.of(optimizer)


def check_params(before: Sequence[nn.Parameter], optimizer: Any) -> None:
    """Raise unless an optimizer trains the same parameters, and finds no gradient of others."""
    now = trained(optimizer)
    if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
        raise ValueError(
            f"the optimizer must keep the {len(before)} parameters that make_private saw, got "
            f"{len(now)}, not all of them the same; freeze, unfreeze or add parameters before "
            "make_private"
        )
    every = [param for group in optimizer.param_groups for param in group["params"]]
    other = next((p for p in every if not p.requires_grad and p.grad is not None), None)
    if other is not None:
        raise ValueError(
            f"a frozen parameter must have no gradient at a step, got one of shape "
            f"{tuple(other.shape)}, which the optimizer would apply without clipping and noise; "
            "call optimizer.zero_grad() after make_private, and keep frozen what is frozen: "
            "nothing was released"
        )
