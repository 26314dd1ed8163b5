"""Losses that are means over examples, which clipping each example's gradient needs.

Models for language compute the mean over all tokens of a batch: an example's share then depends on
how long the others are. Here every example counts alike: the mean over its own tokens, then the
mean over examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto

from corrnoise.torch.clipping.loss import far, gradient
from corrnoise.torch.draws import undisturbed
from corrnoise.torch.looking import check_buffers, evaluate, looking, noted, reseed

_IGNORED = -100
_LOOKED_AT, _LABELS = 256, 4  # examples that some are chosen from, and classes among those
_REPEATED = 1e-4  # what rounding may make of the same gradient computed twice
# Whether labels are the next tokens, for the kinds of models whose labels are one for each token.
_KINDS: tuple[tuple[Any, bool], ...] = (
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, True),
    (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, False),
    (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES, False),
)


def shift_of(model: Any) -> bool | None:
    """Whether a model predicts the next token, or ``None`` where it has no label for each token."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return None
    found = {shift for names, shift in _KINDS if type(base).__name__ in names.values()}
    return found.pop() if len(found) == 1 else None


def mean_over_examples(
    logits: Tensor, labels: Tensor, *, shift: bool, smoothing: float = 0.0
) -> Tensor:
    """The mean over examples of the mean cross entropy over each example's own tokens.

    Args:
        logits: (examples, positions, classes).
        labels: (examples, positions), -100 where there is none.
        shift: whether the label of a position is the next token.
        smoothing: of labels.
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=_IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    ).view(labels.shape)
    return (losses.sum(1) / (labels != _IGNORED).sum(1).clamp_min(1)).mean()


def picked(dataset: Any) -> list[Any]:
    """Examples to check a loss with: of different lengths and labels, from all over a dataset.

    The generators of random numbers are left as they were.

    Args:
        dataset: with indices.
    """
    size = len(dataset)
    count = min(_LOOKED_AT, size)
    with undisturbed():
        some = [dataset[i * (size - 1) // max(count - 1, 1)] for i in range(count)]
    some = [example for example in some if _length(example)] or some
    some.sort(key=_length)
    found = {0, len(some) // 3, 2 * len(some) // 3, len(some) - 1}
    labels: dict[str, int] = {}
    for index, example in enumerate(some):
        label = example.get("labels", example.get("label")) if isinstance(example, Mapping) else 0
        if label is not None and _size(label) is None and len(labels) < _LABELS:
            labels.setdefault(repr(label), index)
    return [some[i] for i in sorted(found | set(labels.values()))]


def check(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    collate: Callable[[list[Any]], Any],
    examples: list[Any],
) -> None:
    """Raise unless the loss of a batch is the mean of the losses of its examples alone.

    Each example is looked at in the batch, with its padding, and alone, without: in training mode
    without dropout if nothing else is random then, else in evaluation mode. Buffers must not
    change. The generators of random numbers are left as they were.

    Args:
        model: that the loss calls; no one may watch its calls.
        loss: of a batch.
        collate: makes a batch of examples.
        examples: some of them, of different lengths if there are such.
    """
    if len(examples) < 2:
        return
    params = [param for param in model.parameters() if param.requires_grad]
    with looking(model):
        batch, parts = _apart(collate, examples)
        model.train()  # as the loop does
        check_buffers(*(noted(model, partial(loss, each))[1] for each in (batch, parts[0])))
        whole = gradient(loss(batch), params)
        reseed()
        if far(whole, gradient(loss(batch), params)) > _REPEATED:
            evaluate(model)
            whole = gradient(loss(batch), params)
        alone = gradient(loss(parts[0]), params) / len(parts)
        for part in parts[1:]:
            alone += gradient(loss(part), params) / len(parts)
    apart = far(whole, alone)
    exact = all(p.dtype == torch.float32 for p in params) and not _reduced(model)
    if not apart <= (1e-3 if exact else 0.05):
        raise ValueError(
            f"the loss must be a mean over examples, each by itself, but the gradient of "
            f"{len(parts)} examples differs by {apart:.2%} from the mean of theirs alone, without "
            "padding; a mean over the tokens of a batch is none (use compute_loss_func), nor is "
            "one with weights of classes or without some of the examples, and outputs must not "
            "change with the padding (pass attention_mask, pad on the right): nothing was released"
        )


def _reduced(model: nn.Module) -> bool:
    """Whether products may be rounded: on a GPU, or under the autocast of Accelerate."""
    device = next(model.parameters()).device.type
    return device != "cpu" or hasattr(model, "_original_forward")


def _apart(collate: Callable[[list[Any]], Any], examples: list[Any]) -> tuple[Any, list[Any]]:
    """The batch of examples, and each of them alone.

    A collate function that draws, such as one that masks words, would draw others for an example
    alone: then its row of the batch is taken, without its padding.
    """
    batch = collate(examples)
    reseed()
    if _same(batch, collate(examples)):
        return batch, [collate([example]) for example in examples]
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return batch, [collate([example]) for example in examples]
    found: list[Any] = []
    for row in range(len(mask)):
        here = mask[row] != 0
        one: dict[str, Any] = {}
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(mask):
                value = value[row : row + 1]
                if value.dim() > 1 and value.shape[1] == mask.shape[1]:
                    value = value[:, here]
            one[name] = value
        found.append(one)
    return batch, found


def _same(first: Any, second: Any) -> bool:
    """Whether two batches have the same tensors."""
    pairs = zip(pytree.tree_leaves(dict(first)), pytree.tree_leaves(dict(second)), strict=True)
    return all(a.equal(b) for a, b in pairs if isinstance(a, Tensor))


def _length(example: Any) -> int:
    """Of the longest sequence in an example."""
    values: Any = example.values() if isinstance(example, Mapping) else [example]
    return max((size for v in values if (size := _size(v)) is not None), default=1)


def _size(value: Any) -> int | None:
    """How many elements a value has, or ``None`` for a number, also one in a tensor or an array."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    return len(value) if hasattr(value, "__len__") else None
