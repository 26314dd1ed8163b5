import dataclasses
import itertools
import json
import math
import sys
from types import SimpleNamespace

import dp_accounting
import numpy as np
import pytest

import corrnoise as cn
from corrnoise.accounting import Draws, balls_in_bins, certain, certificates, gaussian
from corrnoise.algebra.rational import Rational

CIFAR = cn.Participation(980, 98, 10)
WORKLOAD = cn.workloads.sgd(980, momentum=0.9, decay=0.9999)
MECHANISMS = {
    "dp_sgd": cn.mechanisms.dp_sgd(WORKLOAD),
    "bsr": cn.mechanisms.bsr(WORKLOAD, num_bands=4),
    "bisr": cn.mechanisms.bisr(WORKLOAD, num_bands=4),
    "band_mf": cn.mechanisms.band_mf(WORKLOAD, CIFAR, num_bands=4),
}


@pytest.mark.parametrize(
    ("name", "noise"), [("dp_sgd", 1.7226), ("bsr", 3.2043), ("bisr", 5.6834), ("band_mf", 3.353)]
)
def test_fixed_batches_of_the_cifar_table(name, noise):
    c = cn.calibrate(MECHANISMS[name], CIFAR, epsilon=9, delta=1e-5)
    assert c.noise_multiplier == pytest.approx(noise, rel=2e-4)
    assert c.exact
    assert c.failure_probability == 0
    back = cn.account(MECHANISMS[name], CIFAR, noise_multiplier=c.noise_multiplier, delta=1e-5)
    assert 9 * (1 - 1e-9) <= back.epsilon <= 9 * (1 + 1e-9)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("dp_sgd", 1.232, 1.245), ("bsr", 2.31, 2.34), ("bisr", 4.52, 4.57)]
)
def test_balls_in_bins_of_the_cifar_table(name, low, high):
    c = cn.calibrate(MECHANISMS[name], CIFAR, epsilon=9, delta=1e-5, sampling="balls-in-bins")
    assert low <= c.noise_multiplier <= high
    if name == "dp_sgd":  # the means are orthogonal: no draws are needed
        assert (c.kind, c.failure_probability, c.epsilon_without_sampling) == ("bound", 0.0, 9)
        return
    assert c.kind == "certified"
    assert c.failure_probability == 1e-9
    assert c.estimate.upper <= 1e-5
    assert 9 < c.epsilon_without_sampling < 10.1


def drawn(mechanism, part, sigma, epsilon, samples=200_000):
    """δ of removing by importance sampling, with draws that nothing else uses."""
    return balls_in_bins.estimate(
        mechanism.bins(part.min_sep), sigma, epsilon, "remove", samples=samples,
        failure_probability=1e-9, seed=(99, 1),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["dp_sgd", "bsr"])
def test_balls_in_bins_at_a_tiny_delta(name):
    m = MECHANISMS[name]
    c = cn.calibrate(m, CIFAR, epsilon=9, delta=1e-10, sampling="balls-in-bins")
    fixed = cn.calibrate(m, CIFAR, epsilon=9, delta=1e-10)
    found = c.estimate or drawn(m, CIFAR, c.noise_multiplier, 9.0)
    assert found.mean - 6 * found.standard_error <= 1e-10
    assert found.mean > 0.85e-10  # the certificate, or the bound, costs little
    assert c.noise_multiplier < 0.8 * fixed.noise_multiplier


@pytest.mark.parametrize(
    ("b", "k", "epsilon", "delta", "truth"),
    [
        # Noise by an independent accountant of random allocation (PLD_accounting 2.0), times √k.
        (500, 2, 0.3, 1e-6, 1.39),
        (98, 10, 9.0, 1e-5, 1.2388),
    ],
)
def test_dp_sgd_needs_the_noise_of_random_allocation(b, k, epsilon, delta, truth):
    part = cn.Participation(b * k, b, k)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(b * k))
    c = cn.calibrate(m, part, epsilon=epsilon, delta=delta, sampling="balls-in-bins")
    assert c.kind == "bound"
    assert 0.99 * truth <= c.noise_multiplier <= 1.02 * truth


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_epsilon_of_many_bins_does_not_hang_on_the_seed(seed):
    """σ = 0.9, b = 200, δ = 1e-6: an estimate says 0.8."""
    part, m = cn.Participation(200, 200, 1), cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(200))
    options = {"noise_multiplier": 0.9, "sampling": "balls-in-bins", "seed": seed}
    c = cn.account(m, part, delta=1e-6, **options)
    assert 0.75 < c.epsilon < 0.85
    # The bound is tight. Four standard errors either way: a false alarm in 16,000.
    found = drawn(m, part, 0.9, c.epsilon)
    assert found.standard_error < 0.05e-6
    assert abs(found.mean - 1e-6) <= 4 * found.standard_error
    assert cn.account(m, part, epsilon=c.epsilon, **options).delta <= 1e-6 * (1 + 1e-9)


def test_no_price_is_above_the_bound_without_sampling():
    """Few draws, little correlation: the certificate is worse than the bound, which is taken."""
    part = cn.Participation(60, 60, 1)
    m = cn.mechanisms.lambda_cgd(cn.workloads.prefix_sum(60), rate=0.02)
    options = {"sampling": "balls-in-bins", "samples": 1_000}
    sure = certain.noise(m.bins(60), 1.0, 1e-6)
    c = cn.calibrate(m, part, epsilon=1.0, delta=1e-6, **options)
    assert (c.kind, c.noise_multiplier) == ("bound", sure)
    assert sure < 0.5 * cn.calibrate(m, part, epsilon=1.0, delta=1e-6).noise_multiplier
    assert cn.account(m, part, noise_multiplier=sure, epsilon=1.0, **options).delta <= 1e-6
    early = certain.epsilon(m.first(30).bins(60), sure, 1e-6)
    assert c.spent(30, samples=1_000) <= early


def test_a_confirmation_widens_and_does_not_fall_to_the_bound(monkeypatch):
    """Certificates fail up to 15 % above the search's result; the next that holds is returned."""
    genuine, first = certificates.balls_in_bins.estimates, []

    def failing(bins, sigma, epsilon, shapes, **options):
        found = genuine(bins, sigma, epsilon, shapes, **options)
        if options["seed"][1] == 0:
            return found
        first.append(sigma)
        fails = sigma < 1.15 * first[0]
        return [dataclasses.replace(each, mean=1.0) for each in found] if fails else found

    monkeypatch.setattr(certificates.balls_in_bins, "estimates", failing)
    weak = {**vars(certain), "best": lambda bins, sigma, epsilon: (1.0, None)}
    monkeypatch.setattr(certificates, "certain", SimpleNamespace(**weak))
    m = cn.mechanisms.bsr(cn.workloads.prefix_sum(48), num_bands=4)
    bins, draws = m.bins(12), Draws.checked(1e-9, 5_000, 0, None)
    sigma, found = certificates.certified_noise(bins, 2.0, 1e-5, draws)
    assert found is not None
    assert found.upper <= 1e-5
    assert 1.15 * first[0] <= sigma <= 1.6 * first[0]
    assert len(set(first)) <= 10


def test_an_attempt_that_cannot_succeed_ends_early(monkeypatch):
    """After a part of its draws, the same on any number of cores; it certifies nothing."""
    monkeypatch.setattr(certificates, "_DRAWN", {})
    draws = Draws.checked(1e-9, 300_000, 0, None)
    sigma = cn.calibrate(
        MECHANISMS["bsr"], CIFAR, epsilon=2, delta=1e-5, sampling="balls-in-bins", samples=50_000
    ).noise_multiplier
    search = certificates.Search(MECHANISMS["bsr"].bins(CIFAR.min_sep), 1e-5, draws)
    certificates._DRAWN.clear()
    failed = search._certificate(0.97 * sigma, 2.0, 1)
    assert failed.samples <= 0.5 * search.samples
    assert failed.upper > 1e-5
    assert not certificates._DRAWN
    monkeypatch.setattr("corrnoise._threads.processors", lambda: 5)
    assert search._certificate(0.97 * sigma, 2.0, 1) == failed
    assert not certificates._DRAWN
    certified = search._certificate(1.03 * sigma, 2.0, 1)
    assert certified.samples == search.samples
    assert certified.upper <= 1e-5
    assert certified in certificates._DRAWN.values()


def test_the_directions_of_an_attempt_share_their_normals(monkeypatch):
    """Together they give what each gives alone, with the normals drawn once."""
    bins = MECHANISMS["bsr"].bins(CIFAR.min_sep)
    options = {"samples": 50_000, "failure_probability": 1e-9, "seed": (2, 1)}
    both = ("remove", "add")
    alone = [balls_in_bins.estimate(bins, 8.0, 1.0, each, **options) for each in both]
    drawn, genuine = [], type(bins).draw

    def counted(self, generator, count):
        drawn.append(count)
        return genuine(self, generator, count)

    monkeypatch.setattr(type(bins), "draw", counted)
    shapes = {each: balls_in_bins.best_shape(bins, 8.0, 1.0, each) for each in both}
    assert balls_in_bins.estimates(bins, 8.0, 1.0, shapes, **options) == alone
    assert sum(drawn) == 50_000
    assert alone[0].mean != alone[1].mean


def test_account_inverts_calibrate_and_seeds_repeat():
    m = MECHANISMS["bsr"]
    options = {"sampling": "balls-in-bins", "samples": 50_000, "seed": 3}
    once = cn.calibrate(m, CIFAR, epsilon=4, delta=1e-6, **options)
    assert cn.calibrate(m, CIFAR, epsilon=4, delta=1e-6, **options) == once
    back = cn.account(m, CIFAR, noise_multiplier=once.noise_multiplier, delta=1e-6, **options)
    assert back.epsilon == pytest.approx(4, rel=0.01)
    assert back.kind == "certified"


def test_one_bin_is_exact_and_the_analytic_gaussian():
    participation = cn.Participation(5, 1, 5)
    m = cn.mechanisms.bisr(cn.workloads.prefix_sum(5), num_bands=3)
    bins = cn.calibrate(m, participation, epsilon=2, delta=1e-6, sampling="balls-in-bins")
    fixed = cn.calibrate(m, participation, epsilon=2, delta=1e-6)
    assert bins.noise_multiplier == pytest.approx(fixed.noise_multiplier, rel=1e-6)
    assert bins.exact
    spent = cn.account(
        m,
        participation,
        noise_multiplier=bins.noise_multiplier,
        delta=1e-6,
        sampling="balls-in-bins",
    )
    assert spent.epsilon == pytest.approx(2, rel=1e-6)


def test_dense_mechanisms_are_priced_too():
    participation = cn.Participation(24, 6, 4)
    m = cn.mechanisms.dense(cn.workloads.prefix_sum(24), participation, equal_columns=True)
    fixed = cn.calibrate(m, participation, epsilon=3, delta=1e-5)
    assert fixed.noise_multiplier == pytest.approx(2 / gaussian.mu(3, 1e-5))
    bins = cn.calibrate(
        m, participation, epsilon=3, delta=1e-5, sampling="balls-in-bins", samples=20_000
    )
    assert bins.kind == "certified"
    assert bins.noise_multiplier < fixed.noise_multiplier


def test_poisson_is_what_the_pld_accountant_says():
    participation = cn.Participation(200, 20, 10)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(200))
    c = cn.calibrate(m, participation, epsilon=2, delta=1e-5, sampling="poisson")
    step = dp_accounting.PoissonSampledDpEvent(
        1 / 20, dp_accounting.GaussianDpEvent(c.noise_multiplier)
    )
    accountant = dp_accounting.pld.PLDAccountant().compose(
        dp_accounting.SelfComposedDpEvent(step, 200)
    )
    assert accountant.get_epsilon(1e-5) == pytest.approx(2, rel=2e-3)
    assert c.spent(200) == 2.0
    assert c.kind == "bound"
    same = cn.calibrate(m, participation, epsilon=2, delta=1e-5, sampling="cyclic-poisson")
    assert same.noise_multiplier == c.noise_multiplier


def test_cyclic_poisson_of_a_band_is_dp_sgd_with_fewer_steps_at_a_higher_rate():
    participation = cn.Participation(200, 20, 10)
    workload = cn.workloads.prefix_sum(200)
    m = cn.mechanisms.bsr(workload, num_bands=5)
    c = cn.calibrate(m, participation, epsilon=2, delta=1e-5, sampling="cyclic-poisson")
    shorter = cn.Participation(40, 4, 10)
    plain = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(40))
    same = cn.calibrate(plain, shorter, epsilon=2, delta=1e-5, sampling="poisson")
    norm = np.linalg.norm(m.strategy_coef)
    assert c.noise_multiplier == pytest.approx(norm * same.noise_multiplier, rel=1e-4)
    # p = b: every example of a group takes part, no amplification is left.
    whole = cn.mechanisms.bsr(workload, num_bands=20)
    fixed = cn.calibrate(whole, participation, epsilon=2, delta=1e-5)
    cyclic = cn.calibrate(whole, participation, epsilon=2, delta=1e-5, sampling="cyclic-poisson")
    assert cyclic.noise_multiplier == pytest.approx(fixed.noise_multiplier, rel=2e-3)


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins", "cyclic-poisson"])
def test_stopping_early_costs_less_and_never_more(sampling):
    participation = cn.Participation(100, 10, 10)
    m = cn.mechanisms.bsr(cn.workloads.prefix_sum(100), num_bands=4)
    options = {"samples": 20_000} if sampling == "balls-in-bins" else {}
    c = cn.calibrate(m, participation, epsilon=4, delta=1e-5, sampling=sampling, **options)
    spent = [c.spent(t, **options) for t in (0, 1, 5, 10, 37, 60, 99, 100)]
    assert spent[0] == 0
    assert spent[-1] == c.epsilon
    slack = 0.99 if sampling == "balls-in-bins" else 1 - 1e-12  # certificates are drawn
    assert all(later >= earlier * slack for earlier, later in itertools.pairwise(spent))
    assert max(spent) <= c.epsilon
    assert spent[4] < 0.8 * c.epsilon
    with pytest.raises(ValueError, match=r"steps_taken must be in \[0, 100\], got 101"):
        c.spent(101)


def test_stopping_early_knows_its_options():
    c = cn.calibrate(MECHANISMS["bsr"], CIFAR, epsilon=4, delta=1e-5)
    with pytest.raises(TypeError, match="sample"):
        c.spent(10, sample=1000)


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins", "random-allocation"])
def test_stopping_early_where_the_noise_gives_no_privacy(sampling):
    """At an ε that far too little noise cannot keep δ is 1, and everything is (0, 1)-DP."""
    mechanism = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(12))
    run = cn.account(
        mechanism, cn.Participation(12, 3, 4), noise_multiplier=0.05, epsilon=1.0, sampling=sampling
    )
    assert run.delta == 1.0
    assert run.spent(5) == 0.0


def test_stopping_early_with_fixed_batches_is_the_shorter_run():
    participation = cn.Participation(100, 10, 10)
    c = cn.calibrate(
        cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=5),
        participation,
        epsilon=4,
        delta=1e-5,
    )
    shorter = cn.mechanisms.bisr(cn.workloads.prefix_sum(42), num_bands=5)
    expected = cn.account(
        shorter, cn.Participation(42, 10, 5), noise_multiplier=c.noise_multiplier, delta=1e-5
    )
    assert c.spent(42) == pytest.approx(expected.epsilon)


def test_what_the_result_says():
    c = cn.calibrate(MECHANISMS["bisr"], CIFAR, epsilon=9, delta=1e-5)
    data = json.loads(json.dumps(c.to_dict()))
    assert data["unit"] == "example"
    assert (
        data["neighbours"] == "one example against an empty one; the number of examples is public"
    )
    assert data["sampling"] == "fixed"
    assert data["kind"] == "exact"
    assert data["noise_multiplier"] == c.noise_multiplier
    assert "exact" in repr(c)
    expected = c.noise_multiplier * np.linalg.norm(
        np.sqrt(np.arange(980, 0, -1) / 980) * MECHANISMS["bisr"].decoder_coef
    )
    assert c.error == pytest.approx(expected)


def test_composition_with_other_releases():
    c = cn.calibrate(MECHANISMS["bisr"], CIFAR, epsilon=9, delta=1e-5)
    assert gaussian.epsilon(1e-5, c.mu) == pytest.approx(9, rel=1e-9)
    accountant = dp_accounting.pld.PLDAccountant().compose(c.event())
    assert accountant.get_epsilon(1e-5) == pytest.approx(9, rel=1e-3)
    participation = cn.Participation(200, 20, 10)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(200))
    sampled = cn.account(m, participation, noise_multiplier=1.0, delta=1e-5, sampling="poisson")
    step = dp_accounting.PoissonSampledDpEvent(1 / 20, dp_accounting.GaussianDpEvent(1.0))
    assert sampled.event() == dp_accounting.SelfComposedDpEvent(step, 200)
    with pytest.raises(
        ValueError,
        match="mu is defined for batches that are not random, got sampling='poisson'",
    ):
        _ = sampled.mu
    bins = cn.account(
        m,
        participation,
        noise_multiplier=4.0,
        delta=1e-5,
        sampling="balls-in-bins",
        samples=10_000,
    )
    with pytest.raises(ValueError, match="no dp_accounting event"):
        bins.event()


def test_unproven_sensitivity_makes_a_bound_not_an_exact_value():
    participation = cn.Participation(12, 3, 4)
    series = Rational.of(denominator=[[1.0, 0.2, -0.5, 0.1, 0.6, -0.3, 0.4]])
    m = cn.mechanisms.ToeplitzMechanism("wild", cn.workloads.prefix_sum(12), series)
    assert not m.sensitivity(participation).exact
    assert cn.calibrate(m, participation, epsilon=1, delta=1e-5).kind == "bound"


NEGATIVE = cn.mechanisms.ToeplitzMechanism(
    "negative",
    cn.workloads.prefix_sum(8),
    cn.mechanisms.bisr(cn.workloads.prefix_sum(8), num_bands=2).noising.reciprocal,
)
SHORT = cn.Participation(8, 4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cn.calibrate(NEGATIVE, SHORT, epsilon=1, delta=1e-5, sampling="balls-in-bins"),
            "negative entries.*valid here: fixed",
        ),
        (
            lambda: cn.calibrate(
                MECHANISMS["bisr"], CIFAR, epsilon=1, delta=1e-5, sampling="poisson"
            ),
            "correlates the noise.*valid here: fixed, balls-in-bins",
        ),
        (
            lambda: cn.calibrate(
                MECHANISMS["bisr"], CIFAR, epsilon=1, delta=1e-5, sampling="cyclic-poisson"
            ),
            "980 bands, more than min_sep=98",
        ),
        (
            lambda: cn.calibrate(
                MECHANISMS["bsr"],
                cn.Participation(980, 98, 3),
                epsilon=1,
                delta=1e-5,
                sampling="balls-in-bins",
            ),
            "every bin is used 10 times in 980 steps, but max_participations is 3",
        ),
        (
            lambda: cn.calibrate(
                MECHANISMS["bsr"], CIFAR, epsilon=1, delta=1e-5, sampling="shuffle"
            ),
            "sampling must be one of",
        ),
        (lambda: cn.calibrate(MECHANISMS["bsr"], CIFAR, epsilon=0, delta=1e-5), "epsilon must be"),
        (
            lambda: cn.calibrate(MECHANISMS["bsr"], CIFAR, epsilon=math.nan, delta=1e-5),
            "epsilon must be",
        ),
        (lambda: cn.calibrate(MECHANISMS["bsr"], CIFAR, epsilon=1, delta=0), "delta must be"),
        (lambda: cn.calibrate(MECHANISMS["bsr"], CIFAR, epsilon=1, delta=1), "delta must be"),
        (
            lambda: cn.account(MECHANISMS["bsr"], CIFAR, noise_multiplier=math.inf, delta=1e-5),
            "noise_multiplier must be",
        ),
        (
            lambda: cn.account(MECHANISMS["bsr"], CIFAR, noise_multiplier=0, delta=1e-5),
            "noise_multiplier must be",
        ),
        (
            lambda: cn.calibrate(
                MECHANISMS["bsr"], CIFAR, epsilon=1, delta=1e-5, failure_probability=0
            ),
            "failure_probability must be",
        ),
        (
            lambda: cn.calibrate(MECHANISMS["bsr"], CIFAR, epsilon=1, delta=1e-5, samples=10),
            "samples must be at least 1000",
        ),
        (
            lambda: cn.calibrate(
                MECHANISMS["bsr"], cn.Participation(900, 98, 2), epsilon=1, delta=1e-5
            ),
            "participation.num_steps",
        ),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_attempts_share_the_failure_probability_and_never_the_draws(monkeypatch):
    """Three certificates are made to fail: all of them together may be wrong with 1e-6 at most."""
    genuine = certificates.balls_in_bins.estimates
    calls = []

    def recorded(bins, sigma, epsilon, shapes, **options):
        found = genuine(bins, sigma, epsilon, shapes, **options)
        calls.append((options["seed"], options["failure_probability"], len(shapes)))
        fails = 1 <= options["seed"][1] <= 3
        return [dataclasses.replace(each, mean=1.05e-5) for each in found] if fails else found

    monkeypatch.setattr(certificates.balls_in_bins, "estimates", recorded)
    c = cn.calibrate(
        MECHANISMS["bsr"],
        CIFAR,
        epsilon=9,
        delta=1e-5,
        sampling="balls-in-bins",
        samples=20_000,
        failure_probability=1e-6,
    )
    attempts = [call for call in calls if call[0][1] > 0]
    assert c.kind == "certified"
    assert len({seed[1] for seed, _, _ in attempts}) >= 4
    # Each direction of each attempt may fail; room is kept for a direction that was not sampled.
    assert sum(2 * eta for _, eta, _ in attempts) <= 1e-6
    assert all(number <= 2 for _, _, number in attempts)
    assert len({seed for seed, _, _ in attempts}) == len(attempts)
    assert not {seed for seed, _, _ in attempts} & {s for s, _, _ in calls if s[1] == 0}


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins", "cyclic-poisson"])
def test_account_finds_delta_where_epsilon_is_given(sampling):
    part = cn.Participation(48, 12, 4)
    m = cn.mechanisms.bsr(cn.workloads.prefix_sum(48), num_bands=4)
    options = {"sampling": sampling, "samples": 400_000}
    c = cn.calibrate(m, part, epsilon=2, delta=1e-5, **options)
    back = cn.account(m, part, noise_multiplier=c.noise_multiplier, epsilon=2, **options)
    assert back.delta == pytest.approx(1e-5, rel=0.05 if sampling == "balls-in-bins" else 1e-3)
    assert back.kind == c.kind
    if sampling == "balls-in-bins":
        assert back.delta == pytest.approx(back.estimate.upper)
        assert back.failure_probability == 1e-9
        assert 2 < back.epsilon_without_sampling < 3
    less = cn.account(m, part, noise_multiplier=0.5 * c.noise_multiplier, epsilon=2, **options)
    assert less.delta > back.delta


def test_the_delta_of_adding_counts():
    """At ε = 0 both directions have the same δ, and an unbiased look finds it below the bound."""
    part = cn.Participation(4, 4, 1)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(4))
    c = cn.account(m, part, noise_multiplier=1.0, epsilon=0, sampling="balls-in-bins")
    # P is the mixture of four unit vectors: total variation to N(0, I) by plain Monte Carlo.
    draws = np.random.default_rng(1).standard_normal((1_000_000, 4))
    gap = np.maximum(1.0 - np.mean(np.exp(draws - 0.5), axis=1), 0.0)
    low = gap.mean() - 5 * gap.std() / 1000  # one-sided, 5 standard errors: below 3e-7
    assert low <= c.delta <= gap.mean() * 1.05


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins"])
def test_absurd_noise_has_a_delta_too(sampling):
    part = cn.Participation(48, 12, 4)
    m = cn.mechanisms.bisr(cn.workloads.prefix_sum(48), num_bands=4)
    options = {"sampling": sampling, "samples": 1000}
    assert cn.account(m, part, noise_multiplier=1e-3, epsilon=1, **options).delta == 1.0
    none = cn.account(m, part, noise_multiplier=1e3, epsilon=10, **options)
    assert none.delta == sys.float_info.min
    assert none.kind != "exact"
    assert cn.account(m, part, noise_multiplier=1e-3, delta=1e-5, **options).epsilon > 1e6


def test_account_takes_one_of_delta_and_epsilon():
    part, m = cn.Participation(48, 12, 4), cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(48))
    for given in ({}, {"epsilon": 1.0, "delta": 1e-5}):
        with pytest.raises(ValueError, match="exactly one of delta and epsilon"):
            cn.account(m, part, noise_multiplier=1.0, **given)
    with pytest.raises(ValueError, match="epsilon must be"):
        cn.account(m, part, noise_multiplier=1.0, epsilon=-1)


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins"])
def test_a_calibration_comes_back_equal(sampling):
    part, m = (
        cn.Participation(48, 12, 4),
        cn.mechanisms.bisr(cn.workloads.prefix_sum(48), num_bands=4),
    )
    c = cn.calibrate(m, part, epsilon=2, delta=1e-5, sampling=sampling, samples=20_000)
    assert cn.Calibration.from_dict(json.loads(json.dumps(c.to_dict()))) == c
