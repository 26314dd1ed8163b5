"""Gradients of single examples through any module, by running it once more with ``torch.func``."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils import _pytree as pytree

from corrnoise.torch.clipping.parts import Direct, Part

_LOOPS = "There is a performance drop because we have not yet implemented"  # of torch, for vmap

# How far outputs may be from those of a second run, of the same size.
_SAME, _ROUNDED = 1e-2, 5e-2  # in float32, and in half precision

# What helps a layer that draws random numbers, and torch's attention.
_OTHERS = "move the parameters into a module of their own that draws nothing"
ATTENTION = (
    "let PrivacyEngine.get_compatible_module(model), called before the optimizer is made, put "
    "Opacus's DPMultiheadAttention in its place, which keeps the dropout"
)


def tensors(tree: Any) -> list[Tensor]:
    """The floating-point tensors of arguments or outputs, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if _floating(leaf)]


def examples_first(module: nn.Module, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a module with the examples as their first dimension.

    The states that recurrent layers return have theirs as the second.
    """
    if isinstance(module, nn.RNNBase):
        return [outputs[0], *(state.transpose(0, 1) for state in outputs[1:])]
    return list(outputs)


def contribute(
    module: nn.Module,
    name: str,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    names: Collection[str],
    autocast: torch.dtype | None = None,
) -> dict[str, Part]:
    """The gradients of a module's own parameters, for each example.

    Args:
        module: run again; whoever watches its calls must look away.
        name: of the module, for errors.
        arguments: of the call, positional and by keyword.
        outputs: its floating-point tensors, to see that the module repeats itself.
        grads: of the outputs.
        names: of the parameters.
        autocast: the type of the call's autocast, if it ran under one.

    Raises:
        ValueError: the module does not repeat itself example by example.
    """
    every = module.named_parameters(remove_duplicate=False)
    own = {key: param.detach() for key, param in every}
    trained = {key: own[key] for key in names}
    leaves, spec = pytree.tree_flatten(arguments)
    count = len(grads[0])
    dims = _dims(module, arguments, leaves, count)

    def run(params: Mapping[str, Tensor], rows: Sequence[Any]) -> list[Tensor]:
        whole = [row if d is None else row.unsqueeze(d) for row, d in zip(rows, dims, strict=True)]
        args, kwargs = pytree.tree_unflatten(whole, spec)
        # A parameter that a layer inside holds too counts there: it is replaced under one name.
        found = functional_call(module, {**own, **params}, args, kwargs, tie_weights=False)
        return examples_first(module, tensors(found))

    def along(
        params: Mapping[str, Tensor], rows: Sequence[Any], back: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        found = run(params, rows)
        total = sum((a * b[None]).sum() for a, b in zip(found, back, strict=True))
        return total, [a[0] for a in found]  # type: ignore[return-value]

    device = grads[0].device.type
    with torch.autocast(device, autocast, enabled=autocast is not None, cache_enabled=False):
        try:
            _let_torch_loop()
            each = vmap(grad(along, has_aux=True), in_dims=(None, dims, 0))
            found, again = each(trained, leaves, list(grads))
        except RuntimeError:
            with _explained(module, name):
                found, again = _loop(along, trained, leaves, dims, grads)
    for before, after in zip(outputs, again, strict=True):
        share = _ROUNDED if before.dtype in (torch.bfloat16, torch.float16) else _SAME
        far = torch.linalg.vector_norm((before - after).float())
        if not far <= share * torch.linalg.vector_norm(before.float()) + 1e-6:
            remedy = ATTENTION if isinstance(module, nn.MultiheadAttention) else _OTHERS
            raise ValueError(
                f"{_called(module, name)}, which holds parameters itself, must give each "
                "example the same output when it is run again for that example alone, but it does "
                "not: it mixes examples or draws random numbers, such as dropout inside of it; set "
                f"that dropout to 0, {remedy}, or register a handler for the layer. Nothing was "
                "released"
            )
    return {key: Direct(value.reshape(count, *own[key].shape)) for key, value in found.items()}


def _let_torch_loop() -> None:
    """No warning of loops where torch has no batched form.

    By a filter that stays: with ``catch_warnings`` at each step Python would say at each step again
    what the user's loop is warned of.
    """
    if not any(_LOOPS in str(getattr(each[1], "pattern", "")) for each in warnings.filters):
        warnings.filterwarnings("ignore", message=_LOOPS)


def _loop(
    along: Any,
    trained: Mapping[str, Tensor],
    leaves: Sequence[Any],
    dims: Sequence[int | None],
    grads: Sequence[Tensor],
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """As vmap, one example after another: for operations that have no batched form."""
    own = {key: value.detach().requires_grad_() for key, value in trained.items()}
    found: list[Sequence[Tensor]] = []
    again: list[list[Tensor]] = []
    for i in range(len(grads[0])):
        pairs = zip(leaves, dims, strict=True)
        rows = [leaf if dim is None else leaf.select(dim, i) for leaf, dim in pairs]
        with torch.enable_grad():
            total, outputs = along(own, rows, [g[i] for g in grads])
        found.append(torch.autograd.grad(total, list(own.values())))
        again.append([output.detach() for output in outputs])
    columns = [torch.stack(column) for column in zip(*found, strict=True)]
    return dict(zip(own, columns, strict=True)), [torch.stack(c) for c in zip(*again, strict=True)]


def _dims(
    module: nn.Module, arguments: tuple[Any, Any], leaves: Sequence[Any], count: int
) -> list[int | None]:
    """Which dimension of each argument is the examples, by its size."""
    args, kwargs = arguments
    shared, states = None, set[int]()
    if isinstance(module, nn.MultiheadAttention):  # a mask of two dimensions, for all examples
        shared = kwargs.get("attn_mask", args[5] if len(args) > 5 else None)
        shared = shared if isinstance(shared, Tensor) and shared.dim() == 2 else None
    if isinstance(module, nn.RNNBase):  # whose examples are the second dimension
        states = {id(leaf) for leaf in pytree.tree_leaves((args[1:], kwargs.get("hx")))}

    def dim(leaf: Any) -> int | None:
        at = 1 if id(leaf) in states else 0
        if not isinstance(leaf, Tensor) or leaf is shared or leaf.dim() <= at:
            return None
        return at if leaf.shape[at] == count else None

    return [dim(leaf) for leaf in leaves]


@contextmanager
def _explained(module: nn.Module, name: str) -> Generator[None]:
    """Says what the layer was run again for, if it fails there."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{_called(module, name)}, which holds parameters itself, must run again for each "
            f"example alone, but raises {type(error).__name__}: {error}. Give what belongs to "
            "examples as tensors with one row for each, or register a handler for the layer. "
            "Nothing was released"
        ) from error


def _called(module: nn.Module, name: str) -> str:
    return f"{f'the layer {name!r}' if name else 'the model'} ({type(module).__name__})"


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
