"""Time of a training step with correlated noise over stock Opacus's, one run, interleaved.

    python benchmarks/engine_step.py [--steps N] [--ledger]

A convolutional network of about 200,000 parameters on 32x32 images, batch 512, on the CPU. Each
round takes one step of each, in alternating order, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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


def stepper(engine, data, **options):
    net = network()
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        data_loader=DataLoader(data, batch_size=BATCH),
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
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    data = TensorDataset(torch.randn(2 * BATCH, 3, 32, 32), torch.randint(0, 10, (2 * BATCH,)))
    with tempfile.TemporaryDirectory() as folder:
        ledger = {"ledger": Path(folder) / "ledger"} if given.ledger else {}
        stock, size = stepper(opacus.PrivacyEngine(), data, poisson_sampling=False)
        ours, _ = stepper(
            PrivacyEngine(**ledger), data, mechanism="bisr", sampling="fixed",
            epochs=given.steps, num_bands=4,
        )  # fmt: skip
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        for turn in range(given.steps + 2):
            order = [("stock", stock), ("ours", ours)]
            for name, step in order if turn % 2 else reversed(order):
                spent = step()
                if turn >= 2:
                    times[name].append(spent)
    medians = {name: statistics.median(found) for name, found in times.items()}
    print(
        f"{size:,} parameters, batch {BATCH}, {given.steps} steps, "
        f"{torch.get_num_threads()} threads"
    )
    stock_ms, ours_ms = medians["stock"] * 1e3, medians["ours"] * 1e3
    print(f"stock Opacus {stock_ms:.1f} ms, corrnoise p = 4 {ours_ms:.1f} ms")
    print(f"ratio {medians['ours'] / medians['stock']:.3f}")


if __name__ == "__main__":
    main()
