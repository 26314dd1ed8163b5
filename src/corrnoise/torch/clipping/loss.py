"""Whether a loss adds up the losses of single examples, as clipping each of them needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from corrnoise.torch.draws import undisturbed
from corrnoise.torch.looking import evaluate, looking

# How many examples are looked at. The processes of a sharded model must all run it equally often,
# and some of their batches may be small.
_LOOKED_AT, _SHARDED = 8, 4


def check_loss(
    model: nn.Module, loss: Callable[..., Tensor], batch: Sequence[Tensor], *, mean: bool
) -> None:
    """Raise unless a loss is the mean, or the sum, of the losses of the examples alone.

    Up to eight examples that differ are looked at, together and one by one, as in evaluation: the
    gradient of their loss must be the mean, or the sum, of the gradients of theirs alone. The
    losses themselves are compared where torch has no gradient, as in evaluation with cuDNN's
    recurrent layers, and for a sharded model.

    Args:
        model: that the loss calls; whoever watches its calls must look away.
        loss: of the tensors of a batch.
        batch: the tensors; one without the examples as its first dimension stays whole.
        mean: whether it must be the mean, else the sum.

    Raises:
        ValueError: it is not, or there are fewer than two examples to compare.
    """
    if len(batch[0]) < 2:
        raise ValueError(
            f"a loss must be checked on at least 2 examples, got {len(batch[0])}; take some that "
            "differ in labels and lengths, such as those of a larger batch"
        )
    params = [param for param in model.parameters() if param.requires_grad]
    sharded = any(isinstance(param, DTensor) for param in params)
    rows = _picked(batch, _SHARDED if sharded else _LOOKED_AT)
    runs = _Runs(loss, batch, [] if sharded else params)
    with looking(model):
        evaluate(model)
        _check(runs, rows, mean=mean)


def far(first: Tensor, second: Tensor, *, least: float = 0.0) -> float:
    """The distance of two gradients relative to the larger, or to ``least``; 0 if all are zero."""
    scale = max(least, *(float(torch.linalg.vector_norm(each)) for each in (first, second)))
    return float(torch.linalg.vector_norm(first - second)) / scale if scale else 0.0


def gradient(loss: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
    """Of all parameters, as one vector; their own ``.grad`` stays."""
    found: Any
    if _through_checkpoints(loss):
        found = _by_backward(loss, params)
    else:
        found = torch.autograd.grad(loss, params, allow_unused=True)
    return torch.cat(
        [
            torch.zeros(p.numel(), device=p.device) if g is None else g.to_dense().float().ravel()
            for g, p in zip(found, params, strict=True)
        ]
    )


def _through_checkpoints(loss: Tensor) -> bool:
    """Whether there are checkpoints of torch's first kind, which know ``backward`` alone."""
    todo = [] if loss.grad_fn is None else [loss.grad_fn]
    known = set(todo)
    for node in todo:  # grows
        if node.name() == "CheckpointFunctionBackward":
            return True
        news = {below for below, _ in node.next_functions if below is not None} - known
        known |= news
        todo += news
    return False


def _by_backward(loss: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor | None]:
    kept = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        loss.backward()
        return [param.grad for param in params]
    finally:
        for param, grad in zip(params, kept, strict=True):
            param.grad = grad


class _Runs:
    """A loss of some rows of a batch, with its gradient.

    Args:
        loss: of the tensors of a batch.
        batch: the tensors.
        params: trained; none if only the loss is wanted.
    """

    def __init__(
        self, loss: Callable[..., Tensor], batch: Sequence[Tensor], params: list[nn.Parameter]
    ) -> None:
        self.params = params
        self._loss, self._batch = loss, batch
        self._dtypes = {param.dtype for param in params}

    def __call__(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient as one vector, or as a zero if there is none."""
        count, wanted = len(self._batch[0]), bool(self.params)
        some = [
            part[torch.tensor(rows, device=part.device)] if _batched(part, count) else part
            for part in self._batch
        ]
        # The same random numbers each time. What the loss saves shows autocast inside of it.
        saved = torch.autograd.graph.saved_tensors_hooks(self._noted, lambda tensor: tensor)
        with undisturbed(), saved, torch.set_grad_enabled(wanted):
            value = self._loss(*some)
            grad = torch.zeros((), device=value.device)
            if wanted and value.requires_grad:
                with suppress(RuntimeError):
                    grad = gradient(value, self.params)
        self._dtypes.add(value.dtype)
        return value.detach(), grad

    def rounded(self, device: torch.device) -> bool:
        """Whether products may be rounded to less than float32."""
        low = any(dtype in (torch.bfloat16, torch.float16) for dtype in self._dtypes)
        return low or device.type != "cpu" or torch.is_autocast_enabled(device.type)

    def _noted(self, tensor: Tensor) -> Tensor:
        self._dtypes.add(tensor.dtype)
        return tensor


def _check(runs: _Runs, rows: list[int], *, mean: bool) -> None:
    share = 1 / len(rows) if mean else 1.0
    value, whole = runs(rows)
    alone, losses, scale = torch.zeros_like(whole), [], 0.0
    for row in rows:
        one, grad = runs([row])
        losses.append(float(one))
        alone = alone + share * grad
        scale += share * float(torch.linalg.vector_norm(grad))
    rounded = runs.rounded(whole.device)
    tolerance = 0.05 if rounded else 1e-3
    kind = "mean" if mean else "sum"
    if scale == 0.0 and not whole.any():
        wanted = share * sum(losses)
        right = abs(float(value) - wanted) <= tolerance * max(map(abs, losses)) + 1e-6
        seen = (
            f"that of {len(rows)} examples is {float(value):.6g} where the {kind} of theirs alone "
            f"is {wanted:.6g}"
        )
    else:
        apart = far(whole, alone, least=scale)
        right = apart <= tolerance
        seen = (
            f"the gradient of {len(rows)} examples differs by {apart:.2%} from the {kind} of "
            "theirs alone"
        )
    if not right:
        raise ValueError(
            f"the loss must be the {kind} over the examples of a batch, but {seen}; take the loss "
            "of each example first (a mean over all tokens of a batch is none, nor is one with "
            "weights of classes, or of outputs (n, 1) against targets (n,)), or set "
            "loss_reduction: nothing was released"
        )


def _picked(batch: Sequence[Tensor], most: int) -> list[int]:
    """Rows of different labels, weights and lengths, from all over a batch; always as many."""
    count = len(batch[0])
    columns = [part.detach() for part in reversed(batch) if _batched(part, count)]
    telling = [i for some in zip_longest(*map(_telling, columns)) for i in some if i is not None]
    spread = [i * (count - 1) // (most - 1) for i in range(most)]
    return sorted(list(dict.fromkeys([0, count - 1, *telling, *spread]))[:most])


def _telling(column: Tensor) -> list[int]:
    """Rows of the rarest and the most common labels, or of extreme numbers or lengths."""
    single, whole = column.numel() == len(column), not column.is_floating_point()
    if column.is_complex() or not (single or (whole and column.dim() == 2)):
        return []
    if single and whole:
        labels: list[int] = column.reshape(-1).tolist()
        common = [label for label, _ in Counter(labels).most_common()]
        some = dict.fromkeys([common[-1], common[0], common[-2:][0], common[:2][-1]])
        return [labels.index(label) for label in some]
    # Tokens and labels are padded with 0 or with -100.
    numbers: list[float] = (column.reshape(-1) if single else (column > 0).sum(1)).tolist()
    return [numbers.index(min(numbers)), numbers.index(max(numbers))]


def _batched(part: Tensor, count: int) -> bool:
    return part.dim() > 0 and len(part) == count
