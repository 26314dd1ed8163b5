"""Whether a loss adds up the losses of single examples, as clipping each of them needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from corrnoise.torch.looking import evaluate, looking


def check_loss(
    model: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Tensor], *, mean: bool
) -> None:
    """Raise unless a loss is the mean, or the sum, of the losses of the examples alone.

    Up to four examples are looked at, together and one by one, as in evaluation.

    Args:
        model: that the loss calls; whoever watches its calls must look away.
        loss: of the tensors of a batch.
        batch: the tensors.
        mean: whether it must be the mean, else the sum.
    """
    count = min(4, len(batch[0]))
    if count < 2:
        return
    with torch.no_grad(), looking(model):
        evaluate(model)
        whole = loss(*(part[:count] for part in batch)).double()
        alone = [loss(*(part[i : i + 1] for part in batch)).double() for i in range(count)]
    wanted = torch.stack(alone).sum() / (count if mean else 1)
    size = torch.stack([value.abs() for value in alone]).max()
    if not (whole - wanted).abs() <= _tolerance(whole.float()) * size + 1e-6:
        kind = "mean" if mean else "sum"
        raise ValueError(
            f"the loss must be the {kind} over the examples of a batch, but that of {count} "
            f"examples is {float(whole):.6g} where the {kind} of theirs alone is "
            f"{float(wanted):.6g}; take the loss of each example first (a mean over all tokens of "
            "a batch is none), or set loss_reduction: nothing was released"
        )


def _tolerance(output: Tensor) -> float:
    low = output.dtype != torch.float32 or torch.is_autocast_enabled(output.device.type)
    return 0.05 if low or output.is_cuda else 1e-3
