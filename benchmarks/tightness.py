"""How far certified noise of balls-in-bins is above the noise that would be enough.

    python benchmarks/tightness.py --folder FOLDER [--quick]

For C = I the noise that is enough is that of the random-allocation PLD, which is known up to its
grid. For BISR, BLT and Band-MF it is where the unbiased mean of fresh draws of the δ of removing an
example reaches δ: all bins, none left out, no confidence added. Removing alone needs no more noise
than both directions, so the ratio is at most too large. FOLDER keeps finished points: a call that
is cut off loses the point that was under way. The results are written to tightness.json beside this
file, and docs/proofs/many-bins.md shows them.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import corrnoise as cn
from corrnoise import _files
from corrnoise.accounting import balls_in_bins, bins, certain, composed, roots
from tightness_table import about, table

RESULT = Path(__file__).with_name("tightness.json")
EPOCHS = 4
# The seed of the estimates; certificates have another one.
SEED = 2026
# Draws of an estimate: as many as this product of draws and bins allows, in limits.
NUMBERS, FEWEST, MOST = 60_000_000, 20_000, 100_000
# The most bins of an estimate, which has them all.
MOST_BINS = 10_000


@dataclass(frozen=True)
class Point:
    """A mechanism, a number of bins and a budget."""

    mechanism: str
    num_bins: int
    epsilon: float
    delta: float

    @property
    def name(self) -> str:
        return f"{self.mechanism}-{self.num_bins}-{self.epsilon:g}-{self.delta:g}"

    @property
    def participation(self) -> cn.Participation:
        return cn.Participation(EPOCHS * self.num_bins, self.num_bins, EPOCHS)


MECHANISMS: dict[str, Callable[[cn.Workload, cn.Participation], Any]] = {
    "I": lambda workload, _: cn.mechanisms.dp_sgd(workload),
    "BISR": lambda workload, _: cn.mechanisms.bisr(workload, num_bands=4),
    "BLT": lambda workload, part: cn.mechanisms.blt(workload, part),
    "Band-MF": lambda workload, part: cn.mechanisms.band_mf(workload, part, num_bands=16),
}


def points(quick: bool) -> Iterator[Point]:
    """For C = I every δ at the fewest and the most bins; fewer points where each takes long."""
    for b in (20, 98) if quick else (20, 98, 500, 1000, 5000):
        whole = b in (20, 5000)
        for epsilon in (0.1, 1.0, 8.0):
            for delta in (1e-4, 1e-5, 1e-9) if whole else (1e-5,):
                yield Point("I", b, epsilon, delta)
    for b in (98,) if quick else (98, 400, 1000, 3000):
        for mechanism in ("BISR", "BLT", "Band-MF"):
            # At ε = 0.3 and 3000 bins none of 20,000 draws counted at the certified noise, so that
            # there was no estimate; ε = 4 is left out to save time.
            for epsilon in (1.0,) if b > 1000 else (0.3, 1.0, 4.0):
                yield Point(mechanism, b, epsilon, 1e-6)


def measured(point: Point) -> dict[str, Any]:
    """The certified noise of a point, what is enough, and the bound without draws."""
    part = point.participation
    made = MECHANISMS[point.mechanism](cn.workloads.prefix_sum(part.num_steps), part)
    start = time.process_time()
    found = cn.calibrate(
        made, part, epsilon=point.epsilon, delta=point.delta, sampling="balls-in-bins"
    )
    seconds = time.process_time() - start
    sigma = found.noise_multiplier
    if point.mechanism == "I":
        enough, error, bound = allocated(point), 0.0, sigma
    else:
        enough, error = estimated(made, point, sigma)
        bound = certain.noise(made.bins(point.num_bins), point.epsilon, point.delta)
    return {
        "mechanism": point.mechanism,
        "bins": point.num_bins,
        "epsilon": point.epsilon,
        "delta": point.delta,
        "certified": sigma,
        "kind": found.kind,
        "cpu_seconds": round(seconds, 1),
        "enough": enough,
        "relative_error": error,
        "ratio": sigma / enough,
        "bound": bound,
    }


def allocated(point: Point) -> float:
    """The noise of the random-allocation PLD of one epoch, whose code shares little with bins.

    Bins that are kept for all epochs are one epoch with √EPOCHS times less noise.
    """
    b = point.num_bins
    return EPOCHS**0.5 * composed.noise(b, b, point.epsilon, point.delta)


def estimated(made: Any, point: Point, near: float) -> tuple[float, float]:
    """The noise at which the mean of draws is δ, and its relative standard error."""
    means = made.bins(point.num_bins)
    if means.num_bins < point.num_bins:
        means = bins.toeplitz_bins(np.maximum(made.strategy_coef, 0.0), point.num_bins, MOST_BINS)
    shape = balls_in_bins.best_shape(means, near, point.epsilon, "remove")
    samples = min(max(NUMBERS // point.num_bins, FEWEST), MOST)
    normals = balls_in_bins.Normals(samples)
    last: list[tuple[float, balls_in_bins.Estimate]] = []

    def excess(log_sigma: float) -> float:
        drawn = balls_in_bins.estimate(
            means, math.exp(log_sigma), point.epsilon, "remove",
            samples=samples, failure_probability=0.5, seed=(SEED,), shape=shape, normals=normals,
        )  # fmt: skip
        last.append((log_sigma, drawn))
        return math.log(max(drawn.mean, 1e-320)) - math.log(point.delta)

    log_near = math.log(near)
    root = roots.falling(excess, log_near, (log_near - 2.0, log_near + 0.5), 1e-3)
    (first, there), (second, here) = last[-2:]
    slope = (math.log(there.mean) - math.log(here.mean)) / (second - first)
    return math.exp(root), here.standard_error / here.mean / slope


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps finished points")
    parser.add_argument("--quick", action="store_true", help="few bins; writes no tightness.json")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for point in points(given.quick):
        path = given.folder / f"{point.name}.json"
        if not path.exists():
            _files.write(path, json.dumps(measured(point)) + "\n")
            print(path.read_text(encoding="utf-8"), end="", flush=True)
        rows.append(json.loads(path.read_text(encoding="utf-8")))
    result = {
        "epochs": EPOCHS,
        "machine": f"{platform.machine()}, NumPy {np.__version__}",
        "rows": rows,
    }
    print(f"\n{table(result)}\n\n{about(result)}")
    if not given.quick:
        _files.write(RESULT, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
