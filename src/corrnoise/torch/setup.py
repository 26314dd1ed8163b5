"""The start of a run: checks, key and ledger, and the plan's parts in Opacus's objects."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.noise.exact import ExactNoise
from corrnoise.planning import Plan
from corrnoise.records import Ledger
from corrnoise.records.header import header
from corrnoise.records.keys import keep_key, open_key
from corrnoise.records.spent import Spent
from corrnoise.torch import opacus, owners, secure, seeds
from corrnoise.torch.adam import introduce
from corrnoise.torch.draws import StepDraws
from corrnoise.torch.fingerprint import data_digest, parameter_digest
from corrnoise.torch.gradient_noise import GradientNoise
from corrnoise.torch.loader import StepSampler, step_loader
from corrnoise.torch.modes import OWN
from corrnoise.torch.one_pass import OnePassSums
from corrnoise.torch.options import Options
from corrnoise.torch.placement import trained
from corrnoise.torch.processes import Processes
from corrnoise.torch.requirements import check_inputs
from corrnoise.torch.step import PrivateStep
from corrnoise.torch.without_noise import is_private

NO_NOISE = "none"  # in the header of a run that is not private
# What the processes of a run may have differently in their headers.
_OWN = ("rank", "run_id", "settings")


@dataclass(frozen=True)
class Setup:
    """A run that has begun.

    Attributes:
        plan: what was planned and priced.
        key: the secret.
        noise: an ``ExactNoise`` in secure mode; ``None`` where Opacus's own normals are kept.
        step: takes the steps, and counts them.
        optimizer: torch's, which alone may change the parameters.
        header: what must not change until the end; as in the ledger.
        processes: this one among those that train the model.
        spent: ε by the number of steps.
        generator: torch's, where it makes the noise instead of the stream.
        inputs: hooks that look at the first inputs of layers.
    """

    plan: Plan
    key: Key
    noise: CorrelatedNoise | ExactNoise | None
    step: PrivateStep
    optimizer: torch.optim.Optimizer
    header: Mapping[str, Any]
    processes: Processes
    spent: Spent
    generator: torch.Generator | None
    inputs: Sequence[RemovableHandle]

    def close(self) -> None:
        """Release the ledger, and leave model and optimizer alone from now on."""
        self.step.ledger.close()
        self.step.sums.close()
        for handle in self.inputs:
            handle.remove()
        owners.disown(self.optimizer)


def set_up(
    plan: Plan,
    processes: Processes,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader[Any],
    shuffled: bool,
    data_fingerprint: str | None,
    settings: Mapping[str, Any],
    publishes: str,
    key: Any,
    ledger: Path | None,
    options: Options,
) -> tuple[Setup, Any]:
    """Wrap module, optimizer and loader with Opacus, and put the plan's parts in.

    Key and ledger are written last, when nothing can be refused any more.

    Args:
        plan: checked against the loader.
        processes: that train the model.
        module: the model.
        optimizer: torch's.
        data_loader: the user's.
        shuffled: whether it shuffles.
        data_fingerprint: a name for the dataset, or ``None`` for a digest.
        settings: of the user, which must not change.
        publishes: what releases a step.
        key: a key, a path or ``None``.
        ledger: a path or ``None``.
        options: the arguments that are Opacus's alone.

    Returns:
        the setup, and what ``make_private`` returns.
    """
    params = trained(optimizer)
    if options.exact:
        secure.check(plan, params, processes, options)
    options = dataclasses.replace(options, joins=_may_join(plan))
    secret, run_id = _agreed_key(key, ledger, processes)
    drawn = seeds.draw(
        plan,
        secret,
        data_loader,
        processes,
        shuffled=shuffled,
        fresh=key is None,
        seeded=not is_private(plan.calibration) or options.noise_generator is not None,
    )
    largest = options.max_physical_batch_size
    draws = StepDraws(drawn.key.subkey("draws"), processes.rank)
    sampler = StepSampler(
        drawn.batches,
        draws,
        processes.rank,
        processes.world_size,
        largest,
        options.views,
        float(plan.sampling.rate(plan.participation)),
    )
    loader = step_loader(
        data_loader,
        sampler,
        drawn.key.subkey("augmentation"),
        batch_first=options.batch_first,
        rand_on_empty=options.rand_on_empty,
    )
    if options.grad_sample_mode == OWN:
        criterion = () if options.criterion is None else (options.criterion,)
        returned: Any = (module, optimizer, *criterion, loader)
        sums: Any = OnePassSums(module, optimizer, plan, processes, sampler, options)
    else:
        wrapped = opacus.wrap(module, optimizer, loader, plan, processes.world_size, options)
        returned, sums = (
            wrapped.returned,
            opacus.OpacusSums(wrapped, options, sampler, distributed=processes.distributed),
        )
    mean = options.loss_reduction == "mean"
    scale = plan.noise_multiplier * options.clip_norm / (plan.divisor if mean else 1.0)
    introduce(optimizer, GradientNoise(plan.mechanism, scale))
    noise = None
    if options.exact:
        noise = ExactNoise(plan.mechanism, secret, rounds=plan.rounds)
    elif options.noise_generator is None:
        noise = CorrelatedNoise(plan.mechanism, secret, memory=plan.memory, rounds=plan.rounds)
    opened = header(
        plan,
        run_id=run_id,
        key_fingerprint=secret.fingerprint,
        max_grad_norm=options.max_grad_norm,
        data=data_fingerprint or data_digest(data_loader.dataset, secret),
        parameters=parameter_digest(params, secret),
        shuffled=shuffled,
        settings=settings,
        publishes=publishes,
        noise=_noise_name(plan, noise),
        rank=processes.rank,
        world_size=processes.world_size,
        order=drawn.order,
    )
    try:
        _check_alike(opened, processes)
        book = _open_ledger(ledger, opened, secret, processes)
        use = processes.each(lambda: keep_key(key, secret, book) if processes.rank == 0 else None)
    except BaseException:  # the user may begin once more, with the same model and optimizer
        sums.undo()
        raise
    step = PrivateStep(
        sums,
        noise,
        plan.noise_multiplier,
        sampler,
        draws,
        book,
        secret,
        processes,
        stand_in=options.rand_on_empty,
        joins=options.joins,
        use=use,
    )
    sums.attach(step)
    inputs = check_inputs(module)
    owners.own(module, optimizer, secret.fingerprint)
    setup = Setup(
        plan,
        secret,
        noise,
        step,
        optimizer,
        book.header,
        processes,
        Spent(plan),
        options.noise_generator,
        inputs,
    )
    return setup, returned


def _noise_name(plan: Plan, noise: CorrelatedNoise | ExactNoise | None) -> str:
    if not is_private(plan.calibration):
        return NO_NOISE
    if noise is None:
        return "torch"
    return f"{'exact-' if isinstance(noise, ExactNoise) else ''}chacha{plan.rounds}"


def _may_join(plan: Plan) -> bool:
    """Whether one step may take several batches: see ``PrivateStep``."""
    independent = plan.mechanism.independent or not is_private(plan.calibration)
    return independent and not plan.sampling.secret


def _agreed_key(source: object, ledger: Path | None, processes: Processes) -> tuple[Key, str]:
    """The key and the name of the run, the same in all processes."""

    def make() -> tuple[bytes, str]:
        key, run_id = open_key(source, ledger)
        return key.reveal(), run_id or uuid.uuid4().hex

    secret, run_id = processes.agree(make)
    return Key.from_bytes(secret), run_id


def _check_alike(opened: Mapping[str, Any], processes: Processes) -> None:
    """Raise unless all processes are about to begin the same run.

    Each sees its own share of every batch alone. With another order of the data an example would
    be in several shares or steps, and with another clip norm the noise would be too small for it.
    """
    shared = {name: value for name, value in opened.items() if name not in _OWN}
    first, *others = processes.gathered(shared)
    for rank, other in enumerate(others, start=1):
        different = [name for name, value in first.items() if other.get(name) != value]
        if different:
            raise ValueError(
                f"all processes must begin the same run, but rank {rank} differs from rank 0 in "
                f"{', '.join(different)}; give every process the same arguments, and a loader of "
                "the whole dataset in the same order: make_private deals out the batches"
            )


def _open_ledger(
    path: Path | None, opened: Mapping[str, Any], key: Key, processes: Processes
) -> Ledger:
    """The ledger of this process: each rank has its own, since each sees its own gradients.

    The first rank opens its own before the others: often it alone saves checkpoints, and knows
    which steps they have published.

    Raises:
        ValueError: the ledgers of the ranks do not belong together.
    """
    if path is not None and processes.rank:
        path = path.with_name(f"{path.name}.rank{processes.rank}")
    secret = key.subkey("ledger")
    first = processes.each(lambda: None if processes.rank else Ledger(opened, path, secret))
    published = processes.agree(lambda: first.num_released if first else 0)
    book = processes.each(lambda: first or Ledger(opened, path, secret, published=published))
    counts = processes.gathered(book.num_released)
    # A crash can leave one rank a step behind another.
    if max(counts) - min(counts) > 1:
        book.close()
        raise ValueError(
            f"the ledgers of all ranks must have the same steps, got {counts}; one was lost or "
            "damaged: restore it from a copy, or start a new run with a new key"
        )
    return book
