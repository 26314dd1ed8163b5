"""γ-BIFR and DP-λCGD beside BISR, Band-Inv-MF and its optimum under amplification.

    python benchmarks/families.py [--quick] [--json FILE]

Fixed batches: exact errors, for the run of the paper's CIFAR-10 table and for prefix sums.
Balls-in-bins: errors estimated from few draws, as the planner ranks candidates, the mean of three
seeds that no search used, and certified for p = 4. Times are CPU seconds of this process.
docs/choosing.md shows the tables that this prints.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise import _files, sensitivity
from corrnoise._tables import markdown
from corrnoise.mechanisms.amplification import AmplifiedError

DELTA = 1e-5
RUNS = {
    "CIFAR-10": (
        cn.workloads.sgd(980, momentum=0.9, decay=0.9999),
        cn.Participation(980, 98, 10),
    ),
    "prefix sum": (cn.workloads.prefix_sum(1024), cn.Participation(1024, 256, 4)),
}
EPSILONS = (1.0, 2.0, 9.0)
BANDS = tuple(range(2, 9))
SEARCHED = tuple(range(2, 17))
CERTIFIED_BANDS = 4
# Seeds of the estimates in the tables; the searches use others.
JUDGES = (1001, 1002, 1003)


def fixed(run: str, bands: tuple[int, ...]) -> dict[str, Any]:
    """Errors with fixed batches: at unit noise, and at the noise of each budget."""
    workload, part = RUNS[run]
    m = cn.mechanisms

    def errors(mechanism: cn.Mechanism) -> dict[str, Any]:
        found = {
            f"{epsilon:g}": cn.calibrate(mechanism, part, epsilon=epsilon, delta=DELTA)
            for epsilon in EPSILONS
        }
        return {
            "rmse": mechanism.rmse(part),
            "errors": {epsilon: each.error for epsilon, each in found.items()},
            "kind": found["1"].kind,
        }

    cgd = m.lambda_cgd(workload, part)
    normalised = column_normalised(workload, part, -float(cgd.noising_coef[1]))
    rows = []
    for p in bands:
        fractional = m.bifr(workload, part, num_bands=p)
        rows.append(
            {
                "num_bands": p,
                "power": parameter(fractional),
                "bisr": errors(m.bisr(workload, num_bands=p)),
                "bifr": errors(fractional),
                "band_inv_mf": errors(m.band_inv_mf(workload, part, num_bands=p)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return {
        "run": run,
        "dp_sgd": errors(m.dp_sgd(workload)),
        "lambda_cgd": errors(cgd) | {"rate": parameter(cgd), "column_normalised": normalised},
        "rows": rows,
        "lower_bound": cn.lower_bound(workload, part),
    }


def parameter(mechanism: cn.mechanisms.ToeplitzMechanism) -> float:
    """The γ or λ that a search recorded."""
    assert mechanism.optimization is not None
    return float(mechanism.optimization.message.partition(" = ")[2])


def column_normalised(workload: cn.Workload, part: cn.Participation, rate: float) -> float:
    """The rmse of DP-λCGD with each column of C divided by its norm, from dense matrices."""
    n = workload.num_steps
    steps = np.arange(n)
    lag = np.subtract.outer(steps, steps)
    norms = np.sqrt(np.cumsum(rate ** (2.0 * steps)))[::-1]
    strategy = np.where(lag >= 0, rate ** np.maximum(lag, 0), 0.0) / norms
    noising = norms[:, None] * (np.eye(n) - rate * np.eye(n, k=-1))
    A = np.where(lag >= 0, workload.coef[np.maximum(lag, 0)], 0.0)
    sens = sensitivity.of_matrix(strategy, part).value
    return sens * float(np.linalg.norm(A @ noising)) / n**0.5


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What the work returns, and its CPU seconds."""
    start = time.process_time()
    return work(), time.process_time() - start


def drawn(
    epsilon: float, bands: tuple[int, ...], searched: tuple[int, ...], certify: bool
) -> dict[str, Any]:
    """Errors with balls-in-bins at one budget: estimates, and certificates for p = 4."""
    workload, part = RUNS["CIFAR-10"]
    m, budget = cn.mechanisms, {"epsilon": epsilon, "delta": DELTA}
    judges = [AmplifiedError(part, epsilon, DELTA, seed) for seed in JUDGES]

    def error(mechanism: cn.mechanisms.ToeplitzMechanism) -> float:
        return float(np.mean([judge(mechanism) for judge in judges]))

    rows, searches = [], []
    for p in sorted({*bands, *searched}):
        optimum, seconds = timed(
            lambda p=p: m.amplified_band_inv_mf(workload, part, num_bands=p, **budget)
        )
        searches.append({"num_bands": p, "error": error(optimum), "cpu_seconds": seconds})
        print(epsilon, json.dumps(searches[-1]), flush=True)
        if p not in bands:
            continue
        chosen, seconds = timed(lambda p=p: m.amplified_bifr(workload, part, num_bands=p, **budget))
        made = {
            "bisr": m.bisr(workload, num_bands=p),
            "bifr": m.bifr(workload, part, num_bands=p),
            "bifr_amplified": chosen,
            "band_inv_mf": m.band_inv_mf(workload, part, num_bands=p),
            "band_inv_mf_amplified": optimum,
        }
        row: dict[str, Any] = {
            "num_bands": p,
            "power": float(-chosen.noising_coef[1] / (workload.decay + workload.momentum)),
            "cpu_seconds_of_the_power": seconds,
            "estimates": {name: error(mechanism) for name, mechanism in made.items()},
        }
        if certify and p == CERTIFIED_BANDS:
            row["certified"] = {
                name: cn.calibrate(each, part, sampling="balls-in-bins", **budget).error
                for name, each in made.items()
            }
        rows.append(row)
        print(epsilon, json.dumps(row), flush=True)
    return {
        "epsilon": epsilon,
        "dp_sgd": error(m.dp_sgd(workload)),
        "lambda_cgd_amplified": error(m.amplified_lambda_cgd(workload, part, **budget)),
        "rows": rows,
        "searches": searches,
    }


def run(quick: bool) -> dict[str, Any]:
    bands = (2, 4) if quick else BANDS
    searched = (2, 4) if quick else SEARCHED
    return {
        "delta": DELTA,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}",
        "fixed": [fixed(name, bands) for name in RUNS],
        "drawn": [drawn(e, bands, searched, not quick) for e in EPSILONS[: 1 if quick else None]],
    }


def fixed_table(found: dict[str, Any]) -> str:
    """Errors at unit noise with fixed batches, by the number of bands."""
    header = ["p", "BISR", "γ-BIFR", "γ", "Band-Inv-MF", "γ-BIFR against BISR"]
    rows = []
    for row in found["rows"]:
        bisr, bifr, best = (row[name]["rmse"] for name in ("bisr", "bifr", "band_inv_mf"))
        change = f"{100 * (bifr / bisr - 1):+.0f} %"
        cells = [f"{error:.2f}" for error in (bisr, bifr, best)]
        rows.append([str(row["num_bands"]), *cells[:2], f"{row['power']:.3f}", cells[2], change])
    return markdown(header, rows, left=())


def drawn_table(results: list[dict[str, Any]]) -> str:
    """Errors with balls-in-bins, one column for each budget and mechanism."""
    names = {
        "bisr": "BISR",
        "bifr": "γ-BIFR",
        "bifr_amplified": "γ-BIFR, amplified",
        "band_inv_mf": "Band-Inv-MF",
        "band_inv_mf_amplified": "optimum",
    }
    header = ["ε", "p", *names.values(), "γ, amplified"]
    rows = []
    for result in results:
        for row in result["rows"]:
            cells = [f"{row['estimates'][name]:.1f}" for name in names]
            rows.append(
                [f"{result['epsilon']:g}", str(row["num_bands"]), *cells, f"{row['power']:.2f}"]
            )
    return markdown(header, rows, left=())


def search_table(results: list[dict[str, Any]]) -> str:
    """The optimum under amplification for every p, and the CPU seconds of its search."""
    header = ["p"]
    for result in results:
        header += [f"ε = {result['epsilon']:g}", "CPU s"]
    rows = []
    for i, first in enumerate(results[0]["searches"]):
        cells = [str(first["num_bands"])]
        for result in results:
            found = result["searches"][i]
            cells += [f"{found['error']:.1f}", f"{found['cpu_seconds']:.1f}"]
        rows.append(cells)
    return markdown(header, rows, left=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two numbers of bands, one budget")
    parser.add_argument("--json", type=Path, help="write the result there")
    given = parser.parse_args()
    result = run(given.quick)
    for found in result["fixed"]:
        print(f"\n{found['run']}\n{fixed_table(found)}")
    print(f"\n{drawn_table(result['drawn'])}\n\n{search_table(result['drawn'])}")
    if given.json:
        _files.write(given.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
