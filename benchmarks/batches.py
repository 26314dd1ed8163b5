"""How much a larger batch helps independent and correlated noise, by the budget.

    python benchmarks/batches.py [--json FILE]

For the run of cifar_headline.py, with as many epochs whatever the batch size is: the sum of equal
gradients of norm C over all steps, in the mean of the weights of the last tenth of them, over the
standard deviation of each coordinate of the noise in it. What fewer steps cost is not part of it.
Some 15 seconds for each plan of the planner.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import corrnoise as cn
from batches_table import BASE, CHOICE, table
from corrnoise import _files
from forgetting import ratio

EXAMPLES, EPOCHS, DELTA, MOMENTUM, DECAY = 50_000, 10, 1e-5, 0.9, 0.9999
EPSILONS, BATCHES = (0.5, 1.0, 2.0, 4.0, 9.0), (512, 2048, 8192)
METHODS: dict[str, dict[str, Any]] = {
    BASE: {"mechanisms": ["dp_sgd"], "sampling": "poisson"},
    CHOICE: {"sampling": "best"},
}


def row(epsilon: float, batch: int) -> dict[str, Any]:
    """Of one budget and batch size, for every method."""
    methods: dict[str, dict[str, Any]] = {}
    for name, asked in METHODS.items():
        plan = cn.plan(
            num_examples=EXAMPLES, batch_size=batch, epochs=EPOCHS, epsilon=epsilon, delta=DELTA,
            momentum=MOMENTUM, decay=DECAY, **asked,
        )  # fmt: skip
        methods[name] = {
            "mechanism": repr(plan.mechanism),
            "sampling": plan.sampling.name,
            "noise_multiplier": plan.noise_multiplier,
            "signal_over_noise": ratio(plan, 1.0, averaged=True),
        }
    return {"epsilon": epsilon, "batch": batch, "steps": plan.num_steps, "methods": methods}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    rows = list(itertools.starmap(row, itertools.product(EPSILONS, BATCHES)))
    found = {
        "examples": EXAMPLES, "epochs": EPOCHS, "delta": DELTA, "momentum": MOMENTUM,
        "decay": DECAY, "rows": rows,
    }  # fmt: skip
    print(table(found))
    if given.json:
        _files.write(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
