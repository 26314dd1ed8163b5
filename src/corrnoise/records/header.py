"""The header of a ledger: the values that must not change until the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from corrnoise.planning import Plan

_PLANNED: dict[str, Callable[[Plan], Any]] = {
    "mechanism": lambda plan: repr(plan.mechanism),
    "num_steps": lambda plan: plan.num_steps,
    "sampling": lambda plan: plan.sampling.to_json(),
    "noise_multiplier": lambda plan: plan.noise_multiplier,
    "num_examples": lambda plan: plan.num_examples,
    "batch_size": lambda plan: plan.batch_size,
    "steps_per_epoch": lambda plan: plan.participation.min_sep,
}
FIELDS = (
    *_PLANNED, "run_id", "key_fingerprint", "max_grad_norm", "data", "parameters", "shuffled",
    "settings", "publishes", "noise", "plan", "rank", "world_size",
)  # fmt: skip
OPTIONAL = ("order",)


def planned(plan: Plan) -> dict[str, Any]:
    """The fields that follow from a plan, besides its JSON."""
    return {name: value(plan) for name, value in _PLANNED.items()}


def header(
    plan: Plan,
    *,
    run_id: str,
    key_fingerprint: str,
    max_grad_norm: float | list[float],
    data: str,
    parameters: str,
    settings: Mapping[str, Any],
    noise: str,
    shuffled: bool = False,
    publishes: str = "steps",
    rank: int = 0,
    world_size: int = 1,
    order: str | None = None,
) -> dict[str, Any]:
    """The header of a run.

    Args:
        plan: the plan of the run.
        run_id: the id of the run.
        key_fingerprint: the fingerprint of its key.
        max_grad_norm: C, or the clip norm of each layer.
        data: a name for the dataset, or a digest of some examples.
        parameters: a digest of the parameters' shapes and positions.
        settings: the user's settings.
        noise: the source of the noise.
        shuffled: whether the user's loader shuffles.
        publishes: what releases steps: "steps" (each by itself) or only "checkpoints".
        rank: the rank of this process.
        world_size: how many processes train the model.
        order: a digest of the order of fixed batches, if the key does not determine it.
    """
    found = {
        **planned(plan),
        "run_id": run_id,
        "key_fingerprint": key_fingerprint,
        "max_grad_norm": max_grad_norm,
        "data": data,
        "parameters": parameters,
        "shuffled": shuffled,
        "settings": _plain(settings),
        "publishes": publishes,
        "noise": noise,
        "plan": plan.to_json(),
        "rank": rank,
        "world_size": world_size,
    }
    return found if order is None else {**found, "order": order}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a ledger has them when it is read again: a tuple is a list there."""
    try:
        return json.loads(json.dumps(dict(settings)))
    except TypeError as failed:
        raise ValueError(
            f"settings must have plain values, numbers, text, lists and dictionaries of them: "
            f"{failed}; convert them, such as by float(x)"
        ) from None
