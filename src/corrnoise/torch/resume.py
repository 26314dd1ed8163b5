"""What a checkpoint keeps of a run, and whether a run may continue from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corrnoise.torch import checkpoint
from corrnoise.torch.setup import Setup


def state(run: Setup) -> dict[str, Any]:
    """What a checkpoint needs besides model and optimizer: plain values and tensors, no key."""
    return {
        "header": dict(run.header),
        "step": run.step.taken,
        "rank": run.processes.rank,
        "noise": None if run.noise is None else run.noise.state_dict(),
        "generators": checkpoint.generators(),
        "noise_generator": None if run.generator is None else run.generator.get_state(),
    }


def check(run: Setup, state: Mapping[str, Any]) -> None:
    """Raise unless the state belongs to this run, and the ledger has its steps."""
    step = int(state["step"])
    different = [
        f"{name} (was {state['header'].get(name)!r:.60}, is {value!r:.60})"
        for name, value in run.header.items()
        if state["header"].get(name) != value
    ]
    if different:
        raise ValueError(
            f"the checkpoint must belong to this run, but differs in {'; '.join(different)}; "
            "restore those settings, with the key and the ledger of that run"
        )
    released = run.step.ledger.num_released
    if released < step:
        raise ValueError(
            f"the ledger must know all {step} steps of the checkpoint, but has {released}; "
            "give PrivacyEngine the key and the ledger that the run began with"
        )


def restore(run: Setup, state: Mapping[str, Any]) -> None:
    """Continue where a state was taken that ``check`` has accepted."""
    step = int(state["step"])
    if run.noise is not None and step < run.plan.num_steps:
        if state["rank"] == run.processes.rank:
            run.noise.load_state_dict(state["noise"])
        else:  # the state is of another rank's slice: this rank regenerates its own
            run.noise.seek(step)
    if run.generator is not None:
        run.generator.set_state(state["noise_generator"])
    checkpoint.set_generators(state["generators"])
    run.step.sums.drop()
    run.step.taken = step


def contents(run: Setup, module_state: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """The contents of a checkpoint, in the shape of Opacus's own.

    Raises:
        ValueError: the model is sharded over processes.
    """
    if run.processes.sharded:
        raise ValueError(
            "save_checkpoint is for models that one process holds; save a sharded one with "
            "torch.distributed.checkpoint, with engine.state_dict() beside it"
        )
    plan = run.plan
    data = {
        "module_state_dict": module_state,
        "privacy_accountant_state_dict": {
            # The name keeps Opacus's own accountants from continuing it.
            "mechanism": "corrnoise",
            "history": [(plan.noise_multiplier, 1 / plan.participation.min_sep, run.step.taken)],
        },
        "corrnoise": state(run),
    }
    if optimizer is not None:
        data["optimizer_state_dict"] = optimizer.state_dict()
    return data


def check_contents(
    run: Setup, data: Mapping[str, Any], path: object, *, with_optimizer: bool
) -> None:
    """Raise unless a checkpoint is one of this run, with or without its optimizer as asked for."""
    if "corrnoise" not in data:
        raise ValueError(
            f"path must be a checkpoint of this engine, got {path}, perhaps Opacus's own; "
            "load its weights into the model before make_private, and start a new run"
        )
    check(run, data["corrnoise"])
    if with_optimizer != ("optimizer_state_dict" in data):
        raise ValueError(
            "optimizer must be given exactly if it was when the checkpoint was saved; "
            "its momentum is part of the run"
        )
