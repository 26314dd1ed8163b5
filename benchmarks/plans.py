"""The planner at the paper's CIFAR-10 setting: the best of each sampling, and how long it takes.

    python benchmarks/plans.py [--epsilon 2] [--json FILE]

For every ε the planner runs with its defaults in a process of its own, alone and beside two others
that are busy, and its time is measured. The columns then have the least error of each sampling,
with any memory; what was only estimated there is priced.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _files
from plans_table import about, table

EPSILONS = (0.5, 1.0, 2.0, 4.0, 9.0)
RUN: dict[str, Any] = {
    "num_examples": 50_000,
    "batch_size": 512,
    "epochs": 10,
    "delta": 1e-5,
    "momentum": 0.9,
    "decay": 0.9999,
}
BUSY = 2


def timed(epsilon: float) -> dict[str, Any]:
    """The plan with the defaults."""
    start = time.perf_counter()
    plan = cn.plan(epsilon=epsilon, **RUN)
    return {
        "epsilon": epsilon,
        "error": plan.error,
        "label": plan.chosen.label if plan.chosen else "",
        "sampling": plan.sampling.name,
        "kind": plan.calibration.kind,
        "seconds": time.perf_counter() - start,
    }


def in_a_process(epsilon: float, busy: int = 0) -> dict[str, Any]:
    """``timed`` in a new process, beside so many that never rest."""
    until = "import os; ours = os.getppid()\nwhile os.getppid() == ours: pass"  # or we are killed
    loop = [sys.executable, "-c", until]
    others = [subprocess.Popen(loop) for _ in range(busy)]
    try:
        command = [sys.executable, __file__, "--timed", str(epsilon)]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return json.loads(found.stdout)


def row(epsilon: float) -> dict[str, Any]:
    """The plan with the defaults, and the best of each sampling."""
    found = in_a_process(epsilon)
    found["busy_seconds"] = in_a_process(epsilon, BUSY)["seconds"]
    found["samplings"] = {}
    for name in cn.samplings.names():
        alone = cn.plan(epsilon=epsilon, sampling=name, memory=None, **RUN)
        assert alone.chosen is not None
        found["samplings"][name] = {
            "error": alone.error,
            "label": alone.chosen.label,
            "vectors": alone.scheme.num_vectors,
            "kind": alone.calibration.kind,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, action="append", help="one of them alone")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--timed", type=float, help="the plan of this ε alone, as JSON")
    given = parser.parse_args()
    if given.timed is not None:
        print(json.dumps(timed(given.timed)))
        return
    found = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "busy": BUSY,
        "rows": [row(epsilon) for epsilon in given.epsilon or EPSILONS],
    }
    print(f"{table(found)}\n\n{about(found)}")
    if given.json:
        _files.write(given.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
