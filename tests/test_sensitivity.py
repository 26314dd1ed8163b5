import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrnoise import Participation, mechanisms, sensitivity, workloads
from corrnoise.algebra import toeplitz

TINY = 1e-12


@st.composite
def cases(draw, signed):
    n = draw(st.integers(1, 9))
    b = draw(st.integers(1, n))
    k = draw(st.integers(1, -(-n // b)))
    low = -1.0 if signed else 0.0
    tail = draw(st.lists(st.floats(low, 1, width=32), min_size=n - 1, max_size=n - 1))
    return np.array([1.0, *tail]), Participation(n, b, k)


def brute(coef, participation, oracle=oracles.sensitivity):
    return oracle(oracles.matrix(coef), participation.min_sep, participation.max_participations)


@given(cases(signed=False))
def test_non_negative_toeplitz_is_bracketed_and_exact_means_exact(case):
    coef, participation = case
    found, truth = sensitivity.of_toeplitz(coef, participation), brute(coef, participation)
    assert found.lower <= truth * (1 + TINY)
    assert truth <= found.value * (1 + TINY)
    if found.exact:
        assert found.value == pytest.approx(truth, rel=1e-10)
        assert found.gap == 0
    else:
        assert found.gap == pytest.approx(1 - found.lower / found.value)


@given(cases(signed=True))
def test_signed_toeplitz_is_bracketed(case):
    coef, participation = case
    found, upper = sensitivity.of_toeplitz(coef, participation), brute(coef, participation)
    lower = brute(coef, participation, oracles.signed_sensitivity)
    assert found.lower <= upper * (1 + TINY)
    assert lower <= found.value * (1 + TINY)
    assert upper <= found.value * (1 + TINY)


@given(cases(signed=True), st.integers(0, 5))
def test_matrices_are_bracketed(case, seed):
    coef, participation = case
    C = oracles.matrix(coef) * np.random.default_rng(seed).uniform(-1, 1, (coef.size, coef.size))
    found = sensitivity.of_matrix(C, participation)
    upper = oracles.sensitivity(C, participation.min_sep, participation.max_participations)
    assert found.lower <= upper * (1 + TINY) + 1e-300
    assert upper <= found.value * (1 + TINY) + 1e-300


@pytest.mark.parametrize("seed", range(20))
def test_at_most_b_bands_is_exact_whatever_the_signs(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 10))
    b = int(rng.integers(1, n + 1))
    participation = Participation(n, b, int(rng.integers(1, -(-n // b) + 1)))
    coef = np.zeros(n)
    coef[:b] = rng.standard_normal(b)
    truth = brute(coef, participation)
    assert truth == pytest.approx(brute(coef, participation, oracles.signed_sensitivity))
    for found in (
        sensitivity.of_toeplitz(coef, participation),
        sensitivity.of_matrix(oracles.matrix(coef), participation),
    ):
        assert found.exact
        assert found.value == pytest.approx(truth, rel=1e-10)


def test_monotone_coefficients_are_exact_and_need_no_autocorrelation(monkeypatch):
    monkeypatch.setattr(sensitivity, "autocorrelation_bound", None)  # would fail if called
    n = 1000
    coef = workloads.prefix_sum(n).sqrt_coef(n)
    participation = Participation(n, 90, 11)
    total = sum(np.pad(coef, (90 * j, 0))[:n] for j in range(11))
    found = sensitivity.of_toeplitz(coef, participation)
    assert found.exact
    assert found.value == pytest.approx(np.linalg.norm(total), rel=1e-13)


def test_autocorrelation_is_exact_where_the_majorant_is_not():
    participation = Participation(1024, 256, 4)
    m = mechanisms.band_inv_mf(workloads.prefix_sum(1024), participation, num_bands=8)
    c = m.strategy_coef
    assert np.any(np.diff(c) > 1e-6)  # not monotone
    found = m.sensitivity(participation)
    majorant = np.sqrt(sensitivity.majorant(c, participation))
    assert found.exact
    assert majorant > 1.05 * found.value


def test_shared_transforms_stay_above_the_truth():
    """More participations than transforms: the bound is looser, never too low."""
    n, b, k = 1200, 6, 200
    participation = Participation(n, b, k)
    t = np.arange(n)
    c = np.exp(-t / 100) * (1 + 0.3 * np.sin(t))
    shared, _ = sensitivity.autocorrelation(c, participation)
    single = exact_autocorrelation(c, participation)
    assert single <= shared * (1 + TINY)
    assert shared <= single * 1.05


def exact_autocorrelation(c, participation):
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    total = 0.0
    for m in range(k):
        terms = n - m * b
        g = np.array([c[:terms][: n - lag] @ c[lag : lag + terms] for lag in range(n)])
        top = np.maximum.accumulate(g[::-1])[::-1]
        total += g[0] + 2 * sum(top[j * b] for j in range(1, m + 1))
    return total


def test_autocorrelation_formula():
    rng = np.random.default_rng(3)
    c = rng.uniform(0, 1, 60)
    participation = Participation(60, 7, 6)
    bound, _ = sensitivity.autocorrelation(c, participation)
    assert bound == pytest.approx(exact_autocorrelation(c, participation), rel=1e-12)
    assert sensitivity.autocorrelation_bound(-c, participation) == bound


@pytest.mark.parametrize("smoothing", [1e-2, 0.5])
def test_gradients_match_finite_differences(smoothing):
    rng = np.random.default_rng(4)
    n = 40
    participation = Participation(n, 7, 5)
    c = rng.standard_normal(n)

    def bound(x):
        return sensitivity.autocorrelation(x, participation, smoothing)[0]

    def attained(x):
        return sensitivity.attained(x, participation)

    for function, gradient in [
        (bound, sensitivity.autocorrelation(c, participation, smoothing)[1]),
        (attained, sensitivity.attained_gradient(c, participation)[1]),
    ]:
        for i in range(n):
            h = 1e-6 * np.eye(n)[i]
            assert gradient[i] == pytest.approx(
                (function(c + h) - function(c - h)) / 2e-6, rel=1e-5, abs=1e-6
            )


def test_smoothing_only_adds():
    c = np.random.default_rng(5).standard_normal(50)
    participation = Participation(50, 10, 5)
    values = [sensitivity.autocorrelation(c, participation, h)[0] for h in (0, 1e-3, 1e-1)]
    assert values == sorted(values)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_heaviest_pattern_matches_brute_force(k):
    rng = np.random.default_rng(k)
    participation = Participation(11, 2, k)
    weight = rng.uniform(0, 1, 11)
    total, pattern = sensitivity.heaviest_pattern(weight, participation)
    best = max(weight[list(p)].sum() for p in oracles.patterns(11, 2, k))
    assert total == pytest.approx(best)
    assert total == pytest.approx(weight[pattern].sum())
    assert np.all(np.diff(pattern) >= 2)


@pytest.mark.parametrize(("momentum", "decay"), [(0, 1), (0.99, 1), (0.95, 0.99999)])
@pytest.mark.parametrize("p", [97, 1000, 4000])
def test_rounding_of_the_transforms_is_far_below_what_is_promised(monkeypatch, p, momentum, decay):
    """The C of long bands comes from FFTs; filters give the reference. The promise is 1e-11."""
    n = 1 << 13
    participation = Participation(n, n // 4, 4)
    workload = workloads.sgd(n, momentum=momentum, decay=decay)
    fast = mechanisms.bisr(workload, num_bands=p).sensitivity(participation)
    monkeypatch.setattr(toeplitz, "_LONGEST_DIVISOR", n)
    slow = mechanisms.bisr(workload, num_bands=p).sensitivity(participation)
    assert fast.exact
    assert slow.exact
    assert fast.value == pytest.approx(slow.value, rel=sensitivity.ROUNDING / 10)


def test_prints_what_it_is():
    participation = Participation(4, 2, 2)
    assert "exact" in repr(sensitivity.of_toeplitz(np.array([1.0, 0.5, 0.2, 0.1]), participation))
    assert "upper bound, gap" in repr(sensitivity.Sensitivity(2.0, 1.0, False))
