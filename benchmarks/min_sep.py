"""b-min-sep sampling against cyclic Poisson, by plain draws: the figures of docs/min-sep.md.

    python benchmarks/min_sep.py [--draws 100000]

The paper's CIFAR setting: 980 steps, b = 98. For BSR of p bands the noise is that with which cyclic
Poisson has δ = 1e-3 at ε, which plain draws can resolve; the table has the δ of b-min-sep at that
noise, and what a certificate by importance sampling would need at δ = 1e-5.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter

import corrnoise as cn

N, B, CHUNK = 980, 98, 20_000
# (p, ε): the best number of bands at this ε, roughly.
CASES = [(8, 1.0), (16, 2.0), (32, 4.0), (98, 9.0)]


def pattern(generator, draws, p):
    """Who takes part when: after a step, p - 1 steps of rest; else with probability q."""
    q = 1.0 / (B - p + 1)
    free = 1.0 / (1.0 + q * (p - 1))
    # The steps of rest at the start are those of the stationary process.
    rest = np.where(generator.random(draws) < free, 0, generator.integers(1, max(p, 2), draws))
    taken = np.zeros((draws, N))
    for t in range(N):
        here = (rest == 0) & (generator.random(draws) < q)
        taken[:, t] = here
        rest = np.where(here, p - 1, np.maximum(rest - 1, 0))
    return taken


def ratio(y, coef, sigma):
    """P/Q by the recursion over steps, for each row of outputs y."""
    p = coef.size
    q = 1.0 / (B - p + 1)
    inner = lfilter(coef, [1.0], y[:, ::-1], axis=1)[:, ::-1] / sigma**2
    squares = np.array([np.sum(coef[: N - t] ** 2) for t in range(N)]) / sigma**2
    x = np.exp(inner - squares / 2.0)
    after = np.ones((N + p, y.shape[0]))
    for t in range(N - 1, -1, -1):
        after[t] = (1.0 - q) * after[t + 1] + q * x[:, t] * after[t + p]
    return (after[0] + q * np.sum(after[1:p], axis=0)) / (1.0 + q * (p - 1))


def deltas(coef, sigma, epsilon, draws):
    """δ of removing and of adding, each with its standard error."""
    generator, worths = np.random.default_rng(0), ([], [])
    for _ in range(draws // CHUNK):
        noise = sigma * generator.standard_normal((CHUNK, N))
        shift = lfilter(coef, [1.0], pattern(generator, CHUNK, coef.size), axis=1)
        for worth, y, sign in ((worths[0], noise + shift, 1), (worths[1], noise, -1)):
            worth.append(np.maximum(-np.expm1(epsilon - sign * np.log(ratio(y, coef, sigma))), 0))
    return [(np.mean(w), np.std(w) / math.sqrt(np.size(w))) for w in worths]


def log_weight(p, norm, sigma, epsilon):
    """The logarithm of W, the largest weight of the tilt of docs/min-sep.md, at the best τ."""
    q = 1.0 / (B - p + 1)

    def log_w(tau):
        grown = tau * (tau - 1.0) * norm**2 / (2.0 * sigma**2)
        after = np.zeros(N + p)
        for t in range(N - 1, -1, -1):
            after[t] = np.logaddexp(
                np.log1p(-q) + after[t + 1] if q < 1 else -np.inf,
                math.log(q) + grown + after[t + p],
            )
        total = (
            after[0]
            if p == 1
            else np.logaddexp(after[0], math.log(q) + np.logaddexp.reduce(after[1:p]))
        )
        return float(total - math.log1p(q * (p - 1)) - (tau - 1.0) * epsilon)

    return float(minimize_scalar(log_w, bounds=(1.0, 12.0), method="bounded").fun)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=100_000)
    draws = parser.parse_args().draws
    part = cn.Participation(N, B, N // B)
    print("p   ε   noise  min-sep δ: remove    add                  noise saved  W at δ = 1e-5")
    for p, epsilon in CASES:
        m = cn.mechanisms.bsr(cn.workloads.sgd(N, momentum=0.9, decay=0.9999), num_bands=p)
        budget = {"epsilon": epsilon, "sampling": "cyclic-poisson"}
        sigma = cn.calibrate(m, part, delta=1e-3, **budget).noise_multiplier
        found = deltas(m.strategy_coef[:p], sigma, epsilon, draws)
        # As much as cyclic Poisson would save if its δ were allowed to be as much larger.
        like = cn.calibrate(m, part, delta=1e-6 / max(found)[0], **budget).noise_multiplier
        tight = cn.calibrate(m, part, delta=1e-5, **budget).noise_multiplier
        weight = math.exp(log_weight(p, m.column_norm, tight, epsilon))
        both = "  ".join(f"{mean:.2e} ± {error:.0e}" for mean, error in found)
        row = f"{p:<3} {epsilon:<3g} {sigma:<6.3f} {both}  {1 - like / sigma:<11.1%}  {weight:.2g}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
