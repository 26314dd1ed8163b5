"""Random allocation drawn afresh in each epoch, against quadrature, draws and other accountants."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from scipy.interpolate import CubicSpline
from scipy.special import ndtr

import corrnoise as cn
from corrnoise.accounting import allocation, composed, convolution, epoch, gaussian, lognormal

# The relative error of the oracle: with twice the points it changes by less.
ORACLE = 1e-6
LOGS = np.linspace(-16.0, 16.0, 3001)


def normals(points):
    """The trapezoidal rule for a standard normal: it converges exponentially."""
    z = np.linspace(-9.0, 9.0, points)
    return z, stats.norm.pdf(z) * (z[1] - z[0])


@cache
def calls(variance, count):
    """E[(X_1 + … + X_count - y)_+] by the logarithm of y: one lognormal of mean 1 at a time."""
    y, root = np.exp(LOGS), math.sqrt(variance)
    if count == 1:
        z = (LOGS + variance / 2.0) / root
        return CubicSpline(LOGS, ndtr(root - z) - y * ndtr(-z))
    before, total = calls(variance, count - 1), np.zeros(y.size)
    for z, weight in zip(*normals(2501), strict=True):
        left = y - math.exp(root * z - variance / 2.0)
        some = before(np.log(np.maximum(left, math.exp(-16.0))))
        total += weight * np.where(left > 0.0, some, count - 1 - left)
    return CubicSpline(LOGS, total)


def removing(variance, b, r, logs):
    """H(s) = E_Q[(S - s)_+] of r steps of an epoch of b."""
    y = b * np.exp(logs) - (b - r)
    some = calls(variance, r)(np.log(np.maximum(y, math.exp(-16.0))))
    return np.where(y > 0.0, some, r - y) / b


def adding(variance, b, r, logs):
    """The δ of adding at ε = ``logs``, from that of removing at -ε."""
    return np.exp(logs) * (removing(variance, b, r, -logs) - 1.0 + np.exp(-logs))


def exact(variance, b, lengths, epsilon):
    """δ of removing and of adding, of one epoch or two, each of so many steps."""
    if len(lengths) == 1:
        at = np.array([epsilon])
        return tuple(float(of(variance, b, lengths[0], at)[0]) for of in (removing, adding))
    z, one = normals(401 if lengths[0] == 2 else 161)
    x = np.exp(math.sqrt(variance) * z - variance / 2.0)
    total, weight = np.zeros(1), np.ones(1)
    for _ in range(lengths[0]):
        total, weight = np.add.outer(total, x).ravel(), np.multiply.outer(weight, one).ravel()
    total, weight = total[weight > 1e-18], weight[weight > 1e-18]
    s = (b - lengths[0] + total) / b
    # The mean of one epoch's δ over the other's loss, under P, which is S times Q, and under Q.
    remove = (weight * s) @ removing(variance, b, lengths[1], epsilon - np.log(s))
    return float(remove), float(weight @ adding(variance, b, lengths[1], epsilon + np.log(s)))


def found(variance, b, lengths, epsilon):
    h = epoch.spacing(variance, b, lengths[0])
    pairs = [epoch.pair(lognormal.LognormalSum(variance, b, r), h) for r in lengths]
    return tuple(
        composed._composed([(losses, 1) for losses in each], h, epsilon)
        for each in zip(*pairs, strict=True)
    )


CASES = [
    (1.0, 2, (2,)),
    (4.0, 2, (2,)),
    (0.2, 2, (1,)),
    (1.0, 3, (3,)),
    (1.0, 3, (2,)),
    (1.0, 2, (2, 2)),
    (0.1, 2, (2, 2)),
    (4.0, 2, (2, 1)),
    (0.5, 3, (3, 3)),
    (0.5, 3, (3, 2)),
]


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.5, 3.0])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_directions_are_those_of_quadrature(case, epsilon):
    for ours, true in zip(found(*case, epsilon), exact(*case, epsilon), strict=True):
        assert true * (1 - ORACLE) - 1e-9 <= ours <= true * 1.003 + 1e-9


@pytest.mark.parametrize(
    "changes",
    [
        [(epoch, "_SPACING", 1.0)],
        [(lognormal, "_LEAST_POINTS", 64), (lognormal, "_POINTS", 1.0)],
        [(lognormal, "_PART", 0.5), (lognormal, "_EASE", 1.0)],
        [(lognormal, "_REACH", 0.3)],
        [(lognormal, "_FAR", 1.0), (lognormal, "LARGEST_NORMAL", 3.0)],
        [(lognormal, "_NEGLIGIBLE", 1e-3)],
        [(lognormal, "_FIRST", 9.0), (lognormal, "_MOST_GROWTH", 60.0)],
        [(composed, "_HALF", 0.5), (composed, "_MOST_POINTS", 256)],
        [(composed, "_MOST_TILT", 1e-9)],
    ],
    ids=lambda changes: ",".join(name for _, name, _ in changes),
)
def test_a_worse_grid_never_gives_less_than_the_truth(monkeypatch, changes):
    """What the grids leave out is added: settings cost tightness and never privacy."""
    for module, name, value in changes:
        monkeypatch.setattr(module, name, value)
    for case in CASES[:2] + CASES[4:8]:
        for epsilon in (0.0, 1.0, 2.5):
            for ours, true in zip(found(*case, epsilon), exact(*case, epsilon), strict=True):
                assert ours >= true * (1 - ORACLE) - 1e-9


def test_a_window_that_is_too_narrow_adds_what_it_misses(monkeypatch):
    """Sums outside the window are bounded, on both sides of the mean."""
    total = lognormal.LognormalSum(0.01, 400, 400)
    h = epoch.spacing(0.01, 400, 400)
    high, low = total.calls(h)[:40], total.puts(h)[:40]
    monkeypatch.setattr(lognormal, "_FAR", 0.1)
    monkeypatch.setattr(lognormal, "_FIRST", 0.3)
    narrow = lognormal.LognormalSum(0.01, 400, 400)
    # The curves of a wide window are above the truth by less than one in a thousand.
    assert np.all(narrow.calls(h)[:40] >= 0.999 * high)
    assert np.all(narrow.puts(h)[:40] >= 0.999 * low)


@pytest.mark.parametrize(("sigma", "b", "k", "epsilon"), [(1.0, 10, 5, 1.5), (0.6, 30, 3, 3.0)])
def test_it_is_what_plain_draws_estimate(sigma, b, k, epsilon):
    # False alarm: below 1e-8 for each of 4 estimates, at six standard errors.
    draws, generator = 200_000, np.random.default_rng(1)
    ours = composed.delta_bound(sigma, b, b * k, epsilon)
    estimates = []
    for sign in (1, -1):
        loss = np.zeros(draws)
        for _ in range(k):
            y = sigma * generator.standard_normal((draws, b))
            if sign > 0:
                y[:, 0] += 1.0  # by symmetry the bin may be the first
            loss += sign * np.log(np.mean(np.exp(y / sigma**2 - 0.5 / sigma**2), axis=1))
        worth = np.maximum(-np.expm1(epsilon - loss), 0.0)
        estimates.append((worth.mean(), worth.std() / math.sqrt(draws)))
    mean, error = max(estimates)
    assert ours == pytest.approx(mean, abs=6 * error)
    assert all(ours >= mean - 6 * error for mean, error in estimates)
    assert error < mean / 20


@pytest.mark.parametrize(("b", "sigma"), [(2, 1.0), (20, 0.7), (98, 1.2), (98, 0.5), (1000, 0.8)])
def test_one_epoch_is_random_allocation(b, sigma):
    for epsilon in (0.1, 0.5, 1.0, 2.0, 4.0):
        one = allocation.delta([(sigma**-2, b)], 0.0, epsilon)
        if one > 1e-11:
            assert composed.delta_bound(sigma, b, b, epsilon) == pytest.approx(one, rel=0.02)


@pytest.mark.parametrize("b", [400, 5000])
def test_many_bins_far_from_the_mean(b):
    """One large variable bounds what rounding errors hide."""
    for sigma in (0.5, 0.8):
        for epsilon in (1.0, 2.0, 4.0):
            one = allocation.delta([(sigma**-2, b)], 0.0, epsilon)
            ours = composed.delta_bound(sigma, b, b, epsilon)
            if one > 1e-13:
                assert 0.95 * one <= ours <= 1.05 * one


def test_it_is_never_above_fixed_batches_and_monotone():
    for b, k in [(1, 3), (2, 1), (2, 40), (50, 4), (300, 1)]:
        for sigma in (1e-3, 0.05, 0.3, 1.0, 3.0, 100.0, 1e6):
            found = [composed.delta_bound(sigma, b, b * k, x) for x in (0.0, 0.1, 1.0, 5.0)]
            fixed = [gaussian.delta(x, math.sqrt(k) / sigma) for x in (0.0, 0.1, 1.0, 5.0)]
            assert all(ours <= theirs for ours, theirs in zip(found, fixed, strict=True))
            assert found == sorted(found, reverse=True)
            if b == 1:
                assert found == fixed
    by_noise = [composed.delta_bound(sigma, 20, 100, 1.0) for sigma in np.geomspace(0.4, 3.0, 9)]
    assert all(more > less for more, less in pairwise(by_noise))
    by_step = [
        composed.delta_bound(1.0, 20, steps, 1.0) for steps in (1, 2, 10, 20, 21, 30, 40, 90)
    ]
    assert all(less < more for less, more in pairwise(by_step))


def test_the_extremes_of_noise_and_size():
    """No overflow, and no loss of precision where s is close to 0."""
    # Between the δ of this noise and that of one percent less: the grids are coarse there.
    most, least = (allocation.delta([(sigma**-2, 3)], 0.0, 60.0) for sigma in (0.1188, 0.12))
    assert 0.98 * least <= composed.delta_bound(0.12, 3, 3, 60.0) <= most
    assert composed.delta_bound(0.101, 98, 980, 50.0) <= 1.0
    assert composed.delta_bound(1.0, 50, 75, 1e6) == 0.0
    assert composed.delta_bound(1.0, 100_000, 100_000, 0.1) < 1e-15


def test_a_step_alone_is_a_subsampled_gaussian():
    """One step of an epoch of b: the example is there with probability 1/b."""
    b, sigma = 12, 0.8
    for epsilon in (0.1, 0.5, 2.0):
        inner = math.log1p(math.expm1(epsilon) * b)
        true = gaussian.delta(inner, 1.0 / sigma) / b
        ours = composed.delta_bound(sigma, b, 1, epsilon)
        assert true <= ours <= 1.002 * true


def test_the_errors_of_transforms_are_bounded():
    generator = np.random.default_rng(5)
    mass = generator.exponential(size=200) ** 4
    mass /= mass.sum()
    other = np.ones(7) / 7
    transform, errors = convolution.powers([(mass, 5), (other, 1)], 1024)
    true = other.astype(np.longdouble)
    for _ in range(5):
        true = np.convolve(true, mass.astype(np.longdouble))
    gap = np.fft.irfft(transform, 1024)[: true.size] - true
    assert 0.0 < np.max(np.abs(gap)) <= errors.largest < 1e-12
    assert np.linalg.norm(gap.astype(float)) <= errors.norm < 1e-12


def test_the_inverse_of_a_wide_law_has_the_error_of_a_transform():
    """Its norm is that of the product, however small those of the factors are."""
    mass = np.ones(1 << 14) / (1 << 14)
    transform, errors = convolution.powers([(mass, 3)], 1 << 15)
    inverse = convolution.rounding(1 << 15) * np.linalg.norm(np.fft.irfft(transform, 1 << 15))
    size, least = float(np.linalg.norm(mass)), np.abs(np.fft.rfft(mass, 1 << 15)) ** 2
    assert inverse <= errors.largest
    assert inverse <= allocation._error(3, size, 1.0, least)
    assert convolution.rounding(1 << 22) > 22 * 6.7 * 2.0**-53 > convolution.rounding(1 << 20)


@pytest.mark.parametrize(("variance", "r"), [(1e-6, 1), (1e-4, 2), (1.0, 5), (1.0, 100_000)])
def test_every_transform_has_a_power_of_two_as_its_size(monkeypatch, variance, r):
    """The error of a transform is known for these."""
    sizes, found = set(), lognormal.powers

    def powers(masses, size):
        sizes.add(size)
        return found(masses, size)

    monkeypatch.setattr(lognormal, "powers", powers)
    total = lognormal.LognormalSum(variance, max(r, 5), r)
    h = epoch.spacing(variance, max(r, 5), r)
    total.calls(h)
    total.puts(h)
    assert sizes
    assert all(size & (size - 1) == 0 for size in sizes)


def noise(b, k, sampling, epsilon, delta):
    n = b * k
    part = cn.Participation(n, b, k)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(n))
    return cn.calibrate(m, part, epsilon=epsilon, delta=delta, sampling=sampling)


def test_noise_is_private_and_least():
    for b, k, epsilon, delta in [(22, 20, 4.0, 1e-5), (98, 10, 0.1, 1e-6), (2, 3, 9.0, 1e-3)]:
        c = noise(b, k, "random-allocation", epsilon, delta)
        assert c.kind == "bound"
        sigma = c.noise_multiplier
        assert composed.delta_bound(sigma, b, b * k, epsilon) <= delta
        assert composed.delta_bound(sigma * (1 - 1e-3), b, b * k, epsilon) > delta
    # Where nothing is amplified.
    c = noise(1, 4, "random-allocation", 2.0, 1e-5)
    assert c.noise_multiplier == noise(1, 4, "fixed", 2.0, 1e-5).noise_multiplier


@pytest.mark.parametrize(
    ("b", "k", "epsilon", "delta", "gain"),
    [(23, 20, 4.0, 1e-5, 0.04), (98, 10, 1.0, 1e-5, 0.03), (12, 200, 8.0, 1e-5, 0.01)],
)
def test_it_needs_less_noise_than_poisson(b, k, epsilon, delta, gain):
    pytest.importorskip("dp_accounting")
    ours, poisson = (
        noise(b, k, sampling, epsilon, delta).noise_multiplier
        for sampling in ("random-allocation", "poisson")
    )
    assert ours < (1 - gain) * poisson


def test_spent_grows_with_the_steps():
    c = noise(10, 4, "random-allocation", 2.0, 1e-5)
    spent = [c.spent(steps) for steps in (0, 1, 9, 10, 11, 25, 39, 40)]
    assert spent == sorted(spent)
    assert 0.0 < spent[1] < spent[3] < spent[5] < spent[-1] == 2.0


def test_the_worse_of_both_directions_counts():
    """Of the pairs here removing is the worse one, so that they are exchanged as well."""
    h = epoch.spacing(1.0, 5, 5)
    found = epoch.pair(lognormal.LognormalSum(1.0, 5, 5), h)
    exchanged = epoch.Pair(found.add, found.remove)
    delta = composed.delta([(found, 3)], h, 1.0)
    assert composed.delta([(exchanged, 3)], h, 1.0) == delta
    assert composed.delta([(epoch.Pair(found.add, found.add), 3)], h, 1.0) < delta


def test_a_power_is_as_exact_as_the_proof_says():
    """Against squares in extended precision: less than 3·2^-53 for each factor."""
    generator = np.random.default_rng(6)
    x = np.exp(2j * np.pi * generator.random(500)) * (1.0 - 1e-3 * generator.random(500))
    for exponent in (0, 1, 2, 3, 938, 9380):
        true = np.ones(x.size, dtype=np.clongdouble)
        for _ in range(exponent):
            true *= x
        gap = np.abs(convolution.power(x, exponent) - true) / np.abs(true)
        assert np.max(gap) <= 3.0 * exponent * 2.0**-53


def hull(x, y):
    """The lower convex hull at every x: the largest line through two points that is below all."""
    lines = []
    for i in range(x.size):
        for j in range(i):
            line = y[i] + (y[j] - y[i]) / (x[j] - x[i]) * (x - x[i])
            if np.all(line <= y + 1e-12):
                lines.append(line)
    return np.max(lines, axis=0)


@pytest.mark.parametrize("rounds", [0, 1, 10])
@pytest.mark.parametrize("name", ["convex", "line", "noise", "last is low", "concave"])
def test_the_hull_is_the_largest_convex_function_below(monkeypatch, name, rounds):
    monkeypatch.setattr(epoch, "_HULL_ROUNDS", rounds)
    x = np.cumsum(np.random.default_rng(7).uniform(0.1, 1.0, 40))
    y = {
        "convex": 1.0 / x,
        "line": 3.0 - x,
        "noise": 1.0 / x + np.random.default_rng(8).uniform(0.0, 0.02, x.size),
        "last is low": np.append(1.0 / x[:-1], -50.0),
        "concave": np.sqrt(x),
    }[name]
    np.testing.assert_allclose(epoch._hull(x, y), hull(x, y), atol=1e-10)
