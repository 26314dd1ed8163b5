"""How much correlated noise gains where training forgets: signal over noise, by what is remembered.

    python benchmarks/forgetting.py [--json FILE]

With weight decay, and wherever the loss is curved, later steps take back what earlier noise has
done, so that a model remembers the last m of its n steps: decay 1 - 1/m. For CIFAR-10's number of
examples and one ε, this compares plans for a run that forgets nothing with DP-SGD on Poisson
batches: the sum of equal gradients of norm C that is remembered at the last step, over the standard
deviation of each coordinate of the noise there, in thousands. Seconds for each plan.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise import _files, workloads
from corrnoise.algebra import toeplitz
from forgetting_table import table

EXAMPLES, EPSILON, DELTA, MOMENTUM = 50_000, 8.0, 1e-5, 0.9
PARTS = (1.0, 0.3, 0.1, 0.03, 0.01)
# Epochs, the batch of correlated noise, and that of DP-SGD, which gains from large ones.
RUNS = ((10, 1024, 4096), (48, 1024, 4096), (140, 2048, 4096))


def ratio(plan: cn.Plan, momentum: float, part: float) -> float:
    """Signal over noise at the last step, where this part of the steps is remembered."""
    n = plan.num_steps
    decay = 1.0 if part == 1.0 else 1.0 - 1.0 / (part * n)
    workload = workloads.sgd(n, momentum=momentum, decay=decay).coef
    noise = toeplitz.multiply(workload, plan.mechanism.noising_coef, n)
    deviation = plan.noise_multiplier * float(np.linalg.norm(noise))
    return plan.batch_size * float(np.sum(workload)) / deviation


def row(epochs: int, batch: int, kind: str) -> dict[str, Any]:
    poisson = kind == "DP-SGD, Poisson"
    momentum = 0.0 if poisson else MOMENTUM
    plan = cn.plan(
        num_examples=EXAMPLES, batch_size=batch, epochs=epochs, epsilon=EPSILON, delta=DELTA,
        momentum=momentum, sampling="poisson" if poisson else "best",
        mechanisms=["dp_sgd"] if poisson else None,
    )  # fmt: skip
    return {
        "epochs": epochs,
        "batch": batch,
        "method": kind,
        "mechanism": repr(plan.mechanism),
        "sampling": plan.sampling.name,
        "ratios": [ratio(plan, momentum, part) for part in PARTS],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    rows = [
        row(epochs, batch, kind)
        for epochs, correlated, independent in RUNS
        for kind, batch in (("planner's choice", correlated), ("DP-SGD, Poisson", independent))
    ]
    found = {"epsilon": EPSILON, "delta": DELTA, "parts": PARTS, "rows": rows}
    print(table(found))
    if given.json:
        _files.write(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
