"""What must hold before a run begins: its plan, its loader, its modes, its key and its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from corrnoise.ledger import Ledger, read_entries
from corrnoise.noise import Key
from corrnoise.noise.filters import Filter
from corrnoise.planning import Plan
from corrnoise.torch.processes import Processes

MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")


def check_plan(plan: Plan, loader: DataLoader[Any], epochs: int | None) -> None:
    """Raise unless the loader has the examples and batches of the plan."""
    size, batches = len(loader.dataset), len(loader)  # type: ignore[arg-type]
    if plan.num_examples != size:
        raise ValueError(
            f"data_loader must have the plan's {plan.num_examples} examples, got {size}; "
            "plan for this dataset"
        )
    if plan.participation.min_sep != batches:
        raise ValueError(
            f"data_loader must have the plan's {plan.participation.min_sep} batches in an epoch, "
            f"got {batches}; use batch_size={plan.batch_size} without drop_last, or plan for this "
            "loader"
        )
    steps = plan.num_steps if epochs is None else epochs * batches
    if steps != plan.num_steps:
        raise ValueError(
            f"epochs must be the plan's ({plan.num_steps} steps), got {epochs} ({steps} steps); "
            "drop the argument, or plan for as many"
        )


def check_realized(plan: Plan) -> None:
    """Raise unless the plan was priced for the float32 coefficients that the noise runs with."""
    if Filter.of(plan.mechanism).realized != plan.mechanism:
        raise ValueError(
            f"plan must be priced for the coefficients that run, rounded to float32, got "
            f"{plan.mechanism!r} before rounding, whose sensitivity may be smaller; use "
            "corrnoise.plan, or calibrate CorrelatedNoise(mechanism).mechanism"
        )


def check_modes(grad_sample_mode: str, clipping: str, processes: Processes) -> None:
    """Raise unless this way of taking and clipping gradients is covered."""
    if clipping not in ("flat", "per_layer"):
        raise ValueError(
            f"clipping must be 'flat' or 'per_layer', got {clipping!r}; a clip norm that follows "
            "the data changes the sensitivity from step to step, which the plan does not price"
        )
    if grad_sample_mode not in MODES:
        raise ValueError(
            f"grad_sample_mode must be one of {', '.join(MODES)}, got {grad_sample_mode!r}"
        )
    if processes.sharded != (grad_sample_mode == "ghost_fsdp"):
        raise ValueError(
            f"grad_sample_mode must be 'ghost_fsdp' for a model of fully_shard, and for no other, "
            f"got {grad_sample_mode!r}"
        )


def refuse_schedulers(noise_scheduler: object, grad_clip_scheduler: object) -> None:
    """Raise if either was given."""
    if noise_scheduler is not None or grad_clip_scheduler is not None:
        raise ValueError(
            "noise and clip schedulers must be left out: the plan has one noise level and one "
            "clip norm for all steps"
        )


def trainable(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that get gradients, in the optimizer's order; refuses none at all."""
    found = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not found:
        raise ValueError(
            "module must have parameters to train, got none that requires a gradient; "
            "unfreeze some before make_private"
        )
    return found


def open_key(source: object, ledger: Path | None) -> Key:
    """The key of a run: as given, from its file, or new.

    Raises:
        ValueError: a key file without the ledger of its run, or the other way round.
    """
    if source is None:
        return Key.generate()
    if isinstance(source, Key):
        return source
    place = Path(str(source))
    known = ledger is not None and ledger.exists()
    if place.exists():
        if not known:
            without = "no ledger was given" if ledger is None else f"{ledger} does not"
            raise ValueError(
                f"key must be new or come with the ledger of its run, but {place} exists and "
                f"{without}; a key belongs to one run: give its ledger, or another path for a "
                "new key"
            )
        return Key.load(place)
    if ledger is not None and known and len(read_entries(ledger)[0]) > 1:
        raise ValueError(
            f"key must be the one of the run in {ledger}, but {place} does not exist; "
            "restore it: without it the run cannot go on"
        )
    return Key.generate()


def keep_key(source: object, key: Key) -> None:
    """Save a new key where the user wants it. The ledger must be there already.

    A process that is killed before leaves a ledger without steps, which binds nobody; a key
    without a ledger might have been used.
    """
    if source is not None and not isinstance(source, Key) and not Path(str(source)).exists():
        key.save(str(source))


def open_ledger(path: Path | None, header: Mapping[str, Any], processes: Processes) -> Ledger:
    """The ledger of this process: each rank has its own, since each sees its own gradients."""
    if path is not None and processes.rank:
        path = path.with_name(f"{path.name}.rank{processes.rank}")
    more = {"rank": processes.rank, "world_size": processes.world_size}
    return Ledger({**header, **more}, path)
