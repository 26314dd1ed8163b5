r"""What an optimizer of torch does to gradients, as a workload.

The workload decides which noise is good, never how private it is: a choice that does not fit costs
accuracy alone. For ``torch.optim.SGD`` with learning rate η, momentum β and weight decay λ,

    m ← β·m + (x̂ + λ·θ),      θ ← θ - η·m,

θ is a filter of the gradients x̂ with the series 1/((1 - x)(1 - βx) + ηλ·x), up to scale. That is
1/((1 - αx)(1 - β′x)) with α + β′ = 1 + β - ηλ and α·β′ = β: ``workloads.sgd`` with decay α and
momentum β′. With β = 0 the decay is α = 1 - ηλ; with small ηλ it is about 1 - ηλ/(1 - β).
Dampening is a factor and changes nothing. Nesterov momentum, and decay so strong that α is not
real, are given by their coefficients, which the same recursion computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from corrnoise import workloads
from corrnoise.torch.accelerated import unwrapped
from corrnoise.workloads import Workload


def workload_of(optimizer: torch.optim.Optimizer, num_steps: int) -> Workload:
    """The workload of an optimizer, read from its parameter groups as they are now.

    Where groups differ, the one with the most trained parameters decides. SGD is exact for a
    constant learning rate; a warm-up that starts at 0 is read as the rate that it leads to.
    Optimizers of the Adam family are not linear; they are taken as SGD whose momentum is their
    first beta, with AdamW's decay 1 - η·λ. Others with a momentum, such as RMSprop, are taken as
    SGD with it, and any other as running sums.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> workload_of(torch.optim.SGD([weight], lr=0.1, momentum=0.9), 100)
    sgd(100, momentum=0.9, decay=1.0)
    >>> workload_of(torch.optim.SGD([weight], lr=0.1, weight_decay=0.01), 100)
    sgd(100, momentum=0.0, decay=0.999)
    """
    optimizer = unwrapped(optimizer)
    group = max(optimizer.param_groups, key=_size)
    rate, shrink = _rate(group), float(group.get("weight_decay", 0.0))
    if isinstance(optimizer, torch.optim.SGD):
        momentum = float(group["momentum"])
        return _sgd(num_steps, momentum, rate * shrink, bool(group["nesterov"]))
    betas = group.get("betas")
    if betas is None:
        momentum = float(group.get("momentum", 0.0))
        if 0.0 < momentum < 1.0:
            return workloads.sgd(num_steps, momentum=momentum)
        return workloads.prefix_sum(num_steps)
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    decay = min(1.0, max(0.0, 1.0 - rate * shrink)) if decoupled else 1.0
    return workloads.sgd(num_steps, momentum=float(betas[0]), decay=decay)


def _size(group: Mapping[str, Any]) -> int:
    """How many numbers a group trains."""
    return sum(param.numel() for param in group["params"] if param.requires_grad)


def _rate(group: Mapping[str, Any]) -> float:
    """The learning rate; a schedule has put its own first one in place, and keeps the user's."""
    return float(group.get("initial_lr", group.get("lr", 0.0)))


def _sgd(num_steps: int, momentum: float, shrink: float, nesterov: bool) -> Workload:
    if shrink == 0.0 and not nesterov:
        return workloads.sgd(num_steps, momentum=momentum)
    half = (1.0 + momentum - shrink) / 2.0
    square = half * half - momentum
    if not nesterov and square >= 0.0 and half >= 0.0:
        decay = half + square**0.5
        return workloads.sgd(num_steps, momentum=momentum / decay if decay else 0.0, decay=decay)
    # An impulse at step 0, with η = 1 and the decay scaled to match: θ after each step is the
    # column of A, up to sign.
    coef = np.empty(num_steps)
    weight, buffer, gradient = 0.0, 0.0, 1.0
    for step in range(num_steps):
        pull = gradient + shrink * weight
        buffer = momentum * buffer + pull
        weight -= pull + momentum * buffer if nesterov else buffer
        coef[step], gradient = -weight, 0.0
    return workloads.toeplitz(coef / coef[0])
