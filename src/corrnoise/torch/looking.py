"""Running a model to look at it: as in training, but without dropout, and without a trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from corrnoise.torch.draws import seed, undisturbed

Result = TypeVar("Result")


@contextmanager
def looking(model: nn.Module) -> Generator[None]:
    """Dropout does nothing, and modes, buffers and generators are afterwards what they were."""
    numbers, before = _numbers(model), _buffers(model)
    fast: Any = torch.backends.mha
    kept = fast.get_fastpath_enabled()
    fast.set_fastpath_enabled(False)  # attention in evaluation, which has layouts of its own
    try:
        with undisturbed(), without_dropout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        fast.set_fastpath_enabled(kept)
        _put_back(model, before, numbers)


def evaluate(model: nn.Module) -> None:
    """As ``model.eval()``, also for models that forbid it."""
    for part in model.modules():
        part.training = False


def reseed() -> None:
    """Whatever is drawn next is not what was drawn before."""
    torch.manual_seed(torch.initial_seed() + 1)


def same_draws() -> None:
    """Whatever is drawn next is what was drawn after the last call of this."""
    torch.manual_seed(0)
    seed((0, 0, 0))


def noted(model: nn.Module, run: Callable[[], Result]) -> tuple[Result, dict[str, Tensor]]:
    """What a run of a model returns, and the buffers that it leaves; they are put back.

    So are plain numbers, such as a count of steps.
    """
    numbers, before = _numbers(model), _buffers(model)
    found, after = run(), _buffers(model)
    _put_back(model, before, numbers)
    return found, after


def check_buffers(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Raise if buffers, each from the same start, have become different with different examples."""
    for name, value in first.items():
        other = second.get(name, value)
        if value.shape != other.shape or not value.equal(other):
            raise ValueError(
                f"a training step must not put what it sees of examples into buffers, but {name!r} "
                "changes with them, and would be saved without noise; freeze it, or use a layer "
                "without such statistics: nothing was released"
            )


@contextmanager
def without_dropout() -> Generator[None]:
    """Dropout does nothing, also inside attention, and where a layer is computed once more."""
    dropout, attention = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        return attention(query, key, value, attn_mask, 0.0, *args, **options)

    changed: Any = nn.functional
    changed.dropout = lambda inputs, *_, **__: inputs
    changed.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        changed.dropout, changed.scaled_dot_product_attention = dropout, attention


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by their names."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _numbers(model: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The numbers that parts have as plain attributes, their modes among them."""
    return [
        (part, {key: value for key, value in vars(part).items() if isinstance(value, (int, float))})
        for part in model.modules()
    ]


def _put_back(
    model: nn.Module, values: dict[str, Tensor], numbers: list[tuple[nn.Module, dict[str, Any]]]
) -> None:
    for part, kept in numbers:
        vars(part).update(kept)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name not in values or buffer.equal(values[name]):
                continue
            if buffer.shape == values[name].shape:
                buffer.copy_(values[name])
            else:  # one that grows
                path, _, key = name.rpartition(".")
                setattr(model.get_submodule(path), key, values[name])
