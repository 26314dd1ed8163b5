"""What a run asks of a model and its optimizer, seen before anything is priced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from corrnoise.noise.backends.torch_targets import DTYPES
from corrnoise.torch import opacus, owners
from corrnoise.torch.clipping.fallback import ATTENTION
from corrnoise.torch.clipping.hook import Hook
from corrnoise.torch.modes import OWN
from corrnoise.torch.options import Options
from corrnoise.torch.placement import trained
from corrnoise.torch.processes import Processes


def check(module: nn.Module, optimizer: Optimizer, processes: Processes, options: Options) -> None:
    """Raise unless a run can train the model by the optimizer.

    Args:
        module: the model.
        optimizer: the user's.
        processes: that train the model.
        options: with the mode of taking gradients decided.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}; one "
            "optimizer holds all that is trained, in parameter groups where they differ"
        )
    params = trained(optimizer)
    if not params:
        raise ValueError(
            "module must have parameters to train, got none that requires a gradient; "
            "unfreeze some before make_private"
        )
    _check_held(module, params)
    owners.check_new(optimizer)
    _check_embeddings(module, options.grad_sample_mode)
    wide = {str(p.dtype) for p in params if p.dtype not in DTYPES}
    if wide:
        raise ValueError(
            f"trained parameters must be float32, bfloat16 or float16, got {', '.join(wide)}; "
            "noise is made in float32: convert the model"
        )
    opacus.check_free(module)
    _check_hooks(module, params)
    if options.grad_sample_mode == OWN:
        _check_attention(module)
    else:
        opacus.validate(module)
        check_precision(
            params,
            distributed=processes.distributed,
            stock_noise=options.noise_generator is not None,
        )


def _check_held(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Raise unless the trained parameters of an optimizer are those of a module, all of them."""
    names = {id(param): name for name, param in module.named_parameters()}
    held = {id(param) for param in params}
    strange = [param for param in params if id(param) not in names]
    if strange:
        raise ValueError(
            f"optimizer must hold parameters of the module alone, got one of shape "
            f"{tuple(strange[0].shape)} that the module does not have; make it from "
            "module.parameters(), and put what else is trained, such as a loss with weights, into "
            "the module"
        )
    left = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        raise ValueError(
            f"optimizer must hold every parameter of the module that requires a gradient, got none "
            f"of {', '.join(map(repr, left[:3]))}{' and others' if left[3:] else ''}, whose "
            "gradients would be neither clipped nor noisy; freeze what is not trained "
            "(requires_grad_(False)), or give it to the optimizer"
        )


def _check_hooks(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Raise if a function of the user's waits for gradients, which it would never see."""
    names = {id(param): name for name, param in module.named_parameters()}
    for param in params:
        hooks: Any = (param._backward_hooks, getattr(param, "_post_accumulate_grad_hooks", None))
        if any(hooks):
            raise ValueError(
                f"a trained parameter must have no hook of its own, got one on {names[id(param)]!r}"
                "; clipping computes its gradients without autograd, and would not call it: remove "
                "the hook, and change the parameter after optimizer.step(), which costs no privacy"
            )


def _check_embeddings(module: nn.Module, mode: str) -> None:
    """Raise if an embedding changes or counts what other examples have, or is trained wrongly."""
    for name, part in module.named_modules():
        padded = isinstance(part, nn.Embedding) and part.padding_idx is not None
        if mode == "ew" and padded and part.weight.requires_grad:
            raise ValueError(
                f"an embedding must not have padding_idx with grad_sample_mode='ew', got "
                f"{part.padding_idx} in {name!r}: torch's expanded weights would train that row; "
                "use 'one_pass' or 'hooks'"
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise ValueError(
                f"an embedding must not have max_norm, got {part.max_norm:g} in {name!r}: its rows "
                "would be scaled in the forward pass, without noise, where examples have their "
                "tokens; drop it"
            )
        if isinstance(part, nn.Embedding) and part.scale_grad_by_freq:
            raise ValueError(
                f"an embedding must not have scale_grad_by_freq, got it in {name!r}: gradients "
                "would be divided by how often all examples of a batch have a token; drop it"
            )


def _check_attention(module: nn.Module) -> None:
    """Raise if torch's attention draws: it runs once more for each example, and would draw anew."""
    for name, part in module.named_modules():
        draws = isinstance(part, nn.MultiheadAttention) and part.training and part.dropout
        if draws and any(param.requires_grad for param in part.parameters(recurse=False)):
            raise ValueError(
                f"torch's MultiheadAttention must have no dropout, got {draws:g} in {name!r}; "
                f"{ATTENTION}, or set its dropout to 0"
            )


def check_precision(
    params: Sequence[nn.Parameter], *, distributed: bool, stock_noise: bool
) -> None:
    """Raise unless gradients of these parameters are clipped and summed in float32.

    Args:
        params: that are trained.
        distributed: whether gradients are summed over processes.
        stock_noise: whether Opacus draws the noise, in the type of the parameters.
    """
    kinds = sorted({str(p.dtype) for p in params if p.dtype != torch.float32})
    if not kinds:
        return
    got = ", ".join(kinds).replace("torch.", "")
    if distributed:
        raise ValueError(
            f"trained parameters must be float32 in several processes, got {got}; sums would be "
            "rounded to that type before all of the noise is added: use float32 parameters"
        )
    if stock_noise:
        raise ValueError(
            f"noise_generator must be left out for parameters in {got}; Opacus would round the "
            "sums to that type before it adds the noise: drop it, or use float32 parameters"
        )


def check_inputs(module: nn.Module) -> list[RemovableHandle]:
    """Let each of torch's layers refuse float64 inputs at its first call, in words.

    Only where torch would fail itself: a layer of the user's own may convert its input.

    Args:
        module: the model, whose parameters are no float64.

    Returns:
        the hooks, which layers that are never called keep.
    """
    handles: list[RemovableHandle] = []
    for name, layer in module.named_modules():
        code = getattr(type(layer).forward, "__module__", "")
        if code.startswith("torch.nn.modules") and not isinstance(layer, nn.RMSNorm):
            own = next(layer.parameters(recurse=False), None)
            if own is not None:
                handles.append(_watch(name, layer, own.dtype))
    return handles


def _watch(name: str, layer: nn.Module, wanted: torch.dtype) -> RemovableHandle:
    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            raise ValueError(
                f"the inputs of the layer {name!r} must have the type of its parameters, "
                f"{wanted}, got torch.float64; convert the data, as by inputs.float()"
            )
        handle.remove()  # the first batch shows it

    handle = layer.register_forward_pre_hook(Hook(check), prepend=True)
    return handle
