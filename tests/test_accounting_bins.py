"""Bins on a circle: their inner products, their draws, and proposals that know them to be alike."""

import math

import numpy as np
import oracles
import pytest

from corrnoise import mechanisms, workloads
from corrnoise.accounting import Draws, balls_in_bins, bins, certificates, low_sums, many_folds
from corrnoise.accounting.balls_in_bins import Shift
from corrnoise.accounting.few_folds import FewFolds, Tuples
from corrnoise.accounting.proposals import Pattern


def bins_of_bisr(num_steps, b):
    coef = mechanisms.bisr(workloads.prefix_sum(num_steps), num_bands=4).strategy_coef
    return bins.toeplitz_bins(coef, b)


def circle(size=24, memory=3.0):
    distance = np.minimum(np.arange(size), size - np.arange(size))
    first = np.exp(-distance / memory)
    return bins.CircularBins(first, np.full(size, 1.0), first)


def whole_gram(coef, b):
    C = oracles.matrix(coef)
    means = np.array([C[:, j::b].sum(axis=1) for j in range(b)])
    return means @ means.T


@pytest.fixture
def anything_on_a_circle(monkeypatch):
    monkeypatch.setattr(bins, "_EXCESS", math.inf)
    monkeypatch.setattr(bins, "_MOST", 2)


@pytest.mark.parametrize("seed", range(20))
def test_inner_products_on_a_circle_are_nowhere_smaller(anything_on_a_circle, seed):
    generator = np.random.default_rng(seed)
    b = int(generator.integers(3, 14))
    n = b * int(generator.integers(1, 4)) + int(generator.integers(0, b)) * (seed % 2)
    coef = generator.random(n) * (generator.random(n) < 0.4)
    coef[0] = 1.0
    truth, found = whole_gram(coef, b), bins.toeplitz_bins(coef, b)
    assert isinstance(found, bins.CircularBins)
    assert found.num_bins == b
    assert np.all(truth <= found.gram + 1e-9)
    assert found.longest == pytest.approx(math.sqrt(np.diag(truth).max()))
    np.testing.assert_allclose(found.every_square, np.diag(truth), atol=1e-9)
    # m'_j of the docstring, entry by entry.
    first = bins.first_mean(coef, b)
    rounds = np.append(first, np.zeros(-n % b)).reshape(-1, b)
    if n % b:
        rounds[-1] = np.maximum(rounds[-1], rounds[-2] if len(rounds) > 1 else 0.0)
    turned = np.array([np.roll(rounds, j, axis=1).reshape(-1) for j in range(b)])
    np.testing.assert_allclose(found.gram, turned @ turned.T, atol=1e-9)


@pytest.mark.parametrize(("b", "most"), [(24, 12), (25, 12), (26, 5), (29, 9), (31, 30)])
def test_fewer_bins_on_a_circle_stand_for_every_rotation(monkeypatch, b, most):
    monkeypatch.setattr(bins, "_MOST", 2)
    whole = circle(b)
    found = whole.at_most(most)
    t = found.num_bins
    assert t <= most
    assert np.linalg.eigvalsh(found.gram).min() >= -1e-12
    counted = np.zeros(b)
    for r in range(b):
        taken = (r + np.arange(t) * b // t) % b
        counted[taken] += 1
        assert np.all(whole.gram[np.ix_(taken, taken)] <= found.gram + 1e-12)
    assert np.all(counted == t)
    assert whole.at_most(b) is whole
    np.testing.assert_array_equal(found.every_square, whole.every_square)


@pytest.mark.parametrize("b", [7, 24])
def test_draws_and_products_on_a_circle(b):
    found = circle(b)
    gram = np.array([[found.by_lag[(j - i) % b] for j in range(b)] for i in range(b)])
    np.testing.assert_array_equal(found.gram, gram)
    np.testing.assert_allclose(found.scaled(0.5, np.float32), 0.5 * gram, rtol=1e-6)
    weights = np.random.default_rng(0).random((5, b))
    np.testing.assert_allclose(found.inner(weights), weights @ gram, rtol=1e-12)
    same = bins.Bins(gram)
    for name in ("squares", "mean_square", "inner_with_mean"):
        np.testing.assert_allclose(getattr(found, name), getattr(same, name))
    for draw in (found.draw, found.draw_rounded):
        drawn = np.asarray(draw(np.random.default_rng(1), 100_000), dtype=float)
        # Six standard deviations of each covariance: false alarm below 1e-6 in all.
        spread = np.sqrt((gram**2 + 1.0) / 100_000)
        assert np.all(np.abs(drawn.T @ drawn / 100_000 - gram) <= 6 * spread)


@pytest.mark.parametrize(
    ("shape", "direction"),
    [
        (FewFolds(1, 2.0), "remove"),
        (FewFolds(2, 1.0), "remove"),
        (FewFolds(3, 0.8), "remove"),
        (many_folds.ManyFolds(4, Pattern(4, 6)), "remove"),
        (many_folds.ManyFolds(4, Pattern(2, 12, 2, 3)), "remove"),
        (many_folds.ManyFolds(4, Pattern(4, 5)), "remove"),
        (low_sums.LowSums(Pattern(3, 8), 3.0), "add"),
        (low_sums.LowSums(Pattern(3, 7), 3.0), "add"),
        (Shift(), "add"),
    ],
)
def test_proposals_on_a_circle_are_those_of_its_gram_matrix(shape, direction):
    found = circle()
    same = bins.Bins(found.gram.copy())
    one, other = (shape.at(each, 1.2, 0.3) for each in (found, same))
    assert one.log_largest == pytest.approx(other.log_largest, abs=1e-9)
    estimates = [
        balls_in_bins.estimate(
            each, 1.2, 0.3, direction,
            samples=40_000, failure_probability=0.1, seed=(seed,), shape=shape,
        )
        for seed, each in enumerate((found, same))
    ]  # fmt: skip
    # Six standard errors: false alarm below 1e-8.
    spread = math.hypot(*(each.standard_error for each in estimates))
    assert abs(estimates[0].mean - estimates[1].mean) <= 6 * spread
    assert all(0.0 < each.standard_error < 0.1 * each.mean for each in estimates)


def test_pairs_on_a_circle_have_the_same_law():
    found = Tuples(circle(6), 1.0, 0.5, 1.1, 2)
    same = Tuples(bins.Bins(circle(6).gram.copy()), 1.0, 0.5, 1.1, 2)
    counts = []
    for seed, each in enumerate((found, same)):
        first, second = each.draw(np.random.default_rng(seed), 100_000)
        counts.append(np.bincount(6 * first + second, minlength=36))
    # Six standard deviations of each difference: false alarm below 1e-7 in all.
    assert np.all(np.abs(counts[0] - counts[1]) <= 6 * np.sqrt(counts[0] + counts[1]))


@pytest.mark.parametrize("pattern", [Pattern(4, 6), Pattern(2, 12, 3, 2), Pattern(4, 5)])
def test_sums_that_repeat_are_taken_once(pattern):
    values = np.random.default_rng(0).random((3, 24))
    every, some = pattern.sums(values), pattern.different_sums(values)
    repeats = pattern.blocks * pattern.period == 24
    assert some.shape[1] == (pattern.period if repeats else 24)
    np.testing.assert_allclose(np.tile(some, 24 // some.shape[1]), every)


def test_which_bins_are_put_on_a_circle():
    banded = bins_of_bisr(3000, 3000)
    assert isinstance(banded, bins.CircularBins)
    assert banded.num_bins == 3000
    assert bins_of_bisr(2014, 1007).num_bins == 996
    assert bins_of_bisr(12_000, 12_000).num_bins == 3996
    assert bins_of_bisr(1000, 1000).kinds == 1000
    smooth = bins.toeplitz_bins(
        mechanisms.square_root(workloads.prefix_sum(3000)).strategy_coef, 3000
    )
    assert smooth.kinds == smooth.num_bins == 1000


def test_gaps_on_a_circle_divide_its_bins():
    wanted = np.geomspace(1.0, 12.0, 8)
    assert circle(24).distances(wanted) == [1, 2, 3, 4, 6, 8, 12]
    assert bins.Bins(np.eye(24)).distances(wanted) == sorted(set(wanted.astype(int).tolist()))


@pytest.mark.parametrize("b", [1200, 1500, 3000, 5000])
def test_the_bins_of_a_certificate_follow_from_its_draws(b):
    whole = circle(b).at_most(5000)
    for stride in range(1, 5):
        fewer = whole.at_most(-(-b // stride))
        samples = certificates._limit(fewer)
        draws = Draws(1e-9, samples, 0, None)
        assert certificates._search(whole, 1e-6, draws).bins.num_bins == fewer.num_bins


def test_more_draws_are_taken_with_fewer_bins_where_that_needs_less_noise(monkeypatch):
    """Neighbours are much alike, so that leaving out every second bin costs little."""
    monkeypatch.setattr(bins, "_MOST", 30)
    monkeypatch.setattr(certificates, "_LEAST_DRAWS", 2_000)
    monkeypatch.setattr(certificates, "_NUMBERS", 100_000)
    monkeypatch.setattr(certificates, "_MOST_NUMBERS", 1_200_000)
    whole = circle(600, 3.0)
    draws = Draws(1e-3, None, 0, None)
    sigma, found = certificates.certified_noise(whole, 0.1, 1e-6, draws)
    assert found.samples > certificates._limit(whole)
    monkeypatch.setattr(certificates, "_MOST_STRIDE", 1)
    assert certificates.certified_noise(whole, 0.1, 1e-6, draws)[0] > sigma
    again = Draws.repeating(found, 1e-6, None)
    assert certificates.certified_delta(whole, sigma, 0.1, again)[0] <= 1e-6
