import math

import numpy as np
import oracles
import pytest

from corrnoise import Participation, bounds, mechanisms, workloads


@pytest.mark.parametrize("n", [1, 2, 10, 200])
def test_nuclear_norm_of_the_prefix_sum_is_in_closed_form(n):
    A = oracles.matrix(np.ones(n))
    expected = np.linalg.svd(A, compute_uv=False).sum()
    assert bounds.nuclear_norm(workloads.prefix_sum(n)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("decay", "momentum", "share"),
    [(0.999, 0, 0.95), (0.99, 0.9, 0.96), (1, 0.9, 0.9), (1, 1, 0.6)],
)
def test_nuclear_norm_of_a_long_workload_is_close_and_never_above(decay, momentum, share):
    workload = workloads.sgd(700, momentum=momentum, decay=decay)
    truth = np.linalg.svd(oracles.matrix(workload.coef), compute_uv=False).sum()
    found = bounds.nuclear_norm(workload)
    assert share * truth <= found <= truth * (1 + 1e-12)


@pytest.mark.parametrize(
    ("n", "b", "k"), [(12, 4, 3), (12, 3, 2), (11, 4, 3), (12, 1, 12), (12, 12, 1)]
)
def test_no_random_factorization_beats_the_lower_bound(n, b, k):
    participation = Participation(n, b, k)
    workload = workloads.sgd(n, momentum=0.3)
    A = oracles.matrix(workload.coef)
    parts = bounds.lower_bounds(workload, participation)
    assert parts.value == bounds.lower_bound(workload, participation)
    assert parts.correlated >= parts.nuclear * (1 - 1e-12)
    rng = np.random.default_rng(0)
    for trial in range(20):
        C = np.tril(rng.standard_normal((n, n))) * 0.3 ** rng.uniform(0, 2) + np.eye(n)
        if trial % 2:
            C = oracles.matrix(workload.sqrt_coef(n)) + 0.05 * np.tril(rng.standard_normal((n, n)))
        attained = oracles.sensitivity(C, b, k)
        error = attained * np.linalg.norm(A @ np.linalg.inv(C)) / math.sqrt(n)
        assert parts.value <= error * (1 + 1e-9)


def test_parts_of_the_papers_theorem():
    n, k = 1024, 16
    parts = bounds.lower_bounds(workloads.prefix_sum(n), Participation(n, n // k, k))
    assert parts.pattern >= k / math.sqrt(3)  # the Ω(k) part
    assert parts.nuclear >= math.sqrt(k) * math.log(n) / math.pi  # the Ω(√k log n) part
    assert parts.correlated is None
    with_decay = bounds.lower_bounds(workloads.sgd(n, decay=0.9), Participation(n, n // k, k))
    assert with_decay.nuclear >= math.sqrt(k)  # the Ω(√k) part


def test_fewer_participations_than_fit_are_spread():
    n = 60
    workload = workloads.prefix_sum(n)
    few = bounds.lower_bound(workload, Participation(n, 5, 3))
    assert few <= mechanisms.dense(workload, Participation(n, 5, 3)).rmse(Participation(n, 5, 3))
    assert few < bounds.lower_bound(workload, Participation(n, 5, 12))


@pytest.mark.parametrize(
    ("decay", "momentum"), [(1, 0), (1, 0.5), (0.5, 1), (0.99, 0), (0.9, 0.5), (0.5, 0)]
)
@pytest.mark.parametrize(("n", "b", "k"), [(64, 16, 4), (300, 10, 30), (512, 512, 1), (100, 7, 15)])
def test_bisr_stays_below_its_theorem(decay, momentum, n, b, k):
    workload = workloads.sgd(n, momentum=momentum, decay=decay)
    participation = Participation(n, b, k)
    for p in (1, 2, 8, n):
        limit = bounds.bisr_upper_bound(workload, participation, p)
        assert mechanisms.bisr(workload, num_bands=p).rmse(participation) <= limit


def test_printed_decoder_bound_fails_where_ours_holds():
    """The proof bounds r_{p-1}² by 1/(πp), but r_{p-1}² ≥ 1/(πp): at p = 1 it is 1, not 1/π."""
    for p in (1, 2, 10, 1000):
        assert workloads.r(p)[-1] ** 2 > 1 / (math.pi * p)


def test_band_inversion_lemma_as_corrected():
    for n in (2, 10, 100, 10_000):
        rate = math.sqrt(1 - 1 / math.sqrt(n))
        assert bounds.two_band_rmse(n, rate) <= bounds.two_band_bound(n)
    n, rate = 50, 0.8
    m = mechanisms.ToeplitzMechanism(
        "two",
        workloads.prefix_sum(n),
        mechanisms.bisr(workloads.prefix_sum(n), num_bands=1).noising,
    )
    assert bounds.two_band_rmse(n, 0.0) == pytest.approx(m.rmse(Participation(n, n, 1)))
    expected = oracles.rmse(np.ones(8), np.array([1, -rate, 0, 0, 0, 0, 0, 0]), 8, 1)
    assert bounds.two_band_rmse(8, rate) == pytest.approx(expected)
    assert bounds.two_band_rmse(8, 1.0) == pytest.approx(math.sqrt(8))
    printed = (1 / n) * (1 + (1 - rate) ** 2 * (n - 1)) * (1 - rate ** (2 * n)) / (1 - rate**2)
    assert printed < 0.1 * bounds.two_band_rmse(n, rate) ** 2  # the display in the paper


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: bounds.lower_bound(workloads.prefix_sum(4), Participation(5, 1, 1)),
            "participation.num_steps must be the workload's 4, got 5",
        ),
        (
            lambda: bounds.bisr_upper_bound(workloads.toeplitz([1, 1]), Participation(2, 1, 1), 1),
            "must be an SGD workload",
        ),
        (
            lambda: bounds.bisr_upper_bound(
                workloads.sgd(2, momentum=0.5, decay=0.5), Participation(2, 1, 1), 1
            ),
            "decay and momentum must differ",
        ),
        (lambda: bounds.two_band_rmse(5, 1.5), "rate must be in"),
        (lambda: bounds.two_band_bound(0), "num_steps must be at least 1"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
