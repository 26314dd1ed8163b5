"""The noise of balls-in-bins with its gradient, and Band-Inv-MF optimised for it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corrnoise as cn
from corrnoise.accounting import Draws, amplified_noise
from corrnoise.accounting.amplified_noise import AmplifiedNoise
from corrnoise.mechanisms import amplified
from corrnoise.mechanisms.amplification import AmplifiedError

BUDGET = {"epsilon": 2.0, "delta": 1e-5}


def priced(mechanism, part, seed=0, **budget):
    budget = BUDGET | budget
    draws = Draws.checked(1e-9, None, 0, None)
    sigma = cn.samplings.BALLS_IN_BINS.estimate(mechanism, part, **budget, draws=draws)
    return AmplifiedNoise(
        mechanism.strategy_coef, part, noise_multiplier=sigma, seed=seed, **budget
    ), sigma


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(24, 6), (20, 6), (30, 1), (12, 12)]),
    st.sampled_from([0.5, 2.0, 6.0]),
    st.floats(0.0, 0.9),
    st.integers(0, 99),
)
def test_the_gradient_is_that_of_the_noise(shape, epsilon, momentum, seed):
    n, b = shape
    part = cn.Participation(n, b, -(-n // b))
    mechanism = cn.mechanisms.bisr(cn.workloads.sgd(n, momentum=momentum), num_bands=3)
    noise, _ = priced(mechanism, part, seed, epsilon=epsilon)
    noise.normals = noise.normals.astype(np.float64)  # for differences that are exact enough
    generator = np.random.default_rng(seed)
    # At a strategy beside the one that the draws were made for.
    c = mechanism.strategy_coef * (1.0 + 0.02 * generator.random(n))
    along = generator.standard_normal(n) * c
    along /= np.linalg.norm(along)
    step = 1e-5
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(amplified_noise, "_SHORT", 1e-7)
        squared, gradient = noise(c)
        change = noise(c + step * along)[0] - noise(c - step * along)[0]
    assert squared < math.inf
    assert gradient @ along == pytest.approx(
        change / (2 * step), rel=1e-3, abs=1e-5 * np.linalg.norm(gradient)
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-6), (2.0, 1e-5), (8.0, 1e-8)])
def test_the_noise_is_what_the_accountant_finds(epsilon, delta):
    part = cn.Participation(60, 12, 5)
    workload = cn.workloads.sgd(60, momentum=0.5)
    budget = {"epsilon": epsilon, "delta": delta}
    noise, sigma = priced(cn.mechanisms.bisr(workload, num_bands=4), part, **budget)
    for mechanism in (
        cn.mechanisms.bisr(workload, num_bands=4),
        cn.mechanisms.bisr(workload, num_bands=3),
        cn.mechanisms.bisr(workload, num_bands=6),
    ):
        exact = cn.calibrate(
            mechanism, part, sampling="balls-in-bins", samples=200_000, **budget
        ).noise_multiplier
        # The 2,000 draws tell δ to some per cent, and σ to a fraction of that.
        assert math.sqrt(noise(mechanism.strategy_coef)[0]) == pytest.approx(exact, rel=0.03)
    assert sigma > 0.0


def test_more_bins_than_500_are_thinned():
    part = cn.Participation(1010, 1010, 1)
    mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(1010), num_bands=3)
    noise, sigma = priced(mechanism, part)
    assert noise.delays.size == 337
    # The accountant's has room for its certificate, which many bins make wider.
    assert math.sqrt(noise(mechanism.strategy_coef)[0]) == pytest.approx(sigma, rel=0.15)


def test_negative_coefficients_and_far_strategies_are_out_of_reach():
    part = cn.Participation(24, 6, 4)
    noise, _ = priced(cn.mechanisms.bisr(cn.workloads.prefix_sum(24), num_bands=3), part)
    c = cn.mechanisms.bisr(cn.workloads.prefix_sum(24), num_bands=3).strategy_coef.copy()
    c[7] = 0.0
    assert noise(c)[0] < math.inf
    c[7] = -1e-12
    assert noise(c)[0] == math.inf
    far = np.zeros(24)
    far[[0, 5, 11]] = 1.0, 4.0, 4.0
    assert noise(far)[0] == math.inf


@pytest.mark.parametrize("num_bands", [2, 4, 8])
def test_coefficients_optimised_under_amplification_beat_those_for_the_sensitivity(num_bands):
    part, budget = cn.Participation(120, 30, 4), {"epsilon": 1.0, "delta": 1e-5}
    workload = cn.workloads.prefix_sum(120)
    found = cn.mechanisms.amplified_band_inv_mf(workload, part, num_bands=num_bands, **budget)
    assert found.noising.numerator[0].size == num_bands
    assert not cn.samplings.objections(found, part)["balls-in-bins"]
    rivals = [
        cn.mechanisms.band_inv_mf(workload, part, num_bands=num_bands),
        cn.mechanisms.bisr(workload, num_bands=num_bands),
    ]
    errors = [
        cn.calibrate(m, part, sampling="balls-in-bins", samples=50_000, seed=9, **budget).error
        for m in (found, *rivals)
    ]
    assert errors[0] <= 1.01 * min(errors)
    if num_bands <= 4:
        assert errors[0] < 0.93 * errors[1]  # Band-Inv-MF
    if num_bands == 2:
        assert (
            cn.mechanisms.amplified_band_inv_mf(workload, part, num_bands=num_bands, **budget)
            == found
        )


@pytest.mark.parametrize("num_bands", [1, 3, 16])
def test_no_start_is_better_than_the_result_at_any_number_of_bands(num_bands):
    """The same search up to 16 bands, from closed forms and Band-Inv-MF."""
    part, workload = cn.Participation(40, 10, 4), cn.workloads.sgd(40, momentum=0.5)
    error = AmplifiedError.checked(workload, part, seed=0, **BUDGET)
    starts = list(amplified._starts(workload, num_bands, error))
    assert [start.name for start in starts] == ["bisr", "bifr", "bifr", "band_inv_mf"]
    power = cn.mechanisms.amplified_bifr(workload, part, num_bands=num_bands, **BUDGET)
    # That of the search has a γ that is roughly the same.
    assert error.fresh(starts[2]) == pytest.approx(error.fresh(power), rel=0.005)
    found = cn.mechanisms.amplified_band_inv_mf(workload, part, num_bands=num_bands, **BUDGET)
    assert (found.name, found.optimization) == ("band_inv_mf", None)
    assert found.noising_bands == num_bands
    assert error.fresh(found) <= min(map(error.fresh, starts))
    # By draws that chose nothing, where estimates of few bins differ by about a percent.
    other = AmplifiedError.checked(workload, part, seed=1000, **BUDGET)
    assert other.fresh(found) <= 1.01 * min(map(other.fresh, starts))


def test_with_many_bands_the_optimum_with_fewer_is_a_start(monkeypatch):
    monkeypatch.setattr(amplified, "_FEW_BANDS", 2)
    part, workload = cn.Participation(40, 10, 4), cn.workloads.sgd(40, momentum=0.5)
    error = AmplifiedError.checked(workload, part, seed=0, **BUDGET)
    small = cn.mechanisms.amplified_band_inv_mf(workload, part, num_bands=2, descents=1, **BUDGET)
    *_, last = amplified._starts(workload, 5, error)
    assert np.array_equal(last.noising_coef, small.noising_coef)
    assert last.noising_bands == 5


def test_what_the_draws_of_a_search_flatter_is_not_taken(monkeypatch):
    part, workload = cn.Participation(40, 10, 4), cn.workloads.prefix_sum(40)
    error = AmplifiedError.checked(workload, part, seed=0, **BUDGET)
    flattered, bisr, far = (
        cn.mechanisms.bifr(workload, num_bands=4, power=power) for power in (0.4, 0.5, 0.9)
    )
    # The estimate by the draws of the search, and by others.
    errors = {0.4: (1.0, 1.03), 0.5: (1.01, 1.02), 0.9: (1.5, 0.9)}
    asked = []

    def estimate(self, mechanism):
        asked.append((self.seed, self.samples))
        power = round(-mechanism.noising_coef[1], 1)
        return errors[power][self.seed > 0]

    monkeypatch.setattr(AmplifiedError, "_estimate", estimate)
    assert error(flattered) < error(bisr)
    assert error.best([flattered, bisr, far]) is bisr
    # Each of them once, and what is close once more, from a seed that a search does not reach.
    assert sorted(asked) == [(0, 4_000)] * 3 + [(101, 16_000)] * 2


def test_the_search_descends_from_the_best_starts(monkeypatch):
    part, workload = cn.Participation(40, 10, 4), cn.workloads.sgd(40, momentum=0.5)
    error = AmplifiedError.checked(workload, part, seed=0, **BUDGET)
    ranked = sorted(error(start) for start in amplified._starts(workload, 3, error))
    seen = []
    monkeypatch.setattr(
        amplified, "_descents", lambda start, error: seen.append(error(start)) or [start]
    )
    cn.mechanisms.amplified_band_inv_mf(workload, part, num_bands=3, **BUDGET)
    # An estimate begins near the one before it, so its last digits depend on the order.
    assert seen == pytest.approx(ranked[:2], rel=2e-4)


def test_what_balls_in_bins_does_not_cover_is_refused():
    workload = cn.workloads.prefix_sum(20)
    with pytest.raises(ValueError, match="every bin is used 4 times"):
        cn.mechanisms.amplified_band_inv_mf(
            workload, cn.Participation(20, 5, 2), num_bands=3, **BUDGET
        )
    with pytest.raises(ValueError, match="epsilon must be"):
        cn.mechanisms.amplified_band_inv_mf(
            workload, cn.Participation(20, 5, 4), num_bands=3, epsilon=-1, delta=1e-5
        )
    with pytest.raises(ValueError, match="delta must be"):
        cn.mechanisms.amplified_band_inv_mf(
            workload, cn.Participation(20, 5, 4), num_bands=3, epsilon=1, delta=2
        )
    with pytest.raises(
        ValueError, match=r"participation.num_steps must be the workload's 20, got 30"
    ):
        cn.mechanisms.amplified_band_inv_mf(
            workload, cn.Participation(30, 5, 6), num_bands=3, **BUDGET
        )


def test_a_start_without_a_valid_analysis_is_passed_over():
    part, budget = cn.Participation(200, 20, 10), {"epsilon": 4.0, "delta": 1e-5}
    workload = cn.workloads.sgd(200, momentum=0.9)
    start = cn.mechanisms.band_inv_mf(workload, part, num_bands=4)
    assert "negative" in cn.samplings.objections(start, part)["balls-in-bins"]
    found = cn.mechanisms.amplified_band_inv_mf(workload, part, num_bands=4, **budget)
    assert not cn.samplings.objections(found, part)["balls-in-bins"]


def test_one_band_is_dp_sgd():
    part = cn.Participation(20, 5, 4)
    found = cn.mechanisms.amplified_band_inv_mf(
        cn.workloads.prefix_sum(20), part, num_bands=1, **BUDGET
    )
    np.testing.assert_array_equal(found.noising.coef(5), [1.0, 0.0, 0.0, 0.0, 0.0])
