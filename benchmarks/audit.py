r"""Audit the engine many times: claims and lower bounds, for samplings, families and budgets.

    python benchmarks/audit.py --json benchmarks/audit.json [--canaries 600000] [--runs 200]
    python benchmarks/audit.py --json benchmarks/audit-large.json --canaries 5000000 --runs 3 \
      --claims 8 --samplings fixed --seed 2000
    python benchmarks/audit.py --json benchmarks/audit-cuda.json --device cuda --every-sampling \
      --claims 1 4 --runs 18 --seed 3000

The last one audits every sampling on a GPU, by ``engine.audit`` of a run there, in two minutes.

Every run has a seed of its own, for noise, batches and coins. A bound is above the engine's ε with
probability at most 1 - confidence, so of 200 right runs at confidence 0.999 one or more has a bound
above the claim with probability at most 0.18. The figures in docs/audit.md come from the JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import corrnoise as cn
from corrnoise import mechanisms, workloads
from corrnoise.planning import Plan
from corrnoise.records.statement import versions
from corrnoise.torch import PrivacyEngine

DELTA, CONFIDENCE = 1e-2, 0.999
EPSILONS = (1.0, 2.0, 4.0, 8.0)
PART = cn.Participation(24, 8, 3)
WORKLOAD = workloads.sgd(24, momentum=0.9)
FAMILIES = {
    "dp_sgd": lambda: mechanisms.dp_sgd(WORKLOAD),
    "bisr": lambda: mechanisms.bisr(WORKLOAD, num_bands=4),
    "bsr": lambda: mechanisms.bsr(WORKLOAD, num_bands=4),
    "blt": lambda: mechanisms.blt(WORKLOAD, PART, num_buffers=2),
}
CASES = [
    ("fixed", "dp_sgd"),
    ("fixed", "bisr"),
    ("fixed", "blt"),
    ("balls-in-bins", "dp_sgd"),
    ("balls-in-bins", "bisr"),
    ("balls-in-bins", "bsr"),
    ("poisson", "dp_sgd"),
    ("cyclic-poisson", "bsr"),
]
# Not in the table of docs/audit.md.
MORE = [("random-allocation", "dp_sgd")]


def plan(sampling: str, family: str, epsilon: float) -> Plan:
    """A plan of 24 steps in three epochs."""
    mechanism = FAMILIES[family]().in_float32()
    found = cn.calibrate(mechanism, PART, epsilon=epsilon, delta=DELTA, sampling=sampling)
    return Plan(num_examples=80, batch_size=10, calibration=found)


def started(made: Plan, device: str) -> PrivacyEngine:
    """A run of the plan that has begun on this device."""
    net, data = nn.Linear(2, 1).to(device), TensorDataset(torch.zeros(made.num_examples, 2))
    engine = PrivacyEngine()
    engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=made.batch_size),
        max_grad_norm=1.0,
        plan=made,
    )
    return engine


def device_name(device: str) -> str:
    """As the vendor calls it."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def summary(result: dict) -> str:
    """What the runs show, in two sentences."""
    rows = result["rows"]
    above = sum(row["lower_bound"] > row["claim"] for row in rows)
    on = f" on {result['device']}" if result.get("device") else ""
    return (
        f"{len(rows)} runs of the engine{on}, {result['canaries']:,} canaries each, "
        f"{result['num_steps']} steps in epochs of {result['min_sep']}, δ = {result['delta']:g}, "
        f"confidence {result['confidence']:g}, every run with its own seed: "
        f"**{above} bounds are above their claim**. The lower bounds of ε, least to largest of "
        "the runs of a claim:"
    )


def table(result: dict) -> str:
    """Lower bounds by sampling, family and claim, as Markdown."""
    claims = sorted({row["claim"] for row in result["rows"]})
    cases = list(dict.fromkeys((row["sampling"], row["family"]) for row in result["rows"]))
    lines = [
        "| sampling | mechanism | " + " | ".join(f"ε = {claim:g}" for claim in claims) + " |",
        "|---" * (2 + len(claims)) + "|",
    ]
    for sampling, family in cases:
        cells = []
        for claim in claims:
            found = [
                row["lower_bound"]
                for row in result["rows"]
                if (row["sampling"], row["family"], row["claim"]) == (sampling, family, claim)
            ]
            bounds = dict.fromkeys(f"{end(found):.2f}" for end in (min, max) if found)
            cells.append(" to ".join(bounds))
        lines.append(f"| {sampling} | {family} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--canaries", type=int, default=600_000)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--claims", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--samplings", nargs="+", default=[sampling for sampling, _ in CASES])
    parser.add_argument("--every-sampling", action="store_true", help="also what the docs lack")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    cases = [case for case in CASES if case[0] in given.samplings]
    cases += MORE if given.every_sampling else []
    plans = {(s, f, e): plan(s, f, e) for s, f in cases for e in given.claims}
    rows = []
    for run, (case, made) in enumerate(islice(cycle(plans.items()), given.runs)):
        start = time.perf_counter()
        found = started(made, given.device).audit(
            num_canaries=given.canaries, confidence=CONFIDENCE, seed=given.seed + run
        )
        sampling, family, _ = case
        rows.append(
            {
                "sampling": sampling,
                "family": family,
                "claim": found.claim,
                "lower_bound": found.lower_bound,
                "statistic": found.statistic,
                "violated": found.violated,
                "seed": given.seed + run,
                "seconds": round(time.perf_counter() - start, 2),
            }
        )
        print(*rows[-1].values(), flush=True)
        if given.json is not None:
            result = {
                "delta": DELTA,
                "confidence": CONFIDENCE,
                "canaries": given.canaries,
                "num_steps": PART.num_steps,
                "min_sep": PART.min_sep,
                "device": device_name(given.device),
                "versions": {k: v for k, v in versions().items() if k != "opacus"},
                "rows": rows,
            }
            given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{sum(row['violated'] for row in rows)} of {len(rows)} above the claim")


if __name__ == "__main__":
    main()
