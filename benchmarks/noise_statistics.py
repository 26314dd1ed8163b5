"""Is z standard normal and C⁻¹z as correlated as theory says? 1e9 draws by default.

    python benchmarks/noise_statistics.py --draws 1e9

Every check has a false-alarm rate of 1e-8 at most: counts by the exact binomial law, the largest
gap of the distribution function by the Dvoretzky-Kiefer-Wolfowitz-Massart bound (valid for every
sample size, so on a grid too), means by the central limit theorem at 5.73 standard errors (with
at least 1e6 terms; the powers up to the eighth are skewed by less than 0.1 there). About 90 checks
in all: the whole run gives a false alarm with probability below 1e-6.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream

ALPHA = 1e-8
CHUNK = 1 << 18
BINS = 1 << 16
STEPS = 16
PAIR_DISTANCE = 256  # indices that share radius and angle


@dataclass(frozen=True)
class Check:
    """One statistic: its value, and its largest allowed distance from what theory says."""

    name: str
    value: float
    expected: float
    allowed: float

    @property
    def passed(self) -> bool:
        return abs(self.value - self.expected) <= self.allowed


def mean_check(name: str, value: float, expected: float, variance: float, count: float) -> Check:
    width = float(-special.ndtri(ALPHA / 2)) * math.sqrt(variance / count)
    return Check(name, value, expected, width)


def normal_moment(k: int) -> float:
    return 0.0 if k % 2 else float(special.factorial2(k - 1)) if k else 1.0


class Tally:
    """Running sums over z, one chunk at a time."""

    def __init__(self) -> None:
        self.count = 0
        self.powers = np.zeros(9)
        self.products: dict[str, tuple[float, float]] = {}
        self.tails = dict.fromkeys((4, 5, 6), 0)
        self.histogram = np.zeros(BINS, np.int64)

    def add(self, z: np.ndarray, after: np.ndarray, other: np.ndarray) -> None:
        x = z.astype(np.float64)
        self.count += x.size
        power = np.ones_like(x)
        for k in range(1, 9):
            power *= x
            self.powers[k] += power.sum()
        size = np.abs(z)
        for sigma in self.tails:
            self.tails[sigma] += int(np.count_nonzero(size > sigma))
        places = (special.ndtr(x) * BINS).astype(np.int64)
        self.histogram += np.bincount(np.minimum(places, BINS - 1), minlength=BINS)
        pairs = x.reshape(-1, 2, PAIR_DISTANCE)
        square = x * x - 1.0
        squares = square.reshape(-1, 2, PAIR_DISTANCE)
        self.product("neighbours", x[:-1], x[1:])
        self.product("squares of neighbours", square[:-1], square[1:])
        self.product("neighbouring blocks of 32", x[:-32], x[32:])
        self.product("pair", pairs[:, 0], pairs[:, 1])
        self.product("squares of a pair", squares[:, 0], squares[:, 1])
        self.product("next step", x, after)
        self.product("next stream", x, other)

    def product(self, name: str, a: np.ndarray, b: np.ndarray) -> None:
        total, count = self.products.get(name, (0.0, 0.0))
        self.products[name] = (total + float(np.sum(a * b)), count + a.size)

    def checks(self) -> Iterator[Check]:
        n = self.count
        for k in range(1, 9):
            variance = normal_moment(2 * k) - normal_moment(k) ** 2
            value = self.powers[k] / n
            yield mean_check(f"moment {k}", value, normal_moment(k), variance, n)
        gaps = np.cumsum(self.histogram) / n - np.arange(1, BINS + 1) / BINS
        yield Check(
            "Kolmogorov-Smirnov", np.abs(gaps).max(), 0.0, math.sqrt(math.log(2 / ALPHA) / 2 / n)
        )
        for sigma, found in self.tails.items():
            law = stats.binom(n, 2 * special.ndtr(-float(sigma)))
            low, high = law.ppf(ALPHA / 2), law.isf(ALPHA / 2)
            yield Check(f"beyond {sigma} sigma", found, (low + high) / 2, (high - low) / 2)
        for name, (total, count) in self.products.items():
            variance = 4.0 if "squares" in name else 1.0
            yield mean_check(f"correlation: {name}", total / count, 0.0, variance, count)


def stream_checks(draws: int, key: Key, rounds: int = 20) -> list[Check]:
    """Z itself: moments to order 8, distribution, tails, correlations."""
    tally = Tally()
    stream, other = NoiseStream(key, 0, rounds), NoiseStream(key, 1, rounds)
    per_step = max(CHUNK, draws // STEPS)
    for step in range(STEPS):
        for start in range(0, per_step, CHUNK):
            if tally.count >= draws:
                break
            place = (step, start, start + CHUNK)
            z = stream.normals(*place)
            tally.add(z, stream.normals(step + 1, start, start + CHUNK), other.normals(*place))
    return list(tally.checks())


def mechanisms(num_steps: int) -> dict[str, cn.mechanisms.ToeplitzMechanism]:
    workload = cn.workloads.prefix_sum(num_steps)
    part = cn.Participation(num_steps, num_steps // 4, 4)
    return {
        "dp_sgd": cn.mechanisms.dp_sgd(workload),
        "bisr": cn.mechanisms.bisr(workload, num_bands=4),
        "band_inv_mf": cn.mechanisms.band_inv_mf(workload, part, num_bands=4),
        "bsr": cn.mechanisms.bsr(workload, num_bands=4),
        "band_mf": cn.mechanisms.band_mf(workload, part, num_bands=4),
        "blt": cn.mechanisms.blt(workload, part, num_buffers=2),
    }


def lag_checks(size: int, key: Key, num_lags: int = 8, num_steps: int = 16) -> list[Check]:
    """Cov(row_i, row_{i-l}) of C⁻¹z for the last row i, against Σ_t c_{t+l}·c_t."""
    found = list[Check]()
    for name, mechanism in mechanisms(num_steps).items():
        noise = CorrelatedNoise(mechanism, key, stream=7)
        rows = list[np.ndarray]()
        for step in range(num_steps):
            grad = np.zeros(size, np.float32)
            noise.add_([grad], step, 1.0)
            rows = [*rows[-(num_lags - 1) :], grad]
        c = mechanism.noising_coef
        for lag in range(num_lags):
            i, j = num_steps - 1, num_steps - 1 - lag
            cov = float(np.sum(c[lag : i + 1] * c[: j + 1]))
            variance = float(np.sum(c[: i + 1] ** 2) * np.sum(c[: j + 1] ** 2)) + cov**2
            value = float(np.mean(rows[-1].astype(np.float64) * rows[-1 - lag]))
            found.append(mean_check(f"{name}: lag {lag}", value, cov, variance, size))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=20, choices=(20, 12, 8))
    draws = int(parser.parse_args().draws)
    start = time.perf_counter()
    key = Key.from_bytes(bytes(range(32)))
    found = stream_checks(draws, key, parser.parse_args().rounds)
    found += lag_checks(max(1 << 18, draws // 500), key)
    for check in found:
        verdict = "ok" if check.passed else "FAIL"
        share = (check.value - check.expected) / check.allowed
        print(
            f"{check.name:40s} {check.value:15.8g}  expected {check.expected:12.6g}"
            f"  {share:+6.3f} of the allowed {check.allowed:9.3g}  {verdict}"
        )
    failed = [check.name for check in found if not check.passed]
    print(
        f"{len(found)} checks, {draws:.3g} draws, {len(failed)} failed, "
        f"{time.perf_counter() - start:.0f} s; false-alarm rate below {len(found) * ALPHA:.1g}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
