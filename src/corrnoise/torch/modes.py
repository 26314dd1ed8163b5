"""Which way of taking and clipping gradients a run has: the argument ``grad_sample_mode``."""

from __future__ import annotations

import dataclasses

from torch import nn

from corrnoise import _checks as checks
from corrnoise.torch import opacus
from corrnoise.torch.clipping.layers import layers
from corrnoise.torch.criterion import ExampleLoss
from corrnoise.torch.options import Options
from corrnoise.torch.processes import Processes

OWN = "one_pass"  # our own clipping
GHOST = ("ghost", "ghost_fsdp")  # Opacus's names for clipping without gradients of single examples


def chosen_mode(options: Options, module: nn.Module, processes: Processes) -> Options:
    """The options with the way of taking and clipping gradients decided.

    In Opacus's ghost modes our own clipping is used, with a criterion in what is returned, as their
    scripts expect. Opacus multiplies the losses by the clip factors there and computes gradients a
    second time, which norms of the first ones do not bound.

    Raises:
        ValueError: it is not covered.
    """
    mode = options.grad_sample_mode
    if options.clipping not in ("flat", "per_layer"):
        raise ValueError(
            f"clipping must be 'flat' or 'per_layer', got {options.clipping!r}; a clip norm that "
            "follows the data changes the sensitivity from step to step, which the plan does not "
            "price"
        )
    checks.choice("grad_sample_mode", mode, ("auto", OWN, *GHOST, *opacus.MODES))
    clips = options.max_grad_norm
    if isinstance(clips, list) != (options.clipping == "per_layer"):
        raise ValueError(
            "max_grad_norm must be a list, of a clip norm for each parameter, with "
            f"clipping='per_layer' and one number otherwise, got {clips!r} with "
            f"clipping={options.clipping!r}"
        )
    for clip in clips if isinstance(clips, list) else [clips]:
        checks.number("max_grad_norm", clip, 0.0, open_low=True)
    objection = _objection(module, options)
    if mode in (OWN, *GHOST) and objection:
        raise ValueError(f"grad_sample_mode={mode!r} cannot take this model: {objection}")
    criterion = None
    if mode in GHOST:
        criterion, mode = ExampleLoss(options.criterion, options.loss_reduction), OWN
    if mode == "auto":
        mode = "hooks" if objection or options.exact else OWN
    if mode != OWN and processes.sharded:
        raise ValueError(
            f"grad_sample_mode must be {OWN!r} for a model of fully_shard, got {mode!r}"
            + (f"; but {OWN!r} cannot take this model: {objection}" if objection else "")
        )
    if processes.sharded:
        _check_sharded(module)
    checks.integer("views", options.views, 1)
    if mode != OWN and options.views > 1:
        raise ValueError(
            f"views must be 1 with grad_sample_mode={mode!r}, got {options.views}; several views "
            f"need {OWN!r}" + (f", which cannot take this model: {objection}" if objection else "")
        )
    if mode != OWN and options.max_physical_batch_size is not None:
        raise ValueError(
            f"max_physical_batch_size must be left out with grad_sample_mode={mode!r}; use "
            f"Opacus's BatchMemoryManager, or grad_sample_mode={OWN!r}"
        )
    return dataclasses.replace(options, grad_sample_mode=mode, criterion=criterion)


def _check_sharded(module: nn.Module) -> None:
    """Raise if a layer has to be run again for its gradients: its parameters are sharded then."""
    trained = {id(param) for param in module.parameters() if param.requires_grad}
    again = [layer for layer in layers(module, trained) if layer.handler is None]
    if again:
        raise ValueError(
            f"every trained layer of a model of fully_shard must have a handler, got none for "
            f"{again[0].name or 'the model'!r} ({type(again[0].module).__name__}): use "
            "DistributedDataParallel, freeze the layer, or register a handler for it"
        )


def _objection(module: nn.Module, options: Options) -> str:
    """Why our own clipping cannot take this model with these options, or nothing."""
    if options.noise_generator is not None:
        return "noise_generator keeps Opacus's own normals"
    if not options.batch_first:
        return "the examples must be the first dimension, got batch_first=False"
    if options.clipping != "flat" or isinstance(options.max_grad_norm, list):
        return "it clips all layers together, got clipping='per_layer'"
    if options.rand_on_empty:
        return "it runs on empty batches, got rand_on_empty=True"
    if len({param.device for param in module.parameters()}) > 1:
        return "all parameters must be on one device"
    for name, part in module.named_modules():
        if isinstance(part, opacus.MIXING):
            return (
                f"{name!r} is a {type(part).__name__}, which mixes the examples of a batch; use "
                "GroupNorm, or PrivacyEngine.get_compatible_module"
            )
        if isinstance(part, opacus.OWN_LAYERS):
            return f"{name!r} is a {type(part).__name__} of Opacus, which its own hooks know"
        if getattr(part, "track_running_stats", False):
            return f"{name!r} keeps running statistics of the data, which are not private"
    return ""
