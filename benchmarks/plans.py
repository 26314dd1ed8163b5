"""The planner at the paper's CIFAR-10 setting: the best of each sampling, and how long it takes.

    python benchmarks/plans.py [--epsilon 2] [--json FILE]

For every ε the planner runs once with its defaults, and its time is measured. The columns then have
the least error of each sampling, with any memory; what was only estimated there is priced.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _tables

EPSILONS = (0.5, 1.0, 2.0, 4.0, 9.0)
RUN: dict[str, Any] = {
    "num_examples": 50_000,
    "batch_size": 512,
    "epochs": 10,
    "delta": 1e-5,
    "momentum": 0.9,
    "decay": 0.9999,
}


def row(epsilon: float) -> dict[str, Any]:
    """The plan with the defaults, and the best of each sampling."""
    start = time.perf_counter()
    plan = cn.plan(epsilon=epsilon, **RUN)
    seconds = time.perf_counter() - start
    found: dict[str, Any] = {
        "epsilon": epsilon,
        "error": plan.error,
        "label": plan.chosen.label if plan.chosen else "",
        "sampling": plan.sampling.name,
        "kind": plan.calibration.kind,
        "seconds": seconds,
        "samplings": {},
    }
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


def table(found: dict[str, Any]) -> str:
    """Errors per unit of clip norm, as Markdown."""
    names = list(found["rows"][0]["samplings"])
    rows: list[list[str]] = []
    for each in found["rows"]:
        cells = [
            f"{each['epsilon']:g}",
            f"{each['error']:.4g} ({each['label']}, {each['sampling']})",
        ]
        for name in names:
            own = each["samplings"][name]
            stored = f", {own['vectors']} stored" if own["vectors"] else ""
            cells.append(f"{own['error']:.4g} ({own['label']}{stored})")
        rows.append([*cells, f"{each['seconds']:.1f}"])
    columns = [
        "ε",
        "planner, nothing stored",
        *(f"{name}, any memory" for name in names),
        "seconds",
    ]
    return _tables.markdown(columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, action="append", help="one of them alone")
    parser.add_argument("--json", type=Path, help="write the results there")
    given = parser.parse_args()
    found = {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "rows": [row(epsilon) for epsilon in given.epsilon or EPSILONS],
    }
    print(table(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
