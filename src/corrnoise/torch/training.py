"""Train a classifier by a plan, and keep what a report needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from corrnoise import checks
from corrnoise.planning import Plan
from corrnoise.run import Record, Run
from corrnoise.torch import models
from corrnoise.torch.datasets import Data, Tensors, whole_batch
from corrnoise.torch.engine import PrivacyEngine

# How far the noise may move the weights, as a norm: between what won on CIFAR-10 (3.6) and on
# digits (20), for every mechanism alike.
_MOVE = 8.0
# Certificates for balls-in-bins take seconds: so many along the way.
_CERTIFICATES = 4


def default_rate(plan: Plan, clip_norm: float, num_parameters: int) -> float:
    """A learning rate to begin with, for any mechanism: the noise moves the weights by 8.

    The error of one weight is ``plan.error`` for a learning rate, a clip norm and a batch of 1.
    """
    batch = plan.num_examples // plan.participation.min_sep
    return _MOVE * batch / (plan.error * clip_norm * num_parameters**0.5)


def train(
    plan: Plan,
    data: Data,
    *,
    model: str = "auto",
    learning_rate: float | None = None,
    clip_norm: float = 1.0,
    label: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    folder: str | Path | None = None,
    key: str | Path | None = None,
    max_physical_batch_size: int | None = None,
    progress: Callable[[int, int, float | None], None] | None = None,
) -> Run:
    """Train a model privately and evaluate it after every epoch.

    Args:
        plan: the promise; its workload says momentum and decay.
        data: what to learn.
        model: as in ``models.build``.
        learning_rate: ``default_rate`` if not given.
        clip_norm: C.
        label: how the run is called; the mechanism's name by default.
        seed: of the initial weights. Noise and batches come from a fresh key.
        device: of torch.
        folder: where a checkpoint is written after each epoch, and the ledger; a run that is there
            is resumed.
        key: where the key of such a run is kept; ``FOLDER.key`` by default, beside the folder.
        max_physical_batch_size: examples that go through the model at a time.
        progress: called after each epoch with steps taken, steps in all, and test accuracy.

    Returns:
        what happened, for tables and reports.
    """
    workload = plan.mechanism.workload
    if workload.momentum is None or workload.decay is None:
        raise ValueError(
            f"plan must be for SGD with momentum and decay, got {workload!r}; "
            "write a loop of your own with corrnoise.torch.PrivacyEngine"
        )
    clip_norm = checks.number("clip_norm", clip_norm, 0.0, open_low=True)
    net = models.build(model, data.shape, data.num_classes, seed=seed).to(device)
    size = sum(p.numel() for p in net.parameters())
    rate = default_rate(plan, clip_norm, size) if learning_rate is None else learning_rate
    rate = checks.number("learning_rate", rate, 0.0, open_low=True)
    place = None if folder is None else Path(folder)
    engine = _engine(place, key)
    with closing(engine):
        momentum, weight_decay = sgd_settings(workload.momentum, workload.decay, rate)
        wrapped, optimizer, loader = engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(
                net.parameters(), lr=rate, momentum=momentum, weight_decay=weight_decay
            ),
            data_loader=DataLoader(
                data.train.to(device), batch_size=plan.batch_size, collate_fn=whole_batch
            ),
            max_grad_norm=clip_norm,
            plan=plan,
        )
        checkpoint = None if place is None else place / "checkpoint.pt"
        records: list[Record] = []
        if checkpoint is not None and checkpoint.exists():
            found = engine.load_checkpoint(path=checkpoint, module=wrapped, optimizer=optimizer)
            records = [Record(**record) for record in found["records"]]
        test = data.test.to(device)
        n, b = plan.num_steps, plan.participation.min_sep
        start = time.perf_counter()
        while engine.steps_taken < n:
            loss = _epoch(wrapped, optimizer, loader, max_physical_batch_size)
            taken = engine.steps_taken
            test_loss, accuracy = evaluate(wrapped, test)
            epochs = -(-n // b)
            due = plan.sampling != "balls-in-bins" or (
                (taken // b) % max(1, epochs // _CERTIFICATES) == 0 or taken == n
            )
            spent = engine.get_epsilon(plan.delta) if due else None
            records.append(Record(taken, spent, loss, test_loss, accuracy))
            if checkpoint is not None:
                engine.save_checkpoint(
                    path=checkpoint,
                    module=wrapped,
                    optimizer=optimizer,
                    checkpoint_dict={"records": [vars(record) for record in records]},
                )
            if progress is not None:
                progress(taken, n, accuracy)
        seconds = time.perf_counter() - start
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
        model={"name": model, "num_parameters": size},
        settings={
            "learning_rate": rate,
            "clip_norm": clip_norm,
            "seed": seed,
            "device": device,
        },
        seconds=seconds,
    )


def evaluate(net: nn.Module, data: Tensors, *, batch_size: int = 2048) -> tuple[float, float]:
    """Mean loss and accuracy."""
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


def _epoch(net: nn.Module, optimizer: Any, loader: Any, most: int | None) -> float:
    """One pass over the loader; the mean loss."""
    if most is not None:
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=most, optimizer=optimizer
        ) as parts:
            return _epoch(net, optimizer, parts, None)
    total = torch.zeros(())
    count = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        if len(y):
            total = total.to(loss.device) + loss.detach() * len(y)
            count += len(y)
    return float(total) / max(count, 1)


def sgd_settings(momentum: float, decay: float, rate: float) -> tuple[float, float]:
    """Momentum and weight decay of torch's SGD for a workload: undoes ``optimizers.workload_of``.

    With β and λ of torch, α + β′ = 1 + β - ηλ and α·β′ = β, so ηλ = (1 - α)(1 - β′).
    """
    return decay * momentum, (1.0 - decay) * (1.0 - momentum) / rate


def _engine(folder: Path | None, key: str | Path | None) -> PrivacyEngine:
    if folder is None:
        return PrivacyEngine(key=key)
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(folder.name + ".key") if key is None else Path(key)
    return PrivacyEngine(key=beside, ledger=folder / "ledger")
