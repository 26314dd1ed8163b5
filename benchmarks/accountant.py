"""The balls-in-bins accountant beside plain Monte Carlo at equal standard error.

python benchmarks/accountant.py

The setting is the CIFAR table of the paper (n = 980, b = 98, k = 10, ε = 9). Plain Monte Carlo
draws from P itself; its time for the standard error of ours is measured per draw and multiplied by
the draws that its variance, at most δ, requires: it would take too long to run.
"""

from __future__ import annotations

import time

import numpy as np

import corrnoise as cn
from corrnoise.accounting import balls_in_bins
from corrnoise.accounting.bins import Bins
from tables import titled

EPSILON = 9.0
DRAWS = 200_000


def plain_seconds_per_draw(bins: Bins, sigma: float) -> float:
    """Time for one draw of (1 - e^{ε-L})_+ under P, on one thread."""
    generator = np.random.default_rng(0)
    count = 20_000
    start = time.perf_counter()
    chosen = generator.integers(bins.num_bins, size=count)
    x = bins.draw(generator, count) / sigma + bins.gram[chosen] / sigma**2
    x -= bins.squares / (2 * sigma**2)
    loss = np.log(np.mean(np.exp(x), axis=1))
    np.maximum(-np.expm1(EPSILON - loss), 0).mean()
    return (time.perf_counter() - start) / count


def main() -> None:
    participation = cn.Participation(980, 98, 10)
    workload = cn.workloads.sgd(980, momentum=0.9, decay=0.9999)
    rows: list[list[str]] = []
    for mechanism in (
        cn.mechanisms.dp_sgd(workload),
        cn.mechanisms.bsr(workload, num_bands=4),
        cn.mechanisms.bisr(workload, num_bands=4),
    ):
        bins = mechanism.bins(participation.min_sep)
        for delta in (1e-5, 1e-10):
            start = time.perf_counter()
            found = cn.calibrate(
                mechanism, participation, epsilon=EPSILON, delta=delta, sampling="balls-in-bins"
            )
            calibration_s = time.perf_counter() - start
            sigma = found.noise_multiplier
            start = time.perf_counter()
            estimate = balls_in_bins.estimate(
                bins,
                sigma,
                EPSILON,
                "remove",
                samples=DRAWS,
                failure_probability=1e-9,
                seed=(0,),
            )
            ours_s = time.perf_counter() - start
            needed = estimate.mean / estimate.standard_error**2
            plain_s = needed * plain_seconds_per_draw(bins, sigma)
            rows.append(
                [
                    mechanism.name,
                    f"{delta:g}",
                    f"{sigma:.4f}",
                    f"{found.epsilon_without_sampling:.3f}",
                    f"{calibration_s:.1f}",
                    f"{100 * estimate.standard_error / estimate.mean:.2f} %",
                    f"{ours_s:.2f}",
                    f"{plain_s:.3g}",
                    f"{plain_s / ours_s:.3g}",
                ]
            )
    print(
        titled(
            "Balls-in-bins at (9, delta): certified, beside plain Monte Carlo at equal error",
            [
                "mechanism",
                "delta",
                "noise, certified",
                "epsilon, no sampling",
                "calibration, s",
                "standard error",
                "one estimate, s",
                "plain, s",
                "ratio",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
