"""How much the planner's noise gains where training forgets, by what is remembered of the steps.

    python benchmarks/forgetting.py [--json FILE]

With weight decay, and wherever the loss is curved, later steps take back what earlier noise has
done, so that a model remembers the last m of its n steps: decay 1 - 1/m. Signal over noise is the
sum of equal gradients of norm C that is remembered, over the standard deviation of each coordinate
of the noise in it: in the last weights, or in the mean of the weights of the last tenth of the
steps. For CIFAR-10's number of examples this compares plans with DP-SGD on Poisson batches of the
same size, epochs and momentum. Seconds for each plan.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise import _files, workloads
from corrnoise.algebra import toeplitz
from forgetting_table import table

EXAMPLES, BATCH, DELTA, MOMENTUM = 50_000, 4096, 1e-5, 0.9
PARTS = (1.0, 0.3, 0.1, 0.03, 0.01)
RUNS = ((8.0, 10), (8.0, 40), (8.0, 125), (1.0, 10), (1.0, 40))  # ε, epochs
TOLD = 0.1  # the part that a planner is told of


def decay_of(part: float, num_steps: int) -> float:
    return 1.0 if part == 1.0 else 1.0 - 1.0 / (part * num_steps)


def ratio(plan: cn.Plan, part: float, *, averaged: bool) -> float:
    """Signal over noise, where this part of the steps is remembered."""
    n = plan.num_steps
    count = max(n // 10, 1) if averaged else 1
    workload = workloads.sgd(n, momentum=MOMENTUM, decay=decay_of(part, n)).coef
    shares = mean_of_last(toeplitz.multiply(workload, plan.mechanism.noising_coef, n), count)
    deviation = plan.noise_multiplier * float(np.linalg.norm(shares))
    return plan.batch_size * float(np.sum(mean_of_last(workload, count))) / deviation


def mean_of_last(coef: np.ndarray, count: int) -> np.ndarray:
    """What the input of each step adds to the mean of the last outputs of a Toeplitz matrix."""
    sums = np.concatenate([[0.0], np.cumsum(coef)])
    left = np.arange(len(coef), 0, -1)  # outputs that an input is part of
    return (sums[left] - sums[np.maximum(left - count, 0)]) / count


def row(epsilon: float, epochs: int) -> dict[str, Any]:
    def plan(**options: Any) -> cn.Plan:
        return cn.plan(
            num_examples=EXAMPLES, batch_size=BATCH, epochs=epochs, epsilon=epsilon, delta=DELTA,
            momentum=MOMENTUM, **options,
        )  # fmt: skip

    poisson = plan(sampling="poisson", mechanisms=["dp_sgd"])
    plans = {
        "DP-SGD, Poisson": poisson,
        "planner": plan(sampling="best"),
        "planner, told": plan(sampling="best", decay=decay_of(TOLD, poisson.num_steps)),
    }
    return {
        "epsilon": epsilon,
        "epochs": epochs,
        "methods": {
            name: {
                "mechanism": repr(each.mechanism),
                "sampling": each.sampling.name,
                "last": [ratio(each, part, averaged=False) for part in PARTS],
                "averaged": [ratio(each, part, averaged=True) for part in PARTS],
            }
            for name, each in plans.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    rows = list(itertools.starmap(row, RUNS))
    found = {"delta": DELTA, "batch": BATCH, "momentum": MOMENTUM, "parts": PARTS, "rows": rows}
    print(table(found))
    if given.json:
        _files.write(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
