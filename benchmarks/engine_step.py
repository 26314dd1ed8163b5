"""Whole steps on the CPU: plain training, stock Opacus and our engine, one run, interleaved.

    python benchmarks/engine_step.py [--steps N] [--ledger] [--paper]

A convolutional network of about 200,000 parameters, or with --paper the paper's, on 32x32 images,
batch 512. Each round takes one step of each, in alternating order, and ratios are those of medians.
Ours has BISR noise with p = 4, once with Opacus's clipping and once in one backward pass.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from corrnoise import _tables
from corrnoise.apps import models
from corrnoise.torch import PrivacyEngine

BATCH = 512


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 168), nn.ReLU(), nn.Linear(168, 10),
    )  # fmt: skip


def stepper(
    engine: Any, data: TensorDataset, build: Callable[[], nn.Module] = network, **options: Any
) -> tuple[Callable[[], float], int]:
    """One step at a time, with the seconds that it took; plain training without an engine."""
    net: Any = build()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader: Any = DataLoader(data, batch_size=BATCH)
    if engine is not None:
        net, optimizer, loader = engine.make_private(
            module=net,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **options,
        )
    criterion = nn.CrossEntropyLoss()
    batches = iter(loader)

    def step() -> float:
        nonlocal batches
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        start = time.perf_counter()
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step, sum(p.numel() for p in net.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ledger", action="store_true", help="with a ledger on the disk")
    parser.add_argument("--paper", action="store_true", help="the paper's convnet")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.randn(2 * BATCH, 3, 32, 32), torch.randint(0, 10, (2 * BATCH,)))
    build = (lambda: models.build("convnet", (3, 32, 32), 10)) if given.paper else network
    ours = {"mechanism": "bisr", "sampling": "fixed", "epochs": given.steps, "num_bands": 4}
    with tempfile.TemporaryDirectory() as folder:

        def engine(name: str) -> PrivacyEngine:
            return PrivacyEngine(ledger=Path(folder) / name if given.ledger else None)

        stock = opacus.PrivacyEngine()
        made = {
            "plain": stepper(None, data, build),
            "stock Opacus": stepper(stock, data, build, poisson_sampling=False),
            "ours, Opacus's clipping": stepper(
                engine("hooks"), data, build, grad_sample_mode="hooks", **ours
            ),
            "ours, one backward pass": stepper(
                engine("own"), data, build, grad_sample_mode="one_pass", **ours
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in made}
        for turn in range(given.steps + 2):
            for name in made if turn % 2 else reversed(made):
                spent = made[name][0]()
                if turn >= 2:
                    times[name].append(spent)
    medians = {name: statistics.median(found) for name, found in times.items()}
    size, threads = made["plain"][1], torch.get_num_threads()
    print(f"{size:,} parameters, batch {BATCH}, {given.steps} steps, {threads} threads")
    rows = [
        [name, f"{1e3 * value:.1f}", f"{value / medians['plain']:.2f}"]
        for name, value in medians.items()
    ]
    print(_tables.text(["step", "ms", "over plain"], rows))


if __name__ == "__main__":
    main()
