import math

import numpy as np
import oracles
import pytest
from PLD_accounting import gaussian_allocation_epsilon_range

from corrnoise import mechanisms, workloads
from corrnoise.accounting import (
    allocation,
    balls_in_bins,
    certain,
    few_folds,
    gaussian,
    renyi,
    roots,
)
from corrnoise.accounting import bins as bins_module

ETA = 1e-9


def bins_of(coef, b):
    return bins_module.toeplitz_bins(np.asarray(coef, dtype=float), b)


def sampled(bins, sigma, epsilon, direction="remove", samples=100_000, seed=7, eta=ETA):
    return balls_in_bins.estimate(
        bins, sigma, epsilon, direction, samples=samples, failure_probability=eta, seed=(seed,)
    )


def integrated(gram, sigma, epsilon, direction):
    """δ of two bins by quadrature in the plane of their means."""
    root = np.linalg.cholesky(gram)  # rows are m_0, m_1 in an orthonormal basis
    grid = np.linspace(-12, 12, 2401) * sigma + (root.mean() if direction == "remove" else 0.0)
    u, v = np.meshgrid(grid, grid)
    x = [(m[0] * u + m[1] * v) / sigma**2 - (m @ m) / (2 * sigma**2) for m in root]
    loss = np.logaddexp(x[0], x[1]) - math.log(2)
    density = np.exp(-(u**2 + v**2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)
    cell = (grid[1] - grid[0]) ** 2
    if direction == "remove":
        return float(np.sum(density * np.maximum(np.exp(loss) - math.exp(epsilon), 0)) * cell)
    return float(np.sum(density * np.maximum(1 - np.exp(epsilon + loss), 0)) * cell)


@pytest.mark.parametrize(("n", "b"), [(12, 4), (11, 4), (3, 5), (7, 7), (9, 1)])
def test_gram_matrix_and_draws(n, b):
    coef = np.random.default_rng(0).uniform(0.1, 1, n)
    C = oracles.matrix(coef)
    means = np.array([C[:, j::b].sum(axis=1) for j in range(b)])
    truth, average = means @ means.T, means.mean(axis=0)
    for bins in (bins_of(coef, b), bins_module.matrix_bins(C, b)):
        np.testing.assert_allclose(bins.gram, truth, atol=1e-12)
        np.testing.assert_allclose(bins.squares, np.diag(truth), atol=1e-12)
        assert bins.longest == pytest.approx(np.sqrt(np.diag(truth).max()))
        assert bins.mean_square == pytest.approx(average @ average)
        np.testing.assert_allclose(bins.inner_with_mean, means @ average, atol=1e-12)
        lags = [max(truth[j, j + lag] for j in range(b - lag)) for lag in range(b)]
        np.testing.assert_allclose(bins.by_lag, lags, atol=1e-12)
        draws = bins.draw(np.random.default_rng(1), 200_000)
        # Six standard deviations of each covariance: false alarm below 1e-7 in all.
        spread = np.sqrt((truth**2 + np.outer(np.diag(truth), np.diag(truth))) / 200_000)
        assert np.all(np.abs(draws.T @ draws / 200_000 - truth) <= 6 * spread + 1e-12)


@pytest.mark.parametrize(("n", "b", "most"), [(60, 20, 7), (61, 20, 5), (50, 50, 10), (10, 30, 4)])
def test_thinned_bins_are_every_wth_and_cost_no_less(monkeypatch, n, b, most):
    coef = mechanisms.bisr(workloads.prefix_sum(n), num_bands=4).strategy_coef
    C = oracles.matrix(coef)
    whole = bins_of(coef, b)
    monkeypatch.setattr(bins_module, "_MOST", most)
    thin = bins_of(coef, b)
    stride = -(-b // most)
    means = np.array([C[:, j::b].sum(axis=1) for j in range(0, b - stride + 1, stride)])
    if b % stride == 0:
        np.testing.assert_allclose(thin.gram, means @ means.T, atol=1e-12)
    else:  # one bin is left out, and across it distances are greater
        assert np.all(thin.gram >= means @ means.T - 1e-12)
        np.testing.assert_allclose(thin.squares, np.diag(means @ means.T), atol=1e-12)
    assert thin.num_bins <= most
    for direction in ("remove", "add"):
        few, all_of_them = (sampled(x, 2.5, 1.0, direction) for x in (thin, whole))
        slack = 6 * math.hypot(few.standard_error, all_of_them.standard_error)
        assert few.mean >= all_of_them.mean - slack


def enumerated(squares, sigma, epsilon):
    """δ of removing for orthogonal means, summed over a grid of all their directions."""
    grid = np.linspace(-7.0, 7.0, 141)
    weights = np.exp(-(grid**2) / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    axes = np.meshgrid(*[grid] * len(squares), indexing="ij")
    mass = math.prod(np.meshgrid(*[weights] * len(squares), indexing="ij"))
    total = 0.0
    for own in range(len(squares)):
        x = [
            math.sqrt(d) / sigma * z + d / sigma**2 * ((j == own) - 0.5)
            for j, (d, z) in enumerate(zip(squares, axes, strict=True))
        ]
        loss = np.logaddexp.reduce(x) - math.log(len(squares))
        total += float(np.sum(mass * -np.expm1(np.minimum(epsilon - loss, 0.0))))
    return total / len(squares)


def test_thinning_where_the_stride_does_not_divide_the_bins(monkeypatch):
    """Two of three bins cost less than all three do (0.21 against 0.26); one does not."""
    monkeypatch.setattr(bins_module, "_MOST", 2)
    thin = bins_of([1.0, 0.0, 0.0, 0.0, 0.0], 3)
    whole = enumerated([2.0, 2.0, 1.0], 0.222, 20.0)
    assert whole == pytest.approx(0.261, abs=2e-3)
    assert enumerated([2.0, 1.0], 0.222, 20.0) == pytest.approx(0.21, abs=2e-3)
    assert enumerated(thin.squares, 0.222, 20.0) >= whole
    np.testing.assert_allclose(thin.every_square, [2.0, 2.0, 1.0])
    assert whole * 0.99 <= certain.delta(thin, 0.222, 20.0) <= whole * 1.02


@pytest.mark.parametrize("seed", range(20))
def test_a_thinned_gram_matrix_is_nowhere_below_those_that_it_replaces(monkeypatch, seed):
    """Every mixture of m bins into which the bins are divided, for C of any shape."""
    generator = np.random.default_rng(seed)
    n, b, most = int(generator.integers(5, 40)), int(generator.integers(3, 14)), 3
    coef = generator.random(n) * (generator.random(n) < 0.4)
    coef[0] = 1.0
    C = oracles.matrix(coef)
    means = np.array([C[:, j::b].sum(axis=1) for j in range(b)])
    whole = means @ means.T
    monkeypatch.setattr(bins_module, "_MOST", most)
    thin = bins_of(coef, b)
    m, stride = thin.num_bins, -(-b // most)
    assert np.linalg.eigvalsh(thin.gram).min() >= -1e-9
    np.testing.assert_allclose(thin.every_square, np.diag(whole), atol=1e-9)
    counted = np.zeros(b)
    for r in range(stride):
        own = np.arange(r, b, stride)
        subsets = [own] if own.size == m else [np.delete(own, i) for i in range(own.size)]
        for subset in subsets:
            assert subset.size == m
            counted[subset] += own.size / b / len(subsets) / m
            assert np.all(whole[np.ix_(subset, subset)] <= thin.gram + 1e-9)
    np.testing.assert_allclose(counted, 1.0 / b)


def test_one_bin_is_the_gaussian_mechanism():
    bins = bins_of([1.0, 0.5, 0.2], 1)
    mu = math.sqrt(bins.squares[0]) / 1.3
    truth = gaussian.delta(2.0, mu)
    for direction in ("remove", "add"):
        found = sampled(bins, 1.3, 2.0, direction, samples=400_000)
        assert abs(found.mean - truth) <= 6 * found.standard_error
        assert found.upper >= truth
        assert found.mean == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
@pytest.mark.parametrize(("sigma", "epsilon"), [(1.0, 1.0), (0.7, 3.0), (2.0, 0.2)])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_two_bins_agree_with_numerical_integration(correlation, sigma, epsilon, direction):
    gram = np.array([[1.2, correlation], [correlation, 1.0]])
    truth = integrated(gram, sigma, epsilon, direction)
    found = sampled(bins_module.Bins(gram), sigma, epsilon, direction, samples=200_000)
    assert abs(found.mean - truth) <= 6 * found.standard_error + 1e-7 * truth
    assert found.upper >= truth
    if direction == "add":
        assert balls_in_bins.add_bound(bins_module.Bins(gram), sigma, epsilon) >= truth
    assert certain.delta(bins_module.Bins(gram), sigma, epsilon) >= truth * (1 - 1e-9)


@pytest.mark.parametrize("folds", [1, 2, 3])
def test_every_number_of_folds_is_unbiased_and_keeps_its_bound(folds):
    bins = bins_of(mechanisms.bisr(workloads.prefix_sum(40), num_bands=3).strategy_coef, 8)
    reference = sampled(bins, 2.0, 2.0, samples=400_000, seed=1)
    shape = few_folds._best(bins, 2.0, 2.0, folds).shape
    assert shape.folds == folds
    tilt = shape.at(bins, 2.0, 2.0)
    generator = np.random.default_rng(5)
    values = tilt.values(generator, bins.draw(generator, 100_000))
    assert values.max() <= tilt.largest * (1 + 1e-12)
    assert values.min() >= 0
    error = values.std() / math.sqrt(values.size)
    assert abs(values.mean() - reference.mean) <= 6 * math.hypot(error, reference.standard_error)
    assert (values**2).mean() <= 1.2 * tilt.largest * reference.mean  # the second moment


def test_weight_bound_of_adding():
    bins = bins_of(mechanisms.bisr(workloads.prefix_sum(40), num_bands=3).strategy_coef, 8)
    tilt = balls_in_bins.Shift().at(bins, 2.0, 2.0)
    generator = np.random.default_rng(6)
    values = tilt.values(generator, bins.draw(generator, 100_000))
    assert values.min() >= 0
    assert values.max() <= tilt.largest * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sigma", "b", "delta"), [(0.7, 10, 1e-5), (0.7, 100, 1e-5), (1.0, 30, 1e-7), (2.0, 50, 1e-3)]
)
def test_identity_agrees_with_an_independent_random_allocation_accountant(sigma, b, delta):
    high, low = gaussian_allocation_epsilon_range(delta=delta, sigma=sigma, num_steps=b)
    bins = bins_of(np.eye(1, b)[0], b)
    # δ at their bracket, widened by 0.5 %, brackets ours.
    assert sampled(bins, sigma, low * 0.995).mean >= delta
    at_high = max(
        sampled(bins, sigma, high * 1.005, direction).mean for direction in ("remove", "add")
    )
    assert at_high <= delta


def test_cifar_reference_of_the_identity():
    """σ = 1.2388, b = 98, k = 10: an independent library says ε in [8.964, 8.990] at δ = 1e-5."""
    bins = bins_of(np.eye(1, 980)[0], 98)
    assert sampled(bins, 1.2388, 8.96).mean > 1e-5 * 0.99
    assert sampled(bins, 1.2388, 8.99).mean < 1e-5 * 1.01


def test_certificate_covers_the_truth():
    """At η = 1e-3 the upper value must cover in at least 999 of 1000 repetitions."""
    gram = np.array([[1.0, 0.4], [0.4, 1.0]])
    truth = integrated(gram, 0.8, 2.0, "remove")
    bins = bins_module.Bins(gram)
    covered = sum(
        sampled(bins, 0.8, 2.0, samples=2_000, seed=seed, eta=1e-3).upper >= truth
        for seed in range(1000)
    )
    assert covered >= 999


def test_relative_error_does_not_grow_as_delta_falls():
    bins = bins_of(mechanisms.bsr(workloads.prefix_sum(200), num_bands=4).strategy_coef, 20)
    errors = []
    for epsilon in (3.0, 6.0, 9.0, 12.0):
        found = sampled(bins, 4.0, epsilon, samples=50_000)
        errors.append(found.standard_error / found.mean)
    assert found.mean < 1e-12
    assert max(errors) < 0.2  # plain Monte Carlo: 1e4 at the last of them


@pytest.mark.parametrize("singular", [False, True])
def test_a_root_of_the_gram_matrix(singular):
    """Triangular, with the zeros left out of products; symmetric where the means are dependent."""
    bins = bins_of(mechanisms.bisr(workloads.prefix_sum(600), num_bands=8).strategy_coef, 300)
    if singular:
        gram = bins.gram.copy()
        gram[-1], gram[:, -1] = gram[-2], gram[:, -2]
        gram[-1, -1] = gram[-2, -2]
        bins = bins_module.Bins(gram)
    root = bins._root
    scale = float(np.max(bins.gram))
    np.testing.assert_allclose(root.T @ root, bins.gram, atol=1e-12 * scale)
    assert (np.count_nonzero(np.tril(root, -1)) == 0) == (not singular)
    rows = np.random.default_rng(0).standard_normal((7, 300))
    found = bins_module._product(rows, root)
    np.testing.assert_allclose(found, rows @ root, atol=1e-12 * math.sqrt(scale))


def test_a_root_is_found_in_few_evaluations_despite_small_jumps():
    """Two values that are nearly equal because of a jump must not send the search far away."""
    seen = []

    def excess(x):
        seen.append(x)
        return -17.0 * x - (0.07 if len(seen) == 2 else 0.0)

    found = roots.falling(excess, 0.003, (-5.0, 1.0), 1e-3)
    assert abs(found) < 2e-3
    assert len(seen) <= 6
    assert max(map(abs, seen)) < 0.05


def test_draws_depend_on_the_seed_alone(monkeypatch):
    bins = bins_of(mechanisms.bsr(workloads.prefix_sum(200), num_bands=4).strategy_coef, 20)
    once = sampled(bins, 4.0, 3.0)
    monkeypatch.setattr("corrnoise._threads.processors", lambda: 7)
    assert sampled(bins, 4.0, 3.0) == once
    assert sampled(bins, 4.0, 3.0, seed=8).mean != once.mean


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_an_estimate_with_kept_normals_is_that_of_fresh_ones(direction):
    """They are rounded to float32, and fewer draws are the first of the larger number."""
    bins = bins_of(mechanisms.bsr(workloads.prefix_sum(200), num_bands=4).strategy_coef, 20)
    options = {"failure_probability": 1e-9, "seed": (3, 0, 0)}
    normals = balls_in_bins.Normals(5_000)
    found = balls_in_bins.estimate(
        bins, 4.0, 2.0, direction, samples=5_000, normals=normals, **options
    )
    fresh = balls_in_bins.estimate(bins, 4.0, 2.0, direction, samples=5_000, **options)
    assert found.mean == pytest.approx(fresh.mean, rel=1e-4)
    assert found.standard_error == pytest.approx(fresh.standard_error, rel=1e-4)
    assert found.mean != fresh.mean
    few = balls_in_bins.estimate(
        bins, 4.0, 2.0, direction, samples=1_000, normals=normals, **options
    )
    assert abs(few.mean - fresh.mean) <= 6.0 * few.standard_error
    assert len(normals._kept) == 1


@pytest.mark.parametrize("folds", [2, 3])
def test_some_rows_choose_nearly_the_best_proposal(folds):
    bins = bins_of(mechanisms.bisr(workloads.prefix_sum(1200), num_bands=16).strategy_coef, 300)
    best = few_folds._best(bins, 6.0, 1.0, folds)
    for factor in (0.8, 0.9, 1.1, 1.25):
        other = few_folds.Tuples(bins, 6.0, 1.0, factor * best.theta, folds)
        assert best.log_largest <= other.log_largest
    some = few_folds.Tuples(bins, 6.0, 1.0, best.theta, folds, stride=5)
    assert some.log_z == pytest.approx(best.log_z, abs=0.02)
    assert some.log_z != best.log_z


def test_progress_is_reported():
    seen = []
    bins = bins_of(np.ones(6) / (1 + np.arange(6)), 3)
    balls_in_bins.estimate(
        bins,
        1.0,
        1.0,
        "remove",
        samples=3_000_000,
        failure_probability=ETA,
        seed=(1,),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(seen) > 1
    assert seen[-1] == (3_000_000, 3_000_000)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_moments_are_sums_over_tuples(order):
    import itertools

    own, common, b = 0.7, 0.3, 4
    gram = np.full((b, b), common) + own * np.eye(b)
    total = sum(
        math.exp(sum(gram[i, j] for i, j in itertools.combinations(t, 2)))
        for t in itertools.product(range(b), repeat=order)
    )
    assert renyi.log_moments(b, own, common)[order] == pytest.approx(math.log(total / b**order))


def test_no_sampling_bound_is_close_for_the_identity():
    bins = bins_of(np.eye(1, 980)[0], 98)
    bound = certain.delta(bins, 1.2388, 9.0)
    assert sampled(bins, 1.2388, 9.0).mean < bound < 1e-4
    plain = gaussian.delta(9.0, math.sqrt(10) / 1.2388)
    assert bound < plain / 50


@pytest.mark.parametrize("common", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.5])
def test_equal_inner_products_agree_with_plain_monte_carlo(common, epsilon):
    groups, size = [(0.9, 3), (0.4, 4)], 400_000
    generator = np.random.default_rng(11)
    variances = np.repeat([v for v, _ in groups], [count for _, count in groups])
    own = np.exp(generator.standard_normal((size, 7)) * np.sqrt(variances) - variances / 2)
    shared = np.exp(generator.standard_normal(size) * math.sqrt(common) - common / 2)
    ratio = np.mean(own, axis=1) * shared
    exact = 0.0
    for direction, values in (
        (allocation._remove, np.maximum(ratio - math.exp(epsilon), 0.0)),
        (allocation._add, np.maximum(1.0 - math.exp(epsilon) * ratio, 0.0)),
    ):
        found = min(direction(groups, common, epsilon, reach, 1 << 16) for reach in (4.0, 12.0))
        # Six standard errors: false alarm below 1e-7 in all.
        assert abs(found - values.mean()) <= 6 * values.std() / math.sqrt(size) + 2e-3 * found
        exact = max(exact, found)
    assert allocation.delta(groups, common, epsilon) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_every_grid_is_an_upper_bound(direction):
    """Two orthogonal means, by quadrature: no grid, however coarse, is below."""
    gram, sigma, epsilon = np.diag([1.0, 1.0]), 0.9, 0.7
    truth = integrated(gram, sigma, epsilon, direction)
    evaluate = allocation._remove if direction == "remove" else allocation._add
    for reach in allocation._REACHES:
        for points in (64, 1024, 1 << 14):
            assert evaluate([(1 / sigma**2, 2)], 0.0, epsilon, reach, points) >= truth
    best = min(
        evaluate([(1 / sigma**2, 2)], 0.0, epsilon, reach, 1 << 16) for reach in (4.0, 12.0, 40.0)
    )
    assert best == pytest.approx(truth, rel=2e-3)


@pytest.mark.parametrize("common", [0.05, 0.6])
def test_sums_beyond_the_period_count(common):
    """A common part makes every sum worth something, also one that the transform folds back."""
    epsilon, size, b = 0.3, 200_000, 4
    generator = np.random.default_rng(12)
    own = np.exp(generator.standard_normal((size, b)) * math.sqrt(0.5) - 0.25)
    shared = np.exp(generator.standard_normal(size) * math.sqrt(common) - common / 2)
    ratio = np.mean(own, axis=1) * shared
    for direction, values in (
        (allocation._remove, np.maximum(ratio - math.exp(epsilon), 0.0)),
        (allocation._add, np.maximum(1.0 - math.exp(epsilon) * ratio, 0.0)),
    ):
        low = values.mean() - 6 * values.std() / math.sqrt(size)
        for reach in (0.5, *allocation._REACHES):
            assert direction([(0.5, b)], common, epsilon, reach, 1 << 12) >= low


def test_the_bound_stays_tight_for_many_bins_and_small_delta():
    """b = 5000, ε = 0.1: the grid without what is added for its errors needs 1.014 at δ = 1e-9."""
    bins = bins_of(np.eye(1, 5000)[0], 5000)
    assert 1.0135 <= certain.noise(bins, 0.1, 1e-9) <= 1.02


@pytest.mark.parametrize(("sigma", "b", "epsilon"), [(0.6, 1000, 1.0), (1.0, 5000, 0.1)])
def test_many_bins_agree_with_plain_monte_carlo_given_the_others(sigma, b, epsilon):
    """Under P one bin is moved: its integral is in closed form for the sum of the others."""
    found = allocation.delta([(1 / sigma**2, b)], 0.0, epsilon)
    if epsilon == 0.1:
        assert 1e-10 < found < 1e-8  # too rare for plain Monte Carlo; the first case checks
        return
    generator, root = np.random.default_rng(3), 1 / sigma
    z = np.linspace(-9.0, 9.0, 4001)
    own = np.exp(root * z + root**2 / 2)
    weights = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    others = np.concatenate(
        [
            np.sum(np.exp(root * generator.standard_normal((500, b - 1)) - root**2 / 2), axis=1)
            for _ in range(10)
        ]
    )
    gains = np.maximum(1.0 - b * math.exp(epsilon) / (own + others[:, None]), 0.0) @ weights
    error = gains.std() / math.sqrt(gains.size)
    assert gains.mean() - 6 * error <= found <= 1.1 * (gains.mean() + 6 * error)


def test_the_bound_amplifies_at_very_small_epsilon():
    """b = 98, k = 10, ε = 0.1: a tenth of the unamplified noise is enough."""
    bins = bins_of(np.eye(1, 980)[0], 98)
    plain = gaussian.noise_multiplier(0.1, 1e-6, math.sqrt(10))
    assert certain.noise(bins, 0.1, 1e-6) < 0.15 * plain
    bisr = mechanisms.bisr(workloads.prefix_sum(980), num_bands=4).strategy_coef
    plain = gaussian.noise_multiplier(0.1, 1e-6, bins_of(bisr, 98).longest)
    assert certain.noise(bins_of(bisr, 98), 0.1, 1e-6) < 0.75 * plain


@pytest.mark.parametrize("seed", range(6))
def test_delta_grows_with_every_inner_product(seed):
    """The comparison behind the bound, by quadrature."""
    generator = np.random.default_rng(seed)
    a, b = np.sort(generator.uniform(0.0, 0.9, 2))
    for direction in ("remove", "add"):
        less = integrated(np.array([[1.0, a], [a, 1.0]]), 1.1, 0.8, direction)
        more = integrated(np.array([[1.1, b], [b, 1.0]]), 1.1, 0.8, direction)
        assert less <= more


@pytest.mark.parametrize("sigma", [9e6, 1.1e7, 1e9])
def test_much_noise_is_never_taken_for_an_infinite_amount(sigma):
    """One bin is the Gaussian mechanism, whose δ at ε = 0 is far above rounding errors."""
    for groups in ([(sigma**-2, 1)], [(0.0, 1)]):
        found = allocation.delta(groups, 0.0 if groups[0][0] else sigma**-2, 0.0)
        assert found >= gaussian.delta(0.0, 1.0 / sigma)
