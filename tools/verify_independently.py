"""Verify a plan without corrnoise: one file to read, with NumPy, SciPy and mpmath alone.

    python tools/verify_independently.py plan.json [--draws 2000000] [--seed 0]

The file is a plan (``corrnoise plan --save``) or a run (``run.json``). From the coefficients of C⁻¹
in it, this script computes, by the definitions:

* the sensitivity: the largest ‖Σ_i C[:, i]x_iᵀ‖ over gradients ‖x_i‖ ≤ 1 of the steps i in which
  one example can take part, at most k times, at least b steps apart. Where no inner product of
  columns is negative, it is the root of the largest sum of them over a pattern. All patterns are
  tried where they are few. Otherwise it is bracketed: no pattern exceeds the sum of the largest
  inner products that its pairs can have, and the pattern 0, b, 2b, … attains its own value;
* the price of fixed batches: δ(ε) of the Gaussian mechanism, in 60 digits;
* the price of Poisson and cyclic Poisson batches: privacy losses on a grid, rounded up for an upper
  and down for a lower value of δ, and composed by FFT;
* the price of balls-in-bins: plain draws from the pair of distributions, with a 99.9 % confidence
  interval (Clopper and Pearson) for δ(ε). It can refute a claim; it proves no small δ.

The exit code is 0 where the plan's claim agrees with these numbers, 1 where it does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys

import mpmath
import numpy as np
from scipy import signal, special, stats

FEW_PATTERNS = 20_000
CONFIDENCE = 0.999
GRID, MOST = 0.001, 2_000_000  # the width of ε for Poisson batches; the points of a step's losses


# The matrices.


def strategy(mechanism):
    """The first column of C for a Toeplitz mechanism, else the matrix C."""
    if mechanism["kind"] == "dense":
        return np.array(mechanism["strategy"])
    column = np.zeros(mechanism["workload"]["num_steps"])
    column[0] = 1.0
    series = mechanism["noising"]  # C⁻¹(x) = N(x)/D(x), so C(x) = D(x)/N(x)
    for top, bottom in itertools.zip_longest(series["denominator"], series["numerator"]):
        column = signal.lfilter(top or [1.0], bottom or [1.0], column)
    return column


def matrix(C):
    """C as a matrix."""
    return (
        np.tril(C[np.abs(np.subtract.outer(np.arange(C.size), np.arange(C.size)))])
        if C.ndim == 1
        else C
    )


def workload(data):
    """The first column of A: SGD with momentum and decay, or given coefficients."""
    n = data["num_steps"]
    if data.get("coef") is not None:
        return np.array(data["coef"])
    start = np.zeros(n)
    start[0] = 1.0
    once = signal.lfilter([1.0], [1.0, -data["decay"]], start)
    return signal.lfilter([1.0], [1.0, -data["momentum"]], once)


def decoder_rms(mechanism):
    """‖AC⁻¹‖_F/√n of a Toeplitz mechanism: the error for a noise multiplier of 1."""
    column = workload(mechanism["workload"])
    series = mechanism["noising"]
    for top, bottom in itertools.zip_longest(series["numerator"], series["denominator"]):
        column = signal.lfilter(top or [1.0], bottom or [1.0], column)
    return math.sqrt(float(np.mean(np.cumsum(column**2))))


# Sensitivity.


def sensitivity(C, b, k):
    """(lower, upper) of the sensitivity; equal where it is known exactly, up to rounding."""
    n = len(C)
    if C.ndim == 1 and np.min(C) >= 0.0:
        return toeplitz_sensitivity(C, b, k)
    gram = matrix(C).T @ matrix(C)
    size = np.abs(gram)  # gradients of all directions: no pattern exceeds the sum of these
    if count_patterns(n, b, k) <= FEW_PATTERNS:
        squares = [(gram[np.ix_(p, p)].sum(), size[np.ix_(p, p)].sum()) for p in patterns(n, b, k)]
        return math.sqrt(max(s[0] for s in squares)), math.sqrt(max(s[1] for s in squares))
    # The a-th step after step i of a pattern is at least ab later: bound its inner product by the
    # largest there. With that, the best pattern from its last step to its first, step by step.
    beyond = np.maximum.accumulate(size[:, ::-1], axis=1)[:, ::-1]  # max over later columns
    later = np.zeros((k, n))  # later[a]: the largest inner product of step i, a steps on
    for a in range(1, k):
        rows = np.arange(max(n - a * b, 0))
        later[a, rows] = beyond[rows, rows + a * b]
    best = np.zeros(n + b)  # the largest total of what follows, from each step on
    for m in reversed(range(k)):
        own = np.diag(size) + 2.0 * later[1 : k - m].sum(axis=0) + best[b:]
        best[:n] = np.maximum.accumulate(own[::-1])[::-1]
    total = float(best[0])
    comb = list(range(0, n, b))[:k]
    return math.sqrt(gram[np.ix_(comb, comb)].sum()), math.sqrt(total)


def toeplitz_sensitivity(c, b, k):
    """The same for a Toeplitz C ≥ 0, by correlations alone, for any n.

    ⟨C[:, i], C[:, j]⟩ = Σ_{t < n-j} c_t c_{t+j-i} falls as i and j grow together, so among the
    pairs with i ≥ lb and j - i ≥ (m - l)b the largest has i = lb.
    """
    n, total = c.size, 0.0
    for first in range(min(k, -(-n // b))):
        cut = c[: n - first * b]
        lags = signal.correlate(cut, cut, method="fft")[cut.size - 1 :]
        lags[0] = cut @ cut
        beyond = np.maximum.accumulate(lags[::-1])[::-1]
        total += lags[0]
        later = [beyond[a * b] for a in range(1, k - first) if a * b < cut.size]
        total += 2.0 * sum(later)
    comb = np.zeros(n)
    for m in range(min(k, -(-n // b))):
        comb[m * b :] += c[: n - m * b]
    return math.sqrt(comb @ comb), math.sqrt(total)


def count_patterns(n, b, k):
    """How many patterns of at most k steps there are, at least b apart."""
    return sum(
        math.comb(n - (j - 1) * (b - 1), j) for j in range(1, k + 1) if n > (j - 1) * (b - 1)
    )


def patterns(n, b, k):
    """All of them."""
    for j in range(1, k + 1):
        for chosen in itertools.combinations(range(n - (j - 1) * (b - 1)), j):
            yield [step + i * (b - 1) for i, step in enumerate(chosen)]


# Prices: (lower, upper) of δ at ε.


def fixed_delta(epsilon, mu):
    """δ(ε) of the Gaussian mechanism, sensitivity/noise = mu (Balle and Wang, 2018)."""
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        found = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        return float(found)


def poisson_delta(epsilon, sigma, q, steps):
    """δ(ε) of steps that take an example with probability q and add N(0, sigma²) to its 1."""
    pairs = [composed(epsilon, sigma, q, steps, remove) for remove in (True, False)]
    return max(p[0] for p in pairs), max(p[1] for p in pairs)


def composed(epsilon, sigma, q, steps, remove):
    """One direction. P = (1-q)N(0) + qN(1) and Q = N(0) to remove; the other way round to add."""
    reach = 9.5  # of the normals: the rest, below 1e-20, counts as an infinite loss
    ends = np.array([-reach * sigma, 1.0 + reach * sigma])
    low, high = np.sort(loss(ends, sigma, q) * (1.0 if remove else -1.0))
    h = max(GRID / steps, (high - low) / MOST)
    grid = np.arange(math.floor(low / h), math.ceil(high / h) + 1)
    mass = np.diff(loss_cdf(grid * h, sigma, q, remove), prepend=0.0)  # at the upper ends
    # A window that misses less than 1e-12 of the sum on each side, by Chernoff's bound.
    top, bottom = (reach_of(grid * h * sign, mass, steps) * sign for sign in (1.0, -1.0))
    width = int((max(top, epsilon) - min(bottom, 0.0)) / h) + 2 * grid.size + 2 * steps + 2
    size = 1 << (width - 1).bit_length()
    folded = np.zeros(size)
    np.add.at(folded, (grid - grid[0]) % size, mass)
    power = np.maximum(np.fft.irfft(np.fft.rfft(folded) ** steps, size), 0.0)
    start = steps * int(grid[0])  # the sum's loss at place i of the circle is (i + start)·h, and
    first = math.floor(min(bottom, 0.0) / h) - steps - 1  # the circle is cut open here
    losses = (first + (np.arange(size) + start - first) % size) * h
    up = float(np.sum(power * -np.expm1(np.minimum(epsilon - losses, 0.0))))
    down = float(np.sum(power * -np.expm1(np.minimum(epsilon - losses + steps * h, 0.0))))
    return max(down - 1e-11, 0.0), up + 1e-11


def reach_of(losses, mass, steps):
    """A value that the sum of ``steps`` losses exceeds with probability at most 1e-12."""
    width = -(-losses.size // 4000)  # neighbours share the largest loss among them
    starts = np.arange(0, losses.size, width)
    losses, mass = np.maximum.reduceat(losses, starts), np.add.reduceat(mass, starts)
    losses, mass = losses[mass > 0.0], mass[mass > 0.0]
    deviation = math.sqrt(steps * float(mass @ losses**2))
    rates = np.geomspace(0.5, 50.0, 40) / max(deviation, 1e-6)
    return min((steps * special.logsumexp(t * losses, b=mass) + 27.7) / t for t in rates)


def loss(x, sigma, q):
    """log(P/Q)(x) of removing."""
    return np.logaddexp(math.log1p(-q), math.log(q) + (2.0 * x - 1.0) / (2.0 * sigma**2))


def loss_cdf(values, sigma, q, remove):
    """The probability under P (to remove) or Q (to add) that the loss is at most each value."""
    wanted = values if remove else -values
    with np.errstate(divide="ignore", invalid="ignore"):
        above = np.exp(wanted) - (1.0 - q)
        x = sigma**2 * np.log(np.maximum(above, 0.0) / q) + 0.5
    if remove:
        return (1.0 - q) * special.ndtr(x / sigma) + q * special.ndtr((x - 1.0) / sigma)
    return special.ndtr(-x / sigma)


def bins_delta(epsilon, sigma, C, b, draws, seed=0):
    """A confidence interval of δ(ε) of balls-in-bins, by plain draws; the larger direction.

    P is the mean over bins j of N(m_j, σ²I) and Q is N(0, σ²I), with m_j = Σ_i C[:, j + ib] ≥ 0.
    With L = log(P/Q) and an exponential E, δ = P(L - E > ε): hits are counted, and nothing else.
    """
    dense = matrix(C)
    means = np.stack([dense[:, j::b].sum(axis=1) for j in range(b)])
    gram = means @ means.T / sigma**2
    values, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    random = np.random.default_rng(seed)
    hits = np.zeros(2, dtype=int)
    for size in [min(20_000, draws - i) for i in range(0, draws, 20_000)]:
        noise = random.standard_normal((size, b)) @ root.T
        chosen = gram[random.integers(b, size=size)]
        for direction, x in enumerate((noise + chosen, noise)):
            x = x - np.diag(gram) / 2.0
            top = x.max(axis=1)
            L = top + np.log(np.mean(np.exp(x - top[:, None]), axis=1))
            privacy_loss = L if direction == 0 else -L
            hits[direction] += np.count_nonzero(
                privacy_loss - random.exponential(size=size) > epsilon
            )
    worse, rest = int(hits.max()), (1.0 - CONFIDENCE) / 4.0  # two directions, two sides
    low = stats.beta.ppf(rest, worse, draws - worse + 1) if worse else 0.0
    return float(low), float(stats.beta.ppf(1.0 - rest, worse + 1, draws - worse))


def price(calibration, draws, seed):
    """(lower, upper) of δ at the plan's ε and noise, and how it was found."""
    c = calibration
    C, b, n, k = strategy(c["mechanism"]), c["min_sep"], c["num_steps"], c["max_participations"]
    sigma, epsilon = c["noise_multiplier"], c["epsilon"]
    if c["sampling"] == "fixed":
        low, high = (fixed_delta(epsilon, s / sigma) for s in sensitivity(C, b, k))
        return low, high, "Gaussian mechanism"
    if c["sampling"] in ("poisson", "cyclic-poisson"):
        bands = 1 + int(np.max(np.flatnonzero(np.abs(C) > 0.0)))
        assert c["sampling"] == "cyclic-poisson" or bands == 1, "Poisson needs C = c·I"
        noise = sigma / float(np.linalg.norm(C))
        return *poisson_delta(epsilon, noise, bands / b, -(-n // bands)), "privacy losses on a grid"
    if c["sampling"] == "balls-in-bins":
        assert np.min(C) >= -1e-12 * np.max(C), "balls-in-bins needs C ≥ 0"
        assert k == -(-n // b), "balls-in-bins uses every bin in every round"
        found = bins_delta(epsilon, sigma, np.maximum(C, 0.0), b, draws, seed)
        return *found, f"{draws:,} plain draws, {100 * CONFIDENCE:g} % confidence"
    raise SystemExit(f"sampling {c['sampling']!r} is not known here")


def main(words=None):
    """Print what was found and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--draws", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    with open(given.file, encoding="utf-8") as file:
        data = json.load(file)
    statement = data.get("statement")
    c = data.get("plan", data)["calibration"]
    lower, upper = sensitivity(strategy(c["mechanism"]), c["min_sep"], c["max_participations"])
    print(f"sensitivity      between {lower:.9g} and {upper:.9g}")
    good = True
    if statement is not None:
        good = lower * (1 - 1e-9) <= statement["sensitivity"]
        print(f"                 the statement says {statement['sensitivity']:.9g}")
    low, high, how = price(c, given.draws, given.seed)
    print(f"noise, ε         {c['noise_multiplier']:.9g}, {c['epsilon']:.9g}")
    print(f"δ                between {low:.6g} and {high:.6g} ({how})")
    print(f"                 the plan says {c['delta']:.6g}, {c['kind']}")
    good = good and low <= c["delta"] * (1 + 1e-9)
    print("agrees" if good else "DISAGREES: the plan states less than the noise gives")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
