"""Accuracy on handwritten digits at one budget, with the engine: the table of the README.

    python benchmarks/digits.py [--quick] [--json FILE]

scikit-learn's 1,797 images; 360 of them, a fixed fifth, are the test set. Two settings: one where
correlated noise has half the error, and one, of many epochs at a small ε, where it is a draw.
Batches of 64, the same model, clip norm and momentum for all. The learning rate of each method is
the best of a grid on 287 images that are held out of the training set, mean of 15 seeds; then 40
other seeds train on all training images. A seed is the model's initial weights; noise and batches
are fresh. The search over learning rates is not part of ε.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import corrnoise as cn
from corrnoise import _files, _tables
from corrnoise._rounding import with_decimals
from corrnoise.torch import PrivacyEngine

DELTA, BATCH, CLIP, MOMENTUM = 1e-4, 64, 1.0, 0.9
# ε and epochs.
SETTINGS = ((8.0, 10), (1.0, 20))
METHODS: dict[str, dict[str, Any]] = {
    "planner's choice": {},
    "planner's choice, fixed batches": {"sampling": "fixed"},
    "DP-SGD, Poisson": {"mechanisms": ["dp_sgd"], "sampling": "poisson"},
    "DP-SGD, fixed batches": {"mechanisms": ["dp_sgd"], "sampling": "fixed"},
}
RATES = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64]


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32) / 16
    y = torch.tensor(labels[order])
    return x[360:], y[360:], x[:360], y[:360]


def make_plan(method: str, num_examples: int, epsilon: float, epochs: int) -> cn.Plan:
    return cn.plan(
        num_examples=num_examples,
        batch_size=BATCH,
        epochs=epochs,
        epsilon=epsilon,
        delta=DELTA,
        momentum=MOMENTUM,
        **METHODS[method],
    )


def train(plan: cn.Plan, rate: float, seed: int, split: tuple[torch.Tensor, ...]) -> float:
    """Accuracy on the held-out part after one run."""
    x, y, x_test, y_test = split
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    engine = PrivacyEngine()
    net, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=rate, momentum=MOMENTUM),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=BATCH),
        max_grad_norm=CLIP,
        plan=plan,
    )
    criterion = nn.CrossEntropyLoss()
    while engine.steps_taken < plan.num_steps:
        for inputs, target in loader:
            optimizer.zero_grad()
            criterion(net(inputs), target).backward()
            optimizer.step()
    with torch.no_grad():
        return (net(x_test).argmax(dim=1) == y_test).float().mean().item()


def run(
    settings: Sequence[tuple[float, int]], rates: list[float], tuning_seeds: int, seeds: int
) -> dict[str, Any]:
    x, y, x_test, y_test = data()
    held = len(x) // 5
    tuning = (x[held:], y[held:], x[:held], y[:held])
    rows: list[dict[str, Any]] = []
    for (epsilon, epochs), method in product(settings, METHODS):
        start = time.perf_counter()
        small = make_plan(method, len(tuning[0]), epsilon, epochs)
        scores = {
            rate: statistics.mean(train(small, rate, 100 + s, tuning) for s in range(tuning_seeds))
            for rate in rates
        }
        best = max(scores, key=scores.__getitem__)
        plan = make_plan(method, len(x), epsilon, epochs)
        found = [train(plan, best, s, (x, y, x_test, y_test)) for s in range(seeds)]
        rows.append(
            {
                "epsilon": epsilon,
                "epochs": epochs,
                "method": method,
                "mechanism": repr(plan.mechanism),
                "sampling": plan.sampling.name,
                "noise_multiplier": plan.noise_multiplier,
                "error": plan.error,
                "learning_rate": best,
                "tuning": {str(rate): score for rate, score in scores.items()},
                "accuracy": found,
                "mean": statistics.mean(found),
                "standard_error": statistics.stdev(found) / len(found) ** 0.5,
                "seconds": time.perf_counter() - start,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {
        "delta": DELTA,
        "machine": f"{platform.machine()}, threads: {torch.get_num_threads()}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    header = ["ε, epochs", "method", "batches", "noise", "expected error", "test accuracy"]
    rows = [
        [
            f"{row['epsilon']:g}, {row['epochs']}",
            row["method"],
            row["sampling"],
            with_decimals(row["noise_multiplier"], 2),
            f"{row['error']:.0f}",
            f"{100 * row['mean']:.1f} ± {100 * row['standard_error']:.1f} %",
        ]
        for row in result["rows"]
    ]
    return _tables.markdown(header, rows, left=(0, 1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2 epochs, 2 rates, 2 seeds")
    parser.add_argument("--json", type=Path, help="write the result there")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    result = run([(8.0, 2)], [0.04, 0.16], 1, 2) if given.quick else run(SETTINGS, RATES, 15, 40)
    print(table(result))
    if given.json:
        _files.write(given.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
