"""The criterion that ``make_private`` returns in Opacus's ghost modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from corrnoise import _checks as checks


class ExampleLoss:
    """The mean or the sum of the losses of single examples, from a criterion of the user's.

    Opacus's scripts for ghost clipping call the criterion that ``make_private`` returned, and then
    ``backward`` on the result, which is an ordinary tensor here. The criterion is called with
    ``reduction="none"``. So the loss of one example does not depend on another, as it does in a
    mean over all tokens of a batch, or over the weights of all classes in it.

    Args:
        criterion: a loss of torch's, or another callable that gives the loss of each example, along
            the first dimension, while its attribute ``reduction`` is "none"; cross entropy if
            ``None``.
        reduction: "mean" or "sum": over the examples, and over the other dimensions of a loss.
    """

    def __init__(self, criterion: Any, reduction: str) -> None:
        checks.choice("loss_reduction", reduction, ("mean", "sum"))
        self.criterion = (
            nn.CrossEntropyLoss(reduction=reduction) if criterion is None else criterion
        )
        self.reduction = reduction
        self.examples: Callable[[], int] | None = None  # in the batch that the model ran on last
        own = getattr(self.criterion, "reduction", reduction)
        if own != reduction:
            raise ValueError(
                f"criterion.reduction must be loss_reduction={reduction!r}, got {own!r}; make both "
                "the same"
            )

    def __call__(self, *args: Any, shape: tuple[int, ...] | None = None, **named: Any) -> Tensor:
        """The loss of a batch.

        Args:
            args: of the criterion.
            shape: of outputs that were flattened, beginning with examples and positions, as Opacus
                has it for language models: the loss of an example is then that of its positions.
            named: of the criterion.
        """
        losses = self._losses(args, named)
        if losses.dim() == 0:
            raise ValueError(
                "criterion must return the loss of each example while its attribute reduction is "
                "'none', got one number for the whole batch; give one of torch's losses, or use "
                "grad_sample_mode='one_pass' with any loss that is a mean over examples"
            )
        given = [each for each in (*args, *named.values()) if isinstance(each, Tensor)]
        if given and losses.numel() > max(map(Tensor.numel, given)):
            shapes = " and ".join(str(tuple(each.shape)) for each in given)
            raise ValueError(
                "criterion must compare each example's output with its own target, got losses of "
                f"shape {tuple(losses.shape)} for {shapes}, of every one with every other: give "
                "both the same shape"
            )
        counted = self._counted(losses, args, named)
        if shape is not None and len(losses) == shape[0] * shape[1]:
            losses, counted = (each.unflatten(0, tuple(shape[:2])) for each in (losses, counted))
        count = self.examples if losses.requires_grad else None  # else the model is evaluated
        examples = len(losses) if count is None else count()
        if len(losses) != examples:
            raise ValueError(
                f"criterion must give a loss for each of the {examples} examples of the batch, got "
                f"losses of shape {tuple(losses.shape)}; pass shape=, the shape of the outputs "
                "before they were flattened"
            )
        if self.reduction == "sum":
            return losses.sum()
        losses, counted = (each.unsqueeze(-1).flatten(1).sum(1) for each in (losses, counted))
        return (losses / counted.clamp(min=1)).sum() / max(1, len(losses))

    def _losses(self, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, **named)
        self.criterion.reduction = "none"
        try:
            return self.criterion(*args, **named)
        finally:
            self.criterion.reduction = self.reduction

    def _counted(self, losses: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """Which losses are of targets that the criterion does not ignore."""
        ignored = getattr(self.criterion, "ignore_index", None)
        target = named.get("target", args[1] if len(args) > 1 else None)
        if ignored is None or not isinstance(target, Tensor) or target.shape != losses.shape:
            return torch.ones_like(losses, dtype=torch.bool)
        return target != ignored
