"""Twenty varied requests: the plan against every alternative that could beat it, priced in full.

    python benchmarks/requests.py --folder FOLDER [--only N ...] [--json FILE]

A plan ranks alternatives by estimates where a price takes seconds. Here every alternative whose
estimate is within 10 % of the plan's error is calibrated like the plan itself, DP-SGD with Poisson
batches always, and the least of their errors is set against the plan's. FOLDER keeps finished
requests, so that a call that is cut off loses the one that was under way. About an hour.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import corrnoise as cn
from corrnoise import _files, workloads
from corrnoise.accounting import Draws
from corrnoise.mechanisms import Question
from corrnoise.planning import planner
from corrnoise.planning.pricing import Built
from corrnoise.samplings import BEST
from requests_table import about, table

NEAR = 1.1
ALWAYS = ("dp_sgd", "poisson")


@dataclass(frozen=True)
class Request:
    """What ``cn.plan`` is asked."""

    num_examples: int
    batch_size: int
    epochs: int
    epsilon: float
    delta: float
    momentum: float = 0.0


REQUESTS = (
    Request(1_000_000, 1000, 1, 0.1, 1e-7),
    Request(1_000_000, 1000, 100, 0.3, 1e-7),
    Request(200_000, 2000, 5, 0.1, 1e-6),
    Request(200_000, 2000, 20, 3.0, 1e-6),
    Request(60_000, 64, 10, 1.0, 1e-5),
    Request(60_000, 64, 10, 8.0, 1e-5),
    Request(50_000, 512, 10, 1.0, 1e-5, 0.9),
    Request(50_000, 512, 10, 9.0, 1e-5, 0.9),
    Request(25_000, 512, 4, 2.0, 1e-5, 0.9),
    Request(25_000, 512, 4, 20.0, 1e-5),
    Request(10_000, 10, 1, 2.0, 1e-5),
    Request(5_000, 100, 50, 0.5, 1e-5),
    Request(5_000, 100, 50, 4.0, 1e-5, 0.9),
    Request(1_437, 64, 20, 1.0, 1e-4, 0.9),
    Request(1_437, 64, 10, 8.0, 1e-4, 0.9),
    Request(1_000, 100, 1, 1.0, 1e-4),
    Request(1_000, 100, 100, 20.0, 1e-4),
    Request(600, 50, 200, 1.0, 1e-4),
    Request(600, 50, 200, 8.0, 1e-4),
    Request(300, 30, 3, 0.2, 1e-4),
)


def check(request: Request) -> dict[str, Any]:
    """The plan, and the prices in full of what could beat it."""
    start = time.perf_counter()
    plan = cn.plan(**asdict(request))
    seconds = time.perf_counter() - start
    draws, built = Draws.checked(1e-9, None, 0, None), Built()
    priced: dict[str, float] = {}
    for sampling in planner._samplings(BEST, None, request.num_examples, request.batch_size, None):
        part = planner.participation(
            request.num_examples, request.batch_size, epochs=request.epochs, sampling=sampling
        )
        question = Question(
            workloads.sgd(part.num_steps, momentum=request.momentum),
            part,
            sampling.amplification,
            request.epsilon,
            request.delta,
            0,
            None,
            named=False,
        )
        for family, candidate in planner._candidates(question, None):
            label = family.title(candidate.size) + candidate.note
            estimate = next(
                (
                    a
                    for a in plan.alternatives
                    if (a.label, a.sampling) == (label, sampling.name) and not a.reason
                ),
                None,
            )
            if estimate is None or estimate.error is None:
                continue
            near = estimate.error <= NEAR * plan.error
            if not near and (family.name, sampling.name) != ALWAYS:
                continue
            mechanism = built.get((label, part), candidate)
            found = sampling.calibrate(mechanism, part, request.epsilon, request.delta, draws)
            priced[f"{label}, {sampling.name}"] = found.error
    least = min(priced, key=priced.__getitem__)
    return {
        **asdict(request),
        "seconds": round(seconds, 1),
        "chosen": f"{plan.alternatives[plan.choice].label}, {plan.sampling.name}",
        "error": plan.error,
        "kind": plan.calibration.kind,
        "least": least,
        "excess": plan.error / priced[least] - 1.0,
        "priced": priced,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps finished requests")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of requests, from 0")
    parser.add_argument("--json", type=Path, help="write the finished rows there")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    paths = [given.folder / f"{number}.json" for number in range(len(REQUESTS))]
    for number in given.only or range(len(REQUESTS)):
        if not paths[number].exists():
            _files.write(paths[number], json.dumps(check(REQUESTS[number])) + "\n")
            print(paths[number].read_text(encoding="utf-8"), end="", flush=True)
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]
    found = {"date": datetime.date.today().isoformat(), "rows": rows}
    if given.json:
        _files.write(given.json, json.dumps(found, indent=1) + "\n")
    print(f"{table(found)}\n\n{about(found)}")


if __name__ == "__main__":
    main()
