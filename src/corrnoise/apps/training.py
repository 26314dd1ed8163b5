"""Train a classifier by a plan, and record what a report needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from corrnoise import _checks as checks
from corrnoise import _progress
from corrnoise._progress import Progress
from corrnoise.apps import models
from corrnoise.apps.averaging import Average
from corrnoise.apps.datasets import Data, Tensors, whole_batch
from corrnoise.planning import Plan
from corrnoise.records import Record, Run
from corrnoise.torch import PrivacyEngine
from corrnoise.torch import checkpoint as checkpoints

# The distance that the noise moves the weights at the default learning rate: rate·error·√d/batch.
# It lies between the best values on CIFAR-10 (under 4) and on digits (at least 11,
# benchmarks/digits.json).
_MOVE = 8.0
_CHECKPOINT = "checkpoint.pt"


def default_rate(plan: Plan, clip_norm: float, num_parameters: int) -> float:
    """A first learning rate for any mechanism: the noise moves the weights by a norm of 8.

    The error of one weight is ``plan.error`` if learning rate, clip norm and divisor are 1.
    """
    return _MOVE * plan.divisor / (plan.error * clip_norm * num_parameters**0.5)


def train(
    plan: Plan,
    data: Data,
    *,
    model: str | nn.Module = "auto",
    learning_rate: float | None = None,
    clip_norm: float = 1.0,
    label: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    folder: str | Path | None = None,
    key: str | Path | None = None,
    max_physical_batch_size: int | None = None,
    schedule: Literal["constant", "linear"] = "constant",
    average_last: float = 0.0,
    track_epsilon: bool = True,
    progress: Progress | bool | None = None,
) -> Run:
    """Train a model privately and evaluate it after every epoch.

    Args:
        plan: the plan of the run; its workload determines momentum and decay.
        data: the dataset.
        model: a name of ``models.build``, or a module of your own, whose frozen parameters are not
            trained.
        learning_rate: ``default_rate`` if not given.
        clip_norm: C, the largest norm of one example's gradient.
        label: the label of the run; the mechanism's name by default.
        seed: the seed of the initial weights. Noise and batches come from a fresh key.
        device: a device of torch.
        folder: the folder for the ledger and for a checkpoint after each epoch; a run that is
            there is resumed.
        key: the key file of such a run; by default ``FOLDER.key``, beside the folder.
        max_physical_batch_size: the most examples that go through the model at once.
        schedule: the schedule of the learning rate: "linear" lowers it step by step to 0.
        average_last: the fraction of the steps, at the end, whose weights are averaged for
            evaluation; 0 evaluates the last weights. Neither this nor the schedule costs privacy.
        track_epsilon: whether ε is computed after every epoch.
        progress: called after each epoch with (steps taken, steps in all); True for a bar on the
            terminal. The accuracies are in the records of the run.

    Returns:
        The record of the run, for tables and reports.
    """
    workload = plan.mechanism.workload
    if workload.momentum is None or workload.decay is None:
        raise ValueError(
            f"plan must be for SGD with momentum and decay, got {workload!r}; "
            "write a loop of your own with corrnoise.torch.PrivacyEngine"
        )
    clip_norm = checks.number("clip_norm", clip_norm, 0.0, open_low=True)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device must be one that this machine has, got {device!r} without a CUDA GPU; "
            "use 'cpu'"
        )
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        model = models.build(model, data.shape, data.num_classes, seed=seed)
    net = model.to(device)
    trained = [p for p in net.parameters() if p.requires_grad]
    size = sum(p.numel() for p in trained)
    rate = default_rate(plan, clip_norm, size) if learning_rate is None else learning_rate
    rate = checks.number("learning_rate", rate, 0.0, open_low=True)
    checks.choice("schedule", schedule, ("constant", "linear"))
    place = None if folder is None else Path(folder)
    show = _progress.resolve(progress)
    settings = {
        "learning_rate": rate,
        "model": name,
        "seed": seed,
        "schedule": schedule,
        "average_last": average_last,
    }
    engine = _engine(place, key, settings)
    with closing(engine):
        momentum, weight_decay = sgd_settings(workload.momentum, workload.decay, rate)
        made = engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(
                trained, lr=rate, momentum=momentum, weight_decay=weight_decay
            ),
            data_loader=DataLoader(
                data.train.to(device), batch_size=plan.batch_size, collate_fn=whole_batch
            ),
            max_grad_norm=clip_norm,
            plan=plan,
            max_physical_batch_size=max_physical_batch_size,
        )
        wrapped, optimizer, loader = made
        # In Opacus's modes even an empty batch needs a backward pass.
        skip = wrapped is net
        checkpoint = None if place is None else place / _CHECKPOINT
        average = Average(trained, plan.num_steps, average_last)
        records: list[Record] = []
        before = 0.0  # seconds of an interrupted run that is resumed
        if checkpoint is not None and checkpoint.exists():
            found = engine.load_checkpoint(path=checkpoint, module=net, optimizer=optimizer)
            records = [Record(**record) for record in found["records"]]
            average.load(found["average"])
            before = found["seconds"]
        test = data.test.to(device)
        n = plan.num_steps

        def before_step() -> None:
            if schedule == "linear":
                for group in optimizer.param_groups:
                    group["lr"] = rate * (1.0 - engine.steps_taken / n)

        def after_step() -> None:
            if engine.steps_taken > average.num_steps:  # the step is complete
                average.update()

        start = time.perf_counter()
        while engine.steps_taken < n:
            loss = _epoch(net, optimizer, loader, before_step, after_step, skip=skip)
            taken = engine.steps_taken
            with average.weights():
                test_loss, accuracy = evaluate(net, test)
            spent = engine.get_epsilon(plan.delta) if track_epsilon else None
            records.append(Record(taken, spent, loss, test_loss, accuracy))
            if checkpoint is not None:
                engine.save_checkpoint(
                    path=checkpoint,
                    module=net,
                    optimizer=optimizer,
                    checkpoint_dict={
                        "records": [vars(record) for record in records],
                        "average": average.state(),
                        "seconds": before + time.perf_counter() - start,
                    },
                )
            if show is not None:
                show(taken, n)
        seconds = before + time.perf_counter() - start
    return Run(
        label=label or plan.mechanism.name,
        plan=plan,
        statement=engine.statement(),
        records=tuple(records),
        data={
            "name": data.name,
            "num_train": len(data.train),
            "num_test": len(data.test),
            "num_classes": data.num_classes,
        },
        model={"name": name, "num_parameters": size},
        settings={**settings, "clip_norm": clip_norm, "device": device},
        seconds=seconds,
    )


def saved(folder: str | Path) -> int:
    """The number of steps in the checkpoint of a run, from which ``train`` resumes; 0 for none."""
    path = Path(folder) / _CHECKPOINT
    return int(checkpoints.load(path)["corrnoise"]["step"]) if path.exists() else 0


def evaluate(net: nn.Module, data: Tensors, *, batch_size: int = 2048) -> tuple[float, float]:
    """The mean loss and the accuracy of a model."""
    net.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(data), batch_size):
            y = data.labels[start : start + batch_size]
            output = net(data.inputs[start : start + batch_size])
            loss += float(nn.functional.cross_entropy(output, y, reduction="sum"))
            right += int((output.argmax(dim=1) == y).sum())
    net.train()
    return loss / len(data), right / len(data)


def _epoch(
    net: nn.Module,
    optimizer: Any,
    loader: Any,
    before_step: Callable[[], None],
    after_step: Callable[[], None],
    *,
    skip: bool,
) -> float:
    """One pass over the loader, and its mean loss. With ``skip`` empty batches skip the model."""
    total = torch.zeros((), device=next(net.parameters()).device)
    count = 0
    for x, y in loader:
        before_step()
        optimizer.zero_grad()
        if len(y) or not skip:  # many models cannot run on an empty batch
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            if len(y):  # the mean of an empty batch is NaN
                total += loss.detach() * len(y)
                count += len(y)
        optimizer.step()
        after_step()
    return float(total) / max(count, 1)


def sgd_settings(momentum: float, decay: float, rate: float) -> tuple[float, float]:
    """Momentum and weight decay of torch's SGD for a workload: the inverse of ``workload_of``.

    With β and λ of torch, α + β′ = 1 + β - ηλ and α·β′ = β, so ηλ = (1 - α)(1 - β′).
    """
    return decay * momentum, (1.0 - decay) * (1.0 - momentum) / rate


def _engine(
    folder: Path | None, key: str | Path | None, settings: Mapping[str, Any]
) -> PrivacyEngine:
    if folder is None:
        return PrivacyEngine(key=key, settings=settings)
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + ".key") if key is None else Path(key)
    return PrivacyEngine(key=beside, ledger=folder / "ledger", settings=settings)
