"""Whether model and loss treat the examples of a batch apart, as clipping each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from corrnoise.torch.clipping.fallback import tensors
from corrnoise.torch.looking import check_buffers, evaluate, looking, noted, reseed


def check_separate(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    examples: int,
    watched: Callable[[int], AbstractContextManager[None]],
) -> None:
    """Raise if the first examples' outputs depend on who else is in the batch.

    The model runs without gradients on the whole batch and on its first examples: as in training
    without dropout, and where something else is random then, as in evaluation. Buffers must not
    depend on the examples either.

    Args:
        model: whoever watches its calls must look away.
        args: of the call.
        kwargs: of the call.
        examples: in the batch.
        watched: a context for the run on as many examples as it is given.
    """
    rows = min(2, examples - 1)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    some = [leaf[:rows] if _batched(leaf, examples) else leaf for leaf in leaves]
    few_args, few_kwargs = pytree.tree_unflatten(some, spec)

    def run(rows: int | None) -> list[Tensor]:
        if rows is None:
            return tensors(model(*args, **kwargs))
        with watched(rows):
            return tensors(model(*few_args, **few_kwargs))

    with torch.no_grad(), looking(model):
        whole, left = noted(model, lambda: run(None))
        reseed()
        again, _ = noted(model, lambda: run(None))
        few, few_left = noted(model, lambda: run(rows))
        evaluate(model)
        calm, calm_few = run(None), run(rows)
    random = any(_far(a, b) > _tolerance(a) for a, b in zip(whole, again, strict=True))
    for a, b in zip(*((calm, calm_few) if random else (whole, few)), strict=True):
        if not _batched(a, examples) or len(b) != rows:
            continue
        far = _far(b, a[:rows])
        if not far <= _tolerance(a):
            raise ValueError(
                "the model must treat the examples of a batch apart, but the output for the first "
                f"{rows} changes by {far:.1%} when the others are there; replace "
                "what mixes them, such as batch normalisation: nothing was released"
            )
    if not random:
        check_buffers(left, few_left)


def _far(wanted: Tensor, found: Tensor) -> float:
    """How far two outputs are apart, relative; 0 where both are tiny."""
    if wanted.shape != found.shape:
        return float("inf")
    far = torch.linalg.vector_norm((found - wanted).float())
    size = torch.linalg.vector_norm(wanted.float())
    return 0.0 if far <= 1e-6 else float(far / size)


def _batched(leaf: Any, examples: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == examples


def _tolerance(output: Tensor) -> float:
    low = output.dtype != torch.float32 or torch.is_autocast_enabled(output.device.type)
    return 0.05 if low or output.is_cuda else 1e-3
