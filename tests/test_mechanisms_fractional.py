"""γ-BIFR and DP-λCGD: limits, brute force, the search for their parameter, and everywhere used."""

import importlib.util
import json
import math
from pathlib import Path

import mpmath
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mechanisms import PARTICIPATIONS, WORKLOADS

import corrnoise as cn
from corrnoise import Participation, bounds, mechanisms, report, workloads
from corrnoise.apps.cli import main
from corrnoise.mechanisms.amplification import AmplifiedError
from corrnoise.mechanisms.searching import least_integer

CIFAR = workloads.sgd(980, momentum=0.9, decay=0.9999)
CIFAR_PART = Participation(980, 98, 10)


# The coefficients.


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("power", [0.0, 1e-9, 0.3, 0.5, 0.62, 1.0])
@pytest.mark.parametrize("num_bands", [1, 2, 4, 9])
def test_bifr_bands_the_inverse_power_of_the_dense_matrix(workload, power, num_bands):
    with mpmath.workdps(40):
        exact = oracles.matrix([mpmath.mpf(a) for a in workload.coef])
        dense = oracles.power(exact, -mpmath.mpf(power)).astype(float)
    found = mechanisms.bifr(workload, num_bands=num_bands, power=power)
    assert found.name == "bifr"
    assert found.noising_bands == num_bands
    expected = np.concatenate([dense[:num_bands, 0], np.zeros(9 - num_bands)])
    # The coefficients of the workload are rounded themselves.
    atol = 1e-15 * np.max(np.abs(workload.coef))
    np.testing.assert_allclose(found.noising_coef, expected, rtol=1e-13, atol=atol)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("num_bands", [1, 3, 9])
def test_one_half_is_bisr_and_zero_is_dp_sgd(workload, num_bands):
    half = mechanisms.bifr(workload, num_bands=num_bands, power=0.5)
    bisr = mechanisms.bisr(workload, num_bands=num_bands)
    np.testing.assert_allclose(half.noising_coef, bisr.noising_coef, rtol=1e-13, atol=1e-15)
    zero = mechanisms.bifr(workload, num_bands=num_bands, power=0)
    assert np.array_equal(zero.noising_coef, np.eye(9)[0])
    near = mechanisms.bifr(workload, num_bands=num_bands, power=1e-9)
    for part in PARTICIPATIONS.values():
        plain = mechanisms.dp_sgd(workload).rmse(part)
        assert zero.rmse(part) == plain
        assert near.rmse(part) == pytest.approx(plain, rel=1e-7)


def test_with_the_power_one_and_three_bands_nothing_of_the_noise_stays():
    for workload in (workloads.sgd(50, momentum=0.9, decay=0.99), workloads.prefix_sum(50)):
        m = mechanisms.bifr(workload, num_bands=3, power=1.0)
        np.testing.assert_allclose(m.strategy_coef, workload.coef, rtol=1e-12)
        np.testing.assert_allclose(m.decoder_coef, np.eye(50)[0], atol=1e-12)


def test_long_series_stay_accurate():
    """At γ = 1/2 the recurrence of three terms is a second way to the same coefficients."""
    for decay, momentum in ((1.0, 0.9), (0.9999, 0.9999), (1.0, 0.0)):
        workload = workloads.sgd(20_000, momentum=momentum, decay=decay)
        found = mechanisms.bifr(workload, num_bands=20_000, power=0.5).noising_coef
        np.testing.assert_allclose(found, workload.inverse_sqrt_coef(20_000), atol=1e-15)


@pytest.mark.parametrize("rate", [0.0, 0.4, 1.0])
def test_lambda_cgd_is_the_geometric_series(rate):
    m = mechanisms.lambda_cgd(workloads.prefix_sum(6), rate=rate)
    np.testing.assert_allclose(m.noising_coef, [1.0, -rate, 0, 0, 0, 0])
    np.testing.assert_allclose(m.strategy_coef, [rate**j for j in range(6)])
    part = Participation(6, 6, 1)
    assert m.sensitivity(part).exact
    assert m.rmse(part) == pytest.approx(bounds.two_band_rmse(6, rate), rel=1e-12)


def test_two_bands_are_the_same_in_three_families():
    for workload, part in (
        (CIFAR, CIFAR_PART),
        (workloads.prefix_sum(256), Participation(256, 64, 4)),
        (workloads.sgd(300, decay=0.99), Participation(300, 30, 10)),
    ):
        cgd = mechanisms.lambda_cgd(workload, part)
        fractional = mechanisms.bifr(workload, part, num_bands=2)
        optimised = mechanisms.band_inv_mf(workload, part, num_bands=2)
        assert cgd.rmse(part) == pytest.approx(optimised.rmse(part), rel=1e-8)
        assert fractional.rmse(part) == pytest.approx(cgd.rmse(part), rel=1e-8)
        np.testing.assert_allclose(fractional.noising_coef, cgd.noising_coef, atol=1e-5)


# The search for the parameter.


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("participation", PARTICIPATIONS.values(), ids=PARTICIPATIONS)
def test_the_best_parameter_is_that_of_a_dense_scan(workload, participation):
    b, k = participation.min_sep, participation.max_participations
    A = workload.coef

    def dense(noising):
        return oracles.rmse(A, np.concatenate([noising, np.zeros(9 - noising.size)]), b, k)

    inverse = oracles.matrix(A)
    scan = [dense(oracles.power(inverse, -power)[:3, 0]) for power in np.linspace(0.0, 1.0, 41)]
    found = mechanisms.bifr(workload, participation, num_bands=3)
    assert found.rmse(participation) <= min(scan) * (1 + 1e-9)
    rates = [dense(np.array([1.0, -rate])) for rate in np.linspace(0.0, 1.0, 41)]
    assert mechanisms.lambda_cgd(workload, participation).rmse(participation) <= min(rates) * (
        1 + 1e-9
    )


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 80),
    st.integers(1, 20),
    st.integers(1, 10),
    st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]),
    st.sampled_from([0.5, 0.999, 1.0]),
    st.integers(1, 12),
)
def test_the_best_is_never_worse_than_bisr_or_dp_sgd(n, b, k, momentum, decay, p):
    b = min(b, n)
    part = Participation(n, b, min(k, -(-n // b)))
    workload = workloads.sgd(n, momentum=momentum, decay=decay)
    m = mechanisms.bifr(workload, part, num_bands=min(p, n))
    bisr = mechanisms.bisr(workload, num_bands=min(p, n)).rmse(part)
    plain = mechanisms.dp_sgd(workload).rmse(part)
    assert m.rmse(part) <= min(bisr, plain) * (1 + 1e-12)
    assert m.optimization.start == pytest.approx(bisr, rel=1e-12)
    assert mechanisms.lambda_cgd(workload, part).rmse(part) <= plain * (1 + 1e-12)


def test_the_record_of_the_search_has_the_parameter():
    m = mechanisms.bifr(CIFAR, CIFAR_PART, num_bands=4)
    power = float(m.optimization.message.removeprefix("γ = "))
    assert 0.5 < power < 0.6
    again = mechanisms.bifr(CIFAR, num_bands=4, power=power)
    assert np.array_equal(again.noising_coef, m.noising_coef)
    assert again.optimization is None
    assert m.optimization.final == m.rmse(CIFAR_PART) < m.optimization.start


def test_an_inexact_sensitivity_is_searched_as_it_is_certified():
    """With negative coefficients the pattern 0, b, 2b, … may be too small: it is not believed."""
    workload = workloads.toeplitz([1.0, -0.9, 1.2, -0.7, 0.9, -0.8, 0.6, -0.5, 0.4])
    part = Participation(9, 2, 4)
    found = mechanisms.bifr(workload, part, num_bands=4)
    scan = [
        mechanisms.bifr(workload, num_bands=4, power=power).rmse(part)
        for power in np.linspace(0.0, 1.0, 201)
    ]
    assert not found.sensitivity(part).exact
    assert found.rmse(part) <= min(scan) * (1 + 1e-4)


def test_the_record_is_finite_where_bisr_is_not():
    """C of BISR doubles from step to step here, beyond the range of floats."""
    workload = workloads.toeplitz([1.0, 4.0, *[0.0] * 398])
    part = Participation(400, 100, 4)
    with pytest.raises(OverflowError):
        mechanisms.bisr(workload, num_bands=2).rmse(part)
    found = mechanisms.bifr(workload, part, num_bands=2)
    assert found.optimization.start == found.optimization.final == found.rmse(part)
    assert cn.Mechanism.from_json(found.to_json()) == found


def test_the_integer_search_finds_the_minimum_of_what_falls_and_rises():
    for best in range(101):
        assert least_integer(lambda x, best=best: abs(x - best), [0, 30, 100]) == best
        asked = []

        def wall(x, best=best, asked=asked):
            asked.append(x)
            return math.inf if x > best else float(-x)

        assert least_integer(wall, [0, 100]) == best
        assert len(asked) == len(set(asked)) <= 14
    assert least_integer(lambda x: 1.0, [3]) == 3
    coarse = least_integer(lambda x: (x - 700) ** 2, range(0, 1001, 100), width=20)
    assert abs(coarse - 700) <= 20


# Under amplification.

BUDGET = {"epsilon": 2.0, "delta": 1e-5}


@pytest.mark.parametrize("num_bands", [2, 6])
def test_the_amplified_parameter_is_not_worse_by_fresh_draws(num_bands):
    part, workload = Participation(60, 15, 4), workloads.prefix_sum(60)
    error = AmplifiedError.checked(workload, part, seed=0, **BUDGET)
    found = mechanisms.amplified_bifr(workload, part, num_bands=num_bands, **BUDGET)
    rivals = [
        mechanisms.bisr(workload, num_bands=num_bands),
        mechanisms.bifr(workload, part, num_bands=num_bands),
        mechanisms.dp_sgd(workload),
    ]
    assert error.fresh(found) <= min(map(error.fresh, rivals))
    assert found == mechanisms.amplified_bifr(workload, part, num_bands=num_bands, **BUDGET)
    assert error.fresh(found) < 0.99 * error.fresh(rivals[1])
    scan = [
        error.fresh(mechanisms.bifr(workload, num_bands=num_bands, power=power))
        for power in np.linspace(0.3, 0.8, 11)
    ]
    assert error.fresh(found) < 1.02 * min(scan)
    if num_bands == 2:
        cgd = mechanisms.amplified_lambda_cgd(workload, part, **BUDGET)
        plain = [mechanisms.lambda_cgd(workload, part), rivals[2]]
        assert error.fresh(cgd) <= min(map(error.fresh, plain))
        assert error.fresh(cgd) == pytest.approx(error.fresh(found), rel=0.02)


def test_what_is_not_covered_is_refused():
    workload, part = workloads.prefix_sum(20), Participation(20, 5, 4)
    with pytest.raises(ValueError, match=r'power="best" needs participation=, got None'):
        mechanisms.bifr(workload, num_bands=3)
    with pytest.raises(ValueError, match=r'rate="best" needs participation=, got None'):
        mechanisms.lambda_cgd(workload)
    for wrong in (-0.1, 1.1, math.nan, True, "root"):
        with pytest.raises(ValueError, match=r"power must be .*in \[0, 1\]"):
            mechanisms.bifr(workload, num_bands=3, power=wrong)
        with pytest.raises(ValueError, match=r"rate must be .*in \[0, 1\]"):
            mechanisms.lambda_cgd(workload, rate=wrong)
    with pytest.raises(ValueError, match=r"num_bands must be in \[1, 20\]"):
        mechanisms.bifr(workload, part, num_bands=21)
    with pytest.raises(ValueError, match="num_bands must be left out for lambda_cgd"):
        mechanisms.build("lambda_cgd", workload, part, 3)
    for amplified in (
        lambda w, p, **given: mechanisms.amplified_bifr(w, p, num_bands=3, **given),
        mechanisms.amplified_lambda_cgd,
    ):
        with pytest.raises(ValueError, match="every bin is used 4 times"):
            amplified(workload, Participation(20, 5, 2), **BUDGET)
        with pytest.raises(ValueError, match="epsilon must be"):
            amplified(workload, part, epsilon=-1, delta=1e-5)
        with pytest.raises(ValueError, match="delta must be"):
            amplified(workload, part, epsilon=1, delta=2)
        with pytest.raises(ValueError, match="seed must be"):
            amplified(workload, part, seed=-1, **BUDGET)
        with pytest.raises(ValueError, match=r"num_steps must be the workload's 20, got 30"):
            amplified(workload, Participation(30, 5, 6), **BUDGET)
    for best in (
        lambda w, p: mechanisms.bifr(w, p, num_bands=3),
        mechanisms.lambda_cgd,
    ):
        with pytest.raises(ValueError, match=r"num_steps must be the workload's 20, got 30"):
            best(workload, Participation(30, 5, 6))


# Both families everywhere, through the registry alone.


@pytest.mark.parametrize(
    ("name", "label", "title"),
    [("bifr", "γ-BIFR p=4", "bifr p=4"), ("lambda_cgd", "DP-λCGD", "lambda_cgd")],
)
def test_plan_statement_report_and_command_line(name, label, title, tmp_path, capsys):
    ask = {"num_examples": 120, "batch_size": 10, "epochs": 4, "epsilon": 4.0, "delta": 1e-3}
    size = {"num_bands": 4} if name == "bifr" else {}
    for sampling in ("fixed", "balls-in-bins"):
        plan = cn.plan(**ask, sampling=sampling, mechanisms=[name], samples=20_000, **size)
        assert cn.Plan.from_json(plan.to_json()) == plan
        plan.verified()
        expected = [title] + [f"{title}, amplified"] * (sampling == "balls-in-bins")
        assert sorted(a.label for a in plan.alternatives) == expected
        assert plan.mechanism.name == name
        assert plan.scheme.num_vectors == 0
        page = report.write(tmp_path / f"{sampling}.html", plan).read_text(encoding="utf-8")
        assert label in page
        assert cn.mechanisms.shown(plan.mechanism) == label
        assert report.read(tmp_path / f"{sampling}.html") == plan
    everything = cn.plan(**ask, sampling="fixed")
    assert title in {a.label for a in everything.alternatives}
    run = "--num-examples 120 --batch-size 10 --epochs 4"
    assert main(f"compare {run} --values 2,4 --mechanism {name}".split()) == 0
    assert name in capsys.readouterr().out
    bands = "--num-bands 4" if name == "bifr" else ""
    account = f"account --mechanism {name} {bands} {run} --epsilon 4 --delta 1e-3"
    assert main(account.split()) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bifr", "lambda_cgd"])
def test_the_engine_trains_and_states_it(name):
    from training import KEY, loader, private, train

    from corrnoise.torch import PrivacyEngine

    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(
        engine,
        target_epsilon=4.0,
        target_delta=1e-3,
        epochs=3,
        mechanism=name,
        sampling="fixed",
        data_loader=loader(),
    )
    train(net, optimizer, batches, steps=18)
    statement = engine.statement()
    assert statement.mechanism.startswith(f"{name}(")
    assert statement.epsilon == engine.get_epsilon(1e-3) == 4.0
    assert f"{name}(" in statement.to_text()


# What the papers claim, where it can be checked with numbers alone.


@pytest.mark.parametrize("num_bands", range(2, 9))
def test_few_bands_have_less_error_than_bisr_as_the_paper_claims(num_bands):
    """Abstract of "Beyond Square Roots": better RMSE than BISR at low bandwidths."""
    for workload, part, at_most in (
        (CIFAR, CIFAR_PART, 0.87),
        (workloads.prefix_sum(1024), Participation(1024, 256, 4), 0.66),
    ):
        bisr = mechanisms.bisr(workload, num_bands=num_bands).rmse(part)
        found = mechanisms.bifr(workload, part, num_bands=num_bands).rmse(part)
        assert found < at_most * bisr
        # And never better than the optimum of all coefficients.
        best = mechanisms.band_inv_mf(workload, part, num_bands=num_bands).rmse(part)
        assert best <= found * (1 + 1e-9)


def test_one_step_of_correlation_beats_independent_noise_with_nothing_stored():
    """Abstract of DP-λCGD: better than DP-SGD, with no memory beyond it."""
    for workload, part in (
        (CIFAR, CIFAR_PART),
        (workloads.prefix_sum(1024), Participation(1024, 256, 4)),
    ):
        m = mechanisms.lambda_cgd(workload, part)
        assert m.rmse(part) < 0.6 * mechanisms.dp_sgd(workload).rmse(part)
        assert cn.noise.CorrelatedNoise(m).scheme.num_vectors == 0


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    """The script of the tables, and what it recorded."""
    spec = importlib.util.spec_from_file_location("families", ROOT / "benchmarks" / "families.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script, json.loads((ROOT / "benchmarks" / "families.json").read_text())


def test_the_page_shows_the_tables_that_were_recorded(benchmark):
    script, result = benchmark
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for found in result["fixed"]:
        assert script.fixed_table(found) in page
    assert script.drawn_table(result["drawn"]) in page
    assert script.search_table(result["drawn"]) in page


def test_the_recorded_errors_are_what_the_script_computes(benchmark):
    script, result = benchmark
    for recorded in result["fixed"]:
        again = script.fixed(recorded["run"], (2, 5))
        for key in ("rmse", "rate", "column_normalised"):
            value = recorded["lambda_cgd"][key]
            assert again["lambda_cgd"][key] == pytest.approx(value, rel=1e-5)
        for row in again["rows"]:
            (before,) = (r for r in recorded["rows"] if r["num_bands"] == row["num_bands"])
            for name in ("bisr", "bifr", "band_inv_mf"):
                assert row[name]["errors"] == pytest.approx(before[name]["errors"], rel=1e-6)
            assert row["power"] == pytest.approx(before["power"], abs=2e-6)


def test_the_estimates_agree_with_the_certificates(benchmark):
    _, result = benchmark
    certified = [row for found in result["drawn"] for row in found["rows"] if "certified" in row]
    assert len(certified) == 3
    for row in certified:
        assert row["certified"] == pytest.approx(row["estimates"], rel=0.01)
