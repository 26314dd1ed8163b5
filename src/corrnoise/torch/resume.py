"""What a checkpoint keeps of a run, and whether a run may continue from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from corrnoise.records.ledger import without_plan
from corrnoise.torch.accountant import Entry
from corrnoise.torch.setup import NO_NOISE, Setup

# What belongs to a key, in the header of a run.
_KEYED = ("run_id", "key_fingerprint", "data", "parameters", "order")
# One process may save for all: see ``restore``.
_OWN = "rank"


def warn_if_final(*, key_kept: bool, ledger_kept: bool) -> None:
    """Say that a checkpoint that is being saved cannot be resumed, where that is so."""
    missing = [
        f"{name}=" for name, kept in (("key", key_kept), ("ledger", ledger_kept)) if not kept
    ]
    if missing:
        warnings.warn(
            f"this checkpoint has the weights, but its run cannot be resumed once the process "
            f"ends: PrivacyEngine had no {' and no '.join(missing)}; give it paths for both, and "
            "keep them apart from the checkpoint",
            stacklevel=3,
        )


def state(run: Setup, inherited: Sequence[Entry]) -> dict[str, Any]:
    """What a checkpoint needs besides model and optimizer: plain values and tensors, no key.

    Args:
        run: that has begun.
        inherited: the history of a run without noise whose weights it has taken over.
    """
    return {
        "header": dict(run.header),
        "step": run.step.taken,
        "rank": run.processes.rank,
        "noise": None if run.noise is None else run.noise.state_dict(),
        "noise_generator": None if run.generator is None else run.generator.get_state(),
        "inherited": list(inherited),
    }


def check(run: Setup, state: Mapping[str, Any]) -> None:
    """Raise unless the state belongs to this run, and the ledger has its steps."""
    step, header = int(state["step"]), state["header"]
    different = [
        f"{name} (was {header.get(name)!r:.60}, is {value!r:.60})"
        for name, value in run.header.items()
        if name != _OWN and header.get(name) != value
    ]
    if header.get("key_fingerprint") != run.header["key_fingerprint"]:
        # The digests of data and parameters depend on the key, and say nothing without it.
        known = without_plan([line for line in different if line.split(" ")[0] not in _KEYED])
        also = f"; it also differs in {'; '.join(known)}" if known else ""
        raise ValueError(
            f"the checkpoint must be loaded with the key of its run, {header['key_fingerprint']}, "
            f"got {run.header['key_fingerprint']}, which would add other noise{also}; give "
            "PrivacyEngine the key and the ledger of that run. If its key was not kept, the run "
            "is over: load the weights into a model before make_private, and count both runs"
        )
    if different:
        raise ValueError(
            "the checkpoint must belong to this run, but differs in "
            f"{'; '.join(without_plan(different))}; "
            "restore those settings, with the key and the ledger of that run"
        )
    released = run.step.ledger.num_released
    if released < step:
        raise ValueError(
            f"the ledger must know all {step} steps of the checkpoint, but has {released}; "
            "give PrivacyEngine the key and the ledger that the run began with"
        )


def restore(run: Setup, state: Mapping[str, Any]) -> list[Entry]:
    """Continue where a state was taken that ``check`` has accepted; what the run had inherited."""
    step = int(state["step"])
    if run.noise is not None and step < run.plan.num_steps:
        if state["rank"] == run.processes.rank:
            run.noise.load_state_dict(state["noise"])
        else:  # the state is of another rank's slice: this rank regenerates its own
            run.noise.seek(step)
    if run.generator is not None:
        run.generator.set_state(state["noise_generator"])
    run.step.seek(step)
    return [_entry(each) for each in state["inherited"]]


def contents(
    run: Setup,
    module_state: Mapping[str, Any],
    accountant: Mapping[str, Any],
    inherited: Sequence[Entry],
    **parts: Any,
) -> dict[str, Any]:
    """The contents of a checkpoint, in the shape of Opacus's own.

    Args:
        run: that has begun.
        module_state: of the model.
        accountant: its state; Opacus's own accountants do not continue it.
        inherited: as in ``state``.
        parts: the optimizer and the schedulers, by the names of their arguments, or ``None``.

    Raises:
        ValueError: the model is sharded over processes.
    """
    if run.processes.sharded:
        raise ValueError(
            "save_checkpoint is for models that one process holds; save a sharded one with "
            "torch.distributed.checkpoint, with engine.state_dict() beside it"
        )
    states = {f"{name}_state_dict": part.state_dict() for name, part in parts.items() if part}
    return {
        "module_state_dict": module_state,
        "privacy_accountant_state_dict": accountant,
        "corrnoise": state(run, inherited),
        **states,
    }


def load_states(data: Mapping[str, Any], **parts: Any) -> None:
    """Load what a checkpoint has of the optimizer and the schedulers that are given."""
    for name, part in parts.items():
        if part is not None and f"{name}_state_dict" in data:
            part.load_state_dict(data[f"{name}_state_dict"])


def without_noise(run: Setup, data: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is of another run, one without noise; says that ε is ∞ then."""
    header = data.get("corrnoise", {}).get("header", {})
    if header.get("noise") != NO_NOISE or header.get("run_id") == run.header["run_id"]:
        return False
    warnings.warn(
        "the checkpoint is of a run without noise: its weights are loaded, and ε = ∞ for this run "
        "from now on; start from a checkpoint that is private",
        stacklevel=3,
    )
    return True


def inherited(data: Mapping[str, Any]) -> list[Entry]:
    """The history of a checkpoint."""
    return [_entry(each) for each in data["privacy_accountant_state_dict"]["history"]]


def _entry(values: Sequence[Any]) -> Entry:
    noise, rate, steps = values
    return float(noise), float(rate), int(steps)


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
