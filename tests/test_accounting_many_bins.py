"""Proposals for many bins: patterns, many folds (removing), low sums (adding)."""

import itertools
import math

import numpy as np
import pytest
from test_accounting_balls_in_bins import bins_of, integrated

from corrnoise import mechanisms, workloads
from corrnoise.accounting import (
    Draws,
    balls_in_bins,
    certificates,
    few_folds,
    low_sums,
    many_folds,
    renyi,
)
from corrnoise.accounting.bins import Bins
from corrnoise.accounting.proposals import Pattern

PATTERNS = [
    Pattern(5, 1), Pattern(3, 3), Pattern(2, 4), Pattern(2, 5, 2, 1), Pattern(2, 5, 3, 1),
    Pattern(1, 11, 4, 2), Pattern(3, 3, 2, 1),
]  # fmt: skip


def bisr(n, b, bands=4):
    return bins_of(mechanisms.bisr(workloads.prefix_sum(n), num_bands=bands).strategy_coef, b)


def drawn(tilt, bins, samples, seed=3):
    """Values of an integrand in blocks, as a certificate draws them."""
    generator = np.random.default_rng(seed)
    found = [
        tilt.values(generator, bins.draw(generator, part.size))
        for part in np.array_split(np.arange(samples), max(1, samples * bins.num_bins // 2_000_000))
    ]
    return np.concatenate(found)


def agrees(values, mean, error=0.0):
    """Within six standard errors: a false alarm in 5e8."""
    return abs(values.mean() - mean) <= 6 * math.hypot(values.std() / math.sqrt(values.size), error)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sums_over_a_pattern(pattern):
    b = 11
    values = np.random.default_rng(0).random((3, b))
    found = pattern.sums(values)
    assert pattern.bins.size == pattern.size == np.unique(pattern.bins % b).size
    for r in range(b):
        np.testing.assert_allclose(found[:, r], values[:, (r + pattern.bins) % b].sum(axis=1))
    np.testing.assert_allclose(found.mean(axis=1) / pattern.size, values.mean(axis=1))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("power", [2, 3, 13, 128])
def test_the_mean_of_a_power(power, kind):
    """Against logarithms in float64, also where powers of small numbers would underflow."""
    values = np.exp(np.random.default_rng(4).standard_normal((5, 40)) * np.arange(1, 6)[:, None])
    values[1, 3] = 0.0
    values = values.astype(kind)
    with np.errstate(divide="ignore", under="raise"):
        found = many_folds._log_mean_power(values, power)
        logs = power * np.log(values.astype(np.float64))
    wanted = np.logaddexp.reduce(logs, axis=1) - math.log(40)
    assert np.all(np.abs(found - wanted) <= 8 * power * np.finfo(kind).eps * (1 + abs(wanted)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_inner_products_of_a_pattern_are_nowhere_larger(pattern):
    """Wherever the pattern begins, and also for pairs that are close the other way round."""
    generator, b = np.random.default_rng(1), 11
    means = generator.random((b, 20)) * (generator.random((b, 20)) < 0.3)
    bins = Bins(means @ means.T)
    near, far = pattern.common(bins.by_lag)
    block = np.arange(pattern.size) // pattern.points
    seen = [[], []]
    for r, (i, k) in itertools.product(range(b), itertools.combinations(range(pattern.size), 2)):
        j, other = (r + pattern.bins[[i, k]]) % b
        seen[int(block[i] != block[k])].append(bins.gram[j, other])
    assert near >= far
    assert max(seen[0], default=0.0) <= near
    assert max(seen[1], default=0.0) <= far


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_numbers_with_a_given_sum_have_their_law(count):
    log_each, total, size = np.log([1.0, 0.7, 0.9, 0.2, 0.4]), 4, 100_000
    spread = many_folds.Spread(log_each, count)
    exact = {
        numbers: math.exp(sum(log_each[n] for n in numbers))
        for numbers in itertools.product(range(total + 1), repeat=count)
        if sum(numbers) == total
    }
    whole = sum(exact.values())
    assert spread.log_total[total] == pytest.approx(math.log(whole))
    found = spread.draw(np.random.default_rng(2), np.full(size, total))
    assert np.all(found.sum(axis=1) == total)
    rows, times = np.unique(found, axis=0, return_counts=True)
    seen = {tuple(row): n for row, n in zip(rows.tolist(), times.tolist(), strict=True)}
    for numbers, weight in exact.items():
        p = weight / whole
        assert abs(seen.get(numbers, 0) / size - p) <= 6 * math.sqrt(p * (1 - p) / size)


@pytest.mark.parametrize("pattern", [Pattern(3, 2), Pattern(2, 3, 2, 1), Pattern(1, 6, 3, 2)])
@pytest.mark.parametrize("folds", [2, 3, 4])
def test_the_constant_is_a_sum_over_tuples(pattern, folds):
    bins, sigma, epsilon = bisr(12, 6), 1.3, 0.4
    near, far = pattern.common(bins.by_lag)
    block = np.arange(pattern.size) // pattern.points
    gram = np.where(block[:, None] == block, near, far)
    np.fill_diagonal(gram, bins.by_lag[0])
    z = (
        sum(
            math.exp(sum(gram[i, k] for i, k in itertools.combinations(each, 2)) / sigma**2)
            for each in itertools.product(range(pattern.size), repeat=folds)
        )
        / float(pattern.size) ** folds
    )
    ratio = np.exp(epsilon) * np.linspace(1, 50, 200_001)
    worth = np.max(ratio ** (1 - folds) * (1 - np.exp(epsilon) / ratio))
    found = many_folds.ManyFolds(folds, pattern).at(bins, sigma, epsilon).largest
    assert found == pytest.approx(z * worth, rel=1e-6)


def test_the_largest_value_of_single_bins_is_the_moment_bound():
    bins, sigma, epsilon, pattern = bisr(40, 40), 1.4, 0.8, Pattern(5, 8)
    near, far = (x / sigma**2 for x in pattern.common(bins.by_lag))
    assert near == far
    moments = renyi.log_moments(5, bins.by_lag[0] / sigma**2 - far, far)
    found = many_folds.ManyFolds(9, pattern).at(bins, sigma, epsilon).log_largest
    assert found == pytest.approx(
        moments[9] - 8 * epsilon + 8 * math.log(8) - 9 * math.log(9), rel=1e-9
    )


@pytest.mark.parametrize("correlation", [0.0, 0.7])
@pytest.mark.parametrize(("sigma", "epsilon"), [(2.0, 0.2), (0.8, 2.0)])
def test_two_bins_agree_with_numerical_integration(correlation, sigma, epsilon):
    gram = np.array([[1.2, correlation], [correlation, 1.0]])
    for direction, shapes in (
        ("remove", [many_folds.ManyFolds(f, Pattern(2, 1)) for f in (2, 5)]),
        ("add", [low_sums.LowSums(Pattern(2, 1), rate) for rate in (0.5, 4.0)]),
    ):
        truth = integrated(gram, sigma, epsilon, direction)
        for shape in shapes:
            bins = Bins(gram)
            tilt = shape.at(bins, sigma, epsilon)
            values = drawn(tilt, bins, 100_000)
            assert agrees(values, truth, 1e-7 * truth)
            assert 0 <= values.min() <= values.max() <= tilt.largest * (1 + 1e-9)


# Toeplitz bins of one and of several epochs, of a cut-off last epoch, and without any order.
def some_bins():
    means = np.random.default_rng(5).random((7, 9)) * 0.5
    return {
        "one epoch": (bisr(9, 9), 2.0),
        "epochs": (bisr(28, 7), 4.0),
        "cut off": (bisr(25, 7), 4.0),
        "no order": (Bins(means @ means.T), 1.5),
    }


@pytest.mark.parametrize("which", ["one epoch", "epochs", "cut off", "no order"])
@pytest.mark.parametrize("epsilon", [0.2, 0.8])
def test_many_folds_are_unbiased_and_keep_their_bound(which, epsilon):
    bins, sigma = some_bins()[which]
    plain = np.exp(
        bins.draw(np.random.default_rng(8), 400_000) / sigma - bins.squares / (2 * sigma**2)
    )
    plain = np.maximum(plain.mean(axis=1) - math.exp(epsilon), 0.0)
    for pattern in [
        Pattern(7, 1), Pattern(3, 2), Pattern(2, 3), Pattern(2, 3, 2, 1), Pattern(1, 7, 3, 2)
    ]:  # fmt: skip
        _, shape = many_folds._least(bins, sigma, epsilon, pattern)
        tilt = shape.at(bins, sigma, epsilon)
        values = drawn(tilt, bins, 60_000)
        assert agrees(values, plain.mean(), plain.std() / math.sqrt(plain.size))
        assert 0 <= values.min() <= values.max() <= tilt.largest * (1 + 1e-9)


@pytest.mark.parametrize("which", ["one epoch", "epochs", "cut off"])
@pytest.mark.parametrize("epsilon", [0.2, 0.8])
def test_low_sums_are_unbiased_and_keep_their_bound(which, epsilon):
    bins, sigma = some_bins()[which]
    plain = np.exp(
        bins.draw(np.random.default_rng(8), 400_000) / sigma - bins.squares / (2 * sigma**2)
    )
    plain = np.maximum(1.0 - math.exp(epsilon) * plain.mean(axis=1), 0.0)
    for rate, pattern in [(3.0, Pattern(2, 3)), (8.0, Pattern(2, 3)), (6.0, Pattern(1, 7))]:
        tilt = low_sums.LowSums(pattern, rate).at(bins, sigma, epsilon)
        values = drawn(tilt, bins, 60_000)
        assert agrees(values, plain.mean(), plain.std() / math.sqrt(plain.size))
        assert 0 <= values.min() <= values.max() <= tilt.largest * (1 + 1e-9)


def test_coarse_steps_keep_their_bound(monkeypatch):
    """The step function decides how large W is, not whether it holds."""
    bins, sigma, epsilon = bisr(9, 9), 2.0, 0.3
    shape = low_sums.LowSums(Pattern(3, 3), 5.0)
    fine = shape.at(bins, sigma, epsilon)
    monkeypatch.setattr(low_sums, "_STEPS", 6)
    coarse = shape.at(bins, sigma, epsilon)
    assert coarse.largest > 1.2 * fine.largest
    values, others = drawn(coarse, bins, 100_000), drawn(fine, bins, 100_000, seed=4)
    assert agrees(values, others.mean(), others.std() / math.sqrt(others.size))
    assert values.max() <= coarse.largest * (1 + 1e-9)


def test_nearly_equal_means_are_not_drawn_one_by_one():
    gram = np.full((6, 6), 0.999) + 0.001 * np.eye(6)
    assert low_sums.LowSums(Pattern(6, 1), 1.0).at(Bins(gram), 1.0, 0.5).log_largest == math.inf
    assert low_sums.best(Bins(gram), 1.0, 0.5) is None
    assert balls_in_bins.best_shape(Bins(gram), 1.0, 0.5, "add") == balls_in_bins.Shift()
    unused = bisr(10, 30)  # twenty bins have no step
    assert balls_in_bins.best_shape(unused, 1.0, 0.5, "add") == balls_in_bins.Shift()


def test_low_sums_are_chosen_where_what_they_estimate_underflows():
    """As at ε = 0.001 and δ = 1e-9, where a mean is below the least float64."""
    bins = bisr(18, 6)
    for sigma in (1e2, 1e4, 1e6):
        found = low_sums.best(bins, sigma, 1e-3)
        assert found is not None
        assert math.isfinite(found[0])
        assert math.isfinite(found[1].at(bins, sigma, 1e-3).log_largest)


def test_low_sums_of_bins_with_very_different_lengths():
    """The weights of a short bin were all below the least float64, which gave NaN and warnings."""
    bins = Bins(np.diag([1.0, 1e-5, 1.0, 1e-5]))
    tilt = low_sums.LowSums(Pattern(2, 2), 1992.0).at(bins, 0.28, 1.05)
    assert math.isfinite(tilt.log_largest)
    values = drawn(tilt, bins, 1_000)
    assert 0.0 <= values.min() <= values.max() <= tilt.largest * (1 + 1e-9)


@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 0.5), (0.6, 2.0), (3.0, 0.1)])
def test_the_largest_value_of_a_shift_is_attained_by_one_bin(sigma, epsilon):
    bins = Bins(np.ones((1, 1)))
    tilt = balls_in_bins.Shift().at(bins, sigma, epsilon)
    values = tilt.values(np.random.default_rng(0), np.linspace(-30, 30, 200_001)[:, None])
    assert values.max() == pytest.approx(tilt.largest, rel=1e-4)


def test_the_proposal_with_the_least_bound_is_taken():
    for bins, sigma, epsilon, few in [
        (bisr(40, 8), 2.0, 2.0, True),
        (bisr(90, 90), 3.5, 0.3, False),
    ]:
        found = balls_in_bins.best_shape(bins, sigma, epsilon, "remove")
        assert isinstance(found, few_folds.FewFolds) == few
        usual = few_folds.best(bins, sigma, epsilon).log_largest
        assert found.at(bins, sigma, epsilon).log_largest <= usual


@pytest.mark.parametrize(("bands", "epsilon"), [(4, 0.3), (8, 1.0)])
def test_certified_noise_is_within_five_percent_for_many_bins(bands, epsilon):
    """Other draws put δ above the target at 5 % less noise, and nowhere above it at the noise."""
    bins, delta = bisr(150, 150, bands), 1e-5
    draws = Draws(1e-9, 50_000, 1, None)
    sigma, found = certificates.certified_noise(bins, epsilon, delta, draws)
    assert found is not None

    def other(noise, direction):
        return balls_in_bins.estimate(
            bins, noise, epsilon, direction, samples=20_000, failure_probability=0.1, seed=(9,)
        )

    # Four standard errors of four estimates: a false alarm in 7,000.
    less = [other(sigma / 1.05, direction) for direction in ("remove", "add")]
    assert max(x.mean - 4 * x.standard_error for x in less) > delta
    for direction in ("remove", "add"):
        here = other(sigma, direction)
        assert here.mean - 4 * here.standard_error < delta


@pytest.mark.parametrize("chance", [0.5, 0.05, 0.003])
@pytest.mark.parametrize("eta", [0.3, 0.01])
def test_the_bound_of_a_mean_fails_no_more_often_than_stated(chance, eta):
    """Draws that are 0 or W, the hardest ones, with the probabilities of all their numbers."""
    from scipy.stats import binom

    count, largest = 1000, 2.0
    wrong = 0.0
    for ones in range(count + 1):
        mean = largest * ones / count
        variance = ones * (count - ones) * largest**2 / (count * (count - 1))
        found = balls_in_bins.Estimate(mean, math.sqrt(variance / count), eta, count, largest)
        if found.upper < chance * largest:
            wrong += float(binom.pmf(ones, count, chance))
    assert wrong <= eta


def test_a_bound_of_a_mean_by_hand():
    found = balls_in_bins.Estimate(0.1, 0.01, 0.012, 1000, 2.0)
    square = 0.01**2 * 999 + 0.1**2
    by_hand = [
        0.1 + (-math.log(1 - x) - x) / x * square / 2.0 + 2.0 * math.log(1000.0) / (1000 * x)
        for x in 0.9 / 2.0 ** np.arange(12)
    ]
    assert found.upper == pytest.approx(min(by_hand))
    assert balls_in_bins.Estimate(0.0, 0.0, 0.01, 1000, 0.0).upper == 0.0


def test_more_draws_are_taken_where_the_largest_value_is_large():
    bins = bisr(98, 98)
    search = certificates.Search(bins, 1e-5, Draws(1e-9, None, 0, None))
    assert search._number(1e-5) == search.samples == 500_000
    many = certificates.Search(Bins(np.eye(900)), 1e-5, search.draws)
    assert many._number(1e-2) == many.samples == 100_000
    assert many._number(2e-2) == 180_000
    assert many._number(1.0) == 300_000_000 // 900
    given = Draws(1e-9, 7_000, 0, None)
    assert certificates.Search(bins, 1e-5, given)._number(1.0) == 7_000
