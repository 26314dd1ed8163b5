"""The arguments of ``make_private`` that say how gradients are taken, clipped and summed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

_ADAPTIVE = frozenset(
    {
        "target_unclipped_quantile",
        "clipbound_learning_rate",
        "max_clipbound",
        "min_clipbound",
        "unclipped_num_std",
    }
)


def refuse(unknown: Mapping[str, Any], clipping: str, known: Sequence[str]) -> None:
    """Raise if there is adaptive clipping, or an argument that nobody reads; some are ``known``."""
    adaptive = sorted(_ADAPTIVE & set(unknown))
    if adaptive or clipping == "adaptive":
        got = ", ".join(adaptive) or "clipping='adaptive'"
        raise ValueError(
            f"clipping must be 'flat' or 'per_layer', got {got}: a clip norm that follows the data "
            "changes the sensitivity from step to step, and its quantiles cost privacy that the "
            "plan does not price; choose one max_grad_norm, such as the median norm of gradients "
            "on public data"
        )
    if any(name.startswith("target_") for name in unknown):
        raise TypeError(
            f"unknown arguments: {', '.join(sorted(unknown))}; make_private takes noise_multiplier "
            "or plan: use make_private_with_epsilon for a budget"
        )
    if unknown:
        near = [n for each in sorted(unknown) for n in get_close_matches(each, known, 1)]
        remedy = f"did you mean {', '.join(near)}?" if near else "leave them out"
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}; {remedy}")


@dataclass(frozen=True)
class Options:
    """The arguments of ``make_private`` that are Opacus's own, by its names."""

    max_grad_norm: float | list[float]
    criterion: Any
    batch_first: bool
    loss_reduction: str
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    max_physical_batch_size: int | None = None
    views: int = 1
    joins: bool = False  # whether one step may take several batches
    exact: bool = False  # whether sums and releases are without rounding: ``secure_mode``

    @property
    def clip_norm(self) -> float:
        """C: the clip norm, of all layers together where each has its own."""
        clips = self.max_grad_norm
        return math.hypot(*clips) if isinstance(clips, list) else float(clips)
