"""The start of a run: Opacus's objects, with the plan's batches and the release in their places."""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader

from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.planning import Plan
from corrnoise.sampling import Batches
from corrnoise.torch import admission
from corrnoise.torch.fingerprint import data_digest, parameter_digest
from corrnoise.torch.loader import StepSampler, step_loader
from corrnoise.torch.placement import place
from corrnoise.torch.processes import Processes
from corrnoise.torch.release import Release


@dataclass(frozen=True)
class Session:
    """A run that has begun.

    Attributes:
        plan: what is promised.
        key: the secret.
        noise: ``None`` where Opacus's own normals are kept.
        release: what counts the steps.
        header: what must not change until the end; as in the ledger.
        clip_norm: C; of all layers together where each has its own.
        processes: this one among those that train the model.
    """

    plan: Plan
    key: Key
    noise: CorrelatedNoise | None
    release: Release
    header: Mapping[str, Any]
    clip_norm: float
    processes: Processes


def begin(
    plan: Plan,
    processes: Processes,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    shuffled: bool,
    rand_on_empty: bool,
    data_fingerprint: str | None,
    key: Any,
    ledger: Path | None,
    next_step: Callable[[], int],
    stock: Mapping[str, Any],
) -> tuple[Session, Any]:
    """Wrap module, optimizer and loader with Opacus, and put the plan's parts in.

    Key and ledger are written last, when nothing can be refused any more.

    Args:
        plan: checked against the loader.
        processes: that train the model.
        module: the model.
        optimizer: torch's.
        data_loader: the user's.
        shuffled: whether it shuffles.
        rand_on_empty: Opacus's.
        data_fingerprint: a name for the dataset, or ``None`` for a digest.
        key: a key, a path or ``None``.
        ledger: a path or ``None``.
        next_step: how many steps were taken.
        stock: the arguments that are Opacus's alone.

    Returns:
        the session, and what Opacus's ``make_private`` returned.
    """
    params = admission.trainable(optimizer)
    admission.check_realized(plan)
    secret = Key.from_bytes(processes.agree(lambda: admission.open_key(key, ledger).reveal()))
    sampler = StepSampler(
        Batches.of(plan, secret, shuffled=shuffled),
        next_step,
        processes.rank,
        processes.world_size,
    )
    loader = step_loader(
        data_loader, sampler, batch_first=stock["batch_first"], rand_on_empty=rand_on_empty
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Secure RNG turned off")
        engine = opacus.PrivacyEngine()
    found: Any = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=plan.noise_multiplier,
        poisson_sampling=False,  # the loader has the plan's batches already
        **stock,
    )
    wrapped, private = found[0], found[1]
    wrapped.forbid_grad_accumulation()
    private.attach_step_hook(lambda _: None)  # the release counts, not Opacus's accountant
    # Opacus computes this as int(N·(1/b)), which rounding can make one less, and 0.
    private.expected_batch_size = plan.normaliser / processes.world_size
    noise = None
    if stock["noise_generator"] is None:
        noise = CorrelatedNoise(plan.mechanism, secret, memory=plan.memory, rounds=plan.rounds)
    header = {
        "run_id": processes.agree(lambda: uuid.uuid4().hex),
        "key_fingerprint": secret.fingerprint,
        "mechanism": repr(plan.mechanism),
        "num_steps": plan.num_steps,
        "sampling": plan.sampling,
        "noise_multiplier": plan.noise_multiplier,
        "num_examples": plan.num_examples,
        "batch_size": plan.batch_size,
        "steps_per_epoch": plan.participation.min_sep,
        "max_grad_norm": stock["max_grad_norm"],
        "data": data_fingerprint or data_digest(data_loader.dataset, secret),
        "parameters": parameter_digest(params, secret),
        "shuffled": shuffled,
        "noise": "torch" if noise is None else f"chacha{plan.rounds}",
        "plan": plan.to_json(),
    }
    placement = place(list(private.params), distributed=processes.distributed)
    book = admission.open_ledger(ledger, header, processes)
    if processes.rank == 0:
        admission.keep_key(key, secret)
    release = Release(private, noise, placement, sampler, book, secret)
    private.add_noise = release
    clips = stock["max_grad_norm"]
    clip_norm = math.hypot(*clips) if isinstance(clips, list) else float(clips)
    return Session(plan, secret, noise, release, book.header, clip_norm, processes), found
