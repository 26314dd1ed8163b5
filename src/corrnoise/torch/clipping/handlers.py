"""One small handler for each type of layer: from what a call saw to the parts of its parameters.

A handler is a function of the layer, the inputs of the call and the gradients of its outputs, whose
first dimension is the examples. It returns a part for each parameter that is asked for. Layers
without a handler fall back to the gradients of single examples by ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corrnoise.torch.clipping import normalisation
from corrnoise.torch.clipping.convolution import CONVOLUTIONS, Convolution
from corrnoise.torch.clipping.parts import Direct, Outer, Part, Rows

# Layers whose backward pass does not read their output.
OUTPUT_UNUSED: set[type[nn.Module]] = {
    nn.Linear, *CONVOLUTIONS, nn.Embedding, nn.LayerNorm, nn.GroupNorm,
}  # fmt: skip

# Layers that use the parameters of modules inside them, without calling those.
WHOLE = (nn.MultiheadAttention,)

Handler = Callable[[Any, Sequence[Tensor], Sequence[Tensor], Collection[str]], Mapping[str, Part]]

# By type, or by the full name of a type whose library need not be installed.
_HANDLERS: dict[type[nn.Module] | str, Handler] = {}


def register(*types: type[nn.Module] | str) -> Callable[[Handler], Handler]:
    """A decorator that makes a function the handler of these types of layers."""

    def keep(handler: Handler) -> Handler:
        for kind in types:
            _HANDLERS[kind] = handler
        return handler

    return keep


def find(module: nn.Module) -> Handler | None:
    """The handler of a layer: of its type, or of a base whose ``forward`` it has."""
    if "forward" in vars(module):  # one of its own, which may do anything
        return None
    for kind in type(module).__mro__:
        handler = _HANDLERS.get(kind) or _HANDLERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if handler is not None:
            return handler if kind.forward is type(module).forward else None
    return None


def in_autocast(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call as autocast would cast them: what is kept is what is multiplied."""
    kinds = (nn.Linear, *CONVOLUTIONS)
    if not isinstance(module, kinds) or not args or not isinstance(args[0], Tensor):
        return args
    device = args[0].device.type
    if not torch.is_autocast_enabled(device) or args[0].dtype == torch.float64:
        return args
    return args[0].to(torch.get_autocast_dtype(device)), *args[1:]


@register(nn.Linear)
def _linear(
    module: nn.Linear, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    grad = _sequence(grads[0])
    found: dict[str, Part] = {}
    if "weight" in names:
        found["weight"] = Outer(grad, _sequence(inputs[0]).to(grad.dtype), module.weight.shape)
    if "bias" in names:
        found["bias"] = Direct(_summed(grad))
    return found


@register("transformers.pytorch_utils.Conv1D")
def _transposed(
    module: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    """A linear layer whose weight is stored transposed, as GPT-2 has it."""
    grad = _sequence(grads[0])
    found: dict[str, Part] = {}
    if "weight" in names:
        found["weight"] = Outer(_sequence(inputs[0]).to(grad.dtype), grad, module.weight.shape)
    if "bias" in names:
        found["bias"] = Direct(_summed(grad))
    return found


@register(*CONVOLUTIONS)
def _convolution(
    module: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    grad = grads[0]
    found: dict[str, Part] = {}
    if "weight" in names:
        found["weight"] = Convolution(module, inputs[0].to(grad.dtype), grad)
    if "bias" in names:
        found["bias"] = Direct(grad.flatten(2).sum(2, dtype=torch.float32))
    return found


@register(nn.Embedding)
def _embedding(
    module: nn.Embedding, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            "an embedding must not have max_norm or scale_grad_by_freq: both mix the examples of "
            "a batch; drop them"
        )
    padding = -1 if module.padding_idx is None else module.padding_idx
    index = inputs[0].flatten(1) if inputs[0].dim() > 1 else inputs[0][:, None]
    return {"weight": Rows(index, _sequence(grads[0]), module.weight.shape, padding)}


@register(nn.LayerNorm, nn.RMSNorm)
def _norm(
    module: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    centred = isinstance(module, nn.LayerNorm)
    eps = normalisation.default_eps(inputs[0].dtype) if module.eps is None else module.eps
    scales, biases = normalisation.rows(
        inputs[0], grads[0], tuple(module.normalized_shape), eps, centred=centred
    )
    return {name: Direct(scales if name == "weight" else biases) for name in names}


@register(nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _channels(
    module: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor], names: Collection[str]
) -> dict[str, Part]:
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else grads[0].shape[1]
    scales, biases = normalisation.channels(inputs[0], grads[0], groups, module.eps)
    return {name: Direct(scales if name == "weight" else biases) for name in names}


def _sequence(tensor: Tensor) -> Tensor:
    """(examples, positions, features), whatever was between the first and the last dimension."""
    return tensor[:, None] if tensor.dim() == 2 else tensor.flatten(1, -2)


def _summed(grad: Tensor) -> Tensor:
    """The sum over positions, in float32."""
    return grad.sum(1, dtype=torch.float32)
