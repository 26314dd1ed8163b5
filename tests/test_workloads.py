import json

import numpy as np
import oracles
import pytest

from corrnoise import Workload, workloads

RATES = [
    (1, 0),
    (1, 0.9),
    (0.999, 0),
    (0.99, 0.9),
    (0.9, 0.99),
    (0.7, 0.7),
    (1, 1),
    (0, 0.5),
    (0, 0),
]


@pytest.mark.parametrize(("decay", "momentum"), RATES)
def test_sgd_workload_is_what_sgd_does(decay, momentum):
    n = 40
    theta, m = np.zeros(n), np.zeros(n)  # one column for the gradient of each step
    rows = []
    for i in range(n):
        m = momentum * m + np.eye(n)[i]
        theta = decay * theta + m
        rows.append(theta)
    A = oracles.matrix(workloads.sgd(n, momentum=momentum, decay=decay).coef)
    np.testing.assert_allclose(A, np.array(rows), rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize(("decay", "momentum"), RATES)
@pytest.mark.parametrize(("method", "power"), [("sqrt_coef", 0.5), ("inverse_sqrt_coef", -0.5)])
def test_closed_forms_match_high_precision(decay, momentum, method, power):
    n = 200
    workload = workloads.sgd(n, momentum=momentum, decay=decay)
    expected = oracles.series_power(
        np.convolve([1.0, -decay], [1.0, -momentum]), -power, n, digits=50
    )
    np.testing.assert_allclose(
        getattr(workload, method)(n), expected, rtol=1e-11, atol=1e-15 * (decay == momentum)
    )


def test_named_sequences_of_the_paper():
    k = np.arange(30)
    binomial = np.cumprod(np.concatenate([[1.0], (2 * k[1:] - 1) / (2 * k[1:])]))  # C(2k,k)/4^k
    np.testing.assert_allclose(workloads.r(30), binomial, rtol=1e-14)
    np.testing.assert_allclose(workloads.r_tilde(30), -binomial / (2 * k - 1), rtol=1e-13)
    a, b = 0.9**k * workloads.r(30), 0.5**k * workloads.r(30)
    np.testing.assert_allclose(workloads.sgd_sqrt(30, 0.9, 0.5), np.convolve(a, b)[:30], rtol=1e-13)
    a, b = 0.9**k * workloads.r_tilde(30), 0.5**k * workloads.r_tilde(30)
    np.testing.assert_allclose(
        workloads.sgd_inverse_sqrt(30, 0.9, 0.5), np.convolve(a, b)[:30], rtol=1e-12
    )


def test_listing_in_the_paper_has_the_sign_flipped():
    """Erratum: its M_k = (α^{k+1} - β^{k+1})/(β - α) is minus the workload, and needs α ≠ β."""
    alpha, beta, k = 0.9, 0.4, np.arange(20)
    printed = (alpha ** (k + 1) - beta ** (k + 1)) / (beta - alpha)
    np.testing.assert_allclose(workloads.sgd(20, momentum=beta, decay=alpha).coef, -printed)
    equal = workloads.sgd(20, momentum=0.9, decay=0.9).coef
    np.testing.assert_allclose(equal, (k + 1) * 0.9**k, rtol=1e-13)


def test_diagonal_sum_is_below_zero_as_the_erratum_says():
    """Lemma "Bound on the matrix diagonal sum": Σ r̃_j β^{-j} r_{k-j} ≤ 0, not ≥ 0."""
    for beta in (0.1, 0.5, 0.9, 1.0):
        for k in (1, 2, 5, 20):
            j = np.arange(k + 1)
            total = np.sum(workloads.r_tilde(k + 1) * beta**-j * workloads.r(k + 1)[::-1])
            assert total <= 1e-12


def test_long_recurrence_stays_accurate():
    n = 1 << 17
    for decay, momentum in [(1, 0.9), (1, 0.99), (0.99999, 0.95)]:
        root = workloads.sgd_sqrt(n, decay, momentum)
        inverse = workloads.sgd_inverse_sqrt(n, decay, momentum)
        size = 1 << 18
        product = np.fft.irfft(np.fft.rfft(root, size) * np.fft.rfft(inverse, size), size)[:n]
        product[0] -= 1
        assert np.max(np.abs(product)) < 1e-12
        assert np.all(np.diff(root) <= 0)
        assert np.all(inverse[1:] <= 0)


def test_any_toeplitz_workload():
    coef = [2.0, -1.0, 0.5, 0.25]
    workload = workloads.toeplitz(coef)
    np.testing.assert_array_equal(workload.coef, coef)
    np.testing.assert_allclose(
        workload.sqrt_coef(4), oracles.series_power(np.array(coef), 0.5, 4), rtol=1e-14
    )
    assert repr(workload) == "toeplitz(num_steps=4)"


def test_prints_and_round_trips():
    for workload, text in [
        (workloads.prefix_sum(5), "prefix_sum(5)"),
        (workloads.sgd(5, momentum=0.9, decay=0.5), "sgd(5, momentum=0.9, decay=0.5)"),
        (workloads.toeplitz([1, 2]), "toeplitz(num_steps=2)"),
    ]:
        assert repr(workload) == text
        again = Workload.from_dict(json.loads(json.dumps(workload.to_dict())))
        assert again == workload
        np.testing.assert_array_equal(again.coef, workload.coef)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: workloads.prefix_sum(0), "num_steps must be at least 1, got 0"),
        (lambda: workloads.prefix_sum(2.5), "num_steps must be an integer at least 1, got 2.5"),
        (lambda: workloads.prefix_sum(True), "num_steps must be an integer"),
        (lambda: workloads.sgd(5, momentum=1.1), r"momentum must be in \[0, 1\], got 1.1"),
        (lambda: workloads.sgd(5, decay=-0.1), r"decay must be in \[0, 1\], got -0.1.*no decay"),
        (lambda: workloads.sgd(5, decay=float("nan")), "decay must be in"),
        (lambda: workloads.sgd(5, momentum="0.9"), "momentum must be a number"),
        (lambda: workloads.toeplitz([]), "coef must be a non-empty vector"),
        (lambda: workloads.toeplitz([0, 1]), r"coef\[0\], the diagonal, must be positive"),
        (lambda: workloads.toeplitz([1, np.inf]), "coef must be finite, got inf at index 1"),
        (lambda: workloads.toeplitz(np.eye(2)), "shape"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
