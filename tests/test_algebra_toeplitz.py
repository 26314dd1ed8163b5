import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrnoise.algebra import toeplitz

SIZES = [1, 2, 3, 17, 96, 97, 300, 700]


def decaying(n, seed, rate=0.02):
    """A series with a positive diagonal whose inverse and roots stay of moderate size."""
    rng = np.random.default_rng(seed)
    coef = rng.uniform(-1, 1, n) * np.exp(-rate * np.arange(n)) / (1 + np.arange(n))
    coef[0] = 2.0
    return coef


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("length", [1, 5, 120, 400])
def test_product_and_quotient_match_dense_matrices(n, length):
    left, right = decaying(length, 0), decaying(max(1, length // 2), 1)
    L = oracles.matrix(np.resize(np.pad(left, (0, n)), n))
    R = oracles.matrix(np.resize(np.pad(right, (0, n)), n))
    np.testing.assert_allclose(toeplitz.multiply(left, right, n), (L @ R)[:, 0], atol=1e-13)
    np.testing.assert_allclose(
        toeplitz.divide(left, right, n), np.linalg.solve(R, L)[:, 0], atol=1e-13
    )


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(
    ("function", "power"), [("inverse", -1), ("sqrt", 0.5), ("inverse_sqrt", -0.5)]
)
def test_powers_match_high_precision(function, power, n):
    coef = decaying(n, 2)
    expected = oracles.series_power(coef, power, n, digits=40)
    np.testing.assert_allclose(getattr(toeplitz, function)(coef, n), expected, atol=1e-14)


@pytest.mark.parametrize("n", [1000, 1 << 15])
def test_newton_keeps_the_square_root_of_a_long_prefix_sum(n):
    root = toeplitz.sqrt(np.ones(n), n)
    k = np.arange(1, n)
    expected = np.concatenate([[1.0], np.cumprod((k - 0.5) / k)])
    np.testing.assert_allclose(root, expected, atol=2e-14)
    np.testing.assert_allclose(toeplitz.multiply(root, root, n), np.ones(n), atol=2e-13)
    np.testing.assert_allclose(
        toeplitz.multiply(root, toeplitz.inverse(root, n), n), toeplitz.impulse(n), atol=1e-13
    )


@pytest.mark.parametrize("length", [3, 300])
@pytest.mark.parametrize("shape", [(400,), (400, 3), (400, 2, 2)])
def test_application_to_a_block_matches_the_matrix(length, shape):
    coef = decaying(length, 3)
    block = np.random.default_rng(4).standard_normal(shape)
    C = oracles.matrix(np.pad(coef, (0, shape[0] - length)))
    expected = np.tensordot(C, block, axes=1)
    np.testing.assert_allclose(toeplitz.apply(coef, block), expected, atol=1e-12)


def test_application_in_blocks_of_columns_leaves_none_out():
    n, columns = 1 << 12, 1500  # more than one block of FFT columns
    coef = decaying(n, 5)
    block = np.random.default_rng(6).standard_normal((n, columns))
    result = toeplitz.apply(coef, block)
    for j in (0, 511, 512, 1023, 1024, columns - 1):
        np.testing.assert_allclose(
            result[:, j], toeplitz.multiply(coef, block[:, j], n), atol=1e-11
        )


@pytest.mark.parametrize("lags", [1, 7, 96, 97, 300])
def test_lag_products(lags):
    rng = np.random.default_rng(7)
    x, y = rng.standard_normal((2, 300))
    expected = [sum(x[t + j] * y[t] for t in range(300 - j)) for j in range(lags)]
    np.testing.assert_allclose(toeplitz.lag_products(x, y, lags), expected, atol=1e-12)


def test_short_divisors_keep_the_relative_accuracy_of_tiny_tails():
    coef = toeplitz.divide(np.ones(1), np.array([1.0, -0.5]), 1000)
    np.testing.assert_allclose(coef, 0.5 ** np.arange(1000.0), rtol=1e-13)


@given(st.integers(1, 10**7))
def test_fast_lengths_are_enough_and_not_much_more(least):
    length = toeplitz.fast_length(least)
    assert least <= length <= max(1.25 * least, least + 1)
    for factor in (2, 3, 5):
        while length % factor == 0:
            length //= factor
    assert length == 1


series = st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40).map(
    lambda tail: np.array([1.5, *tail])
)


@given(series, series, st.integers(1, 60))
def test_division_undoes_multiplication(left, right, n):
    product = toeplitz.multiply(left, right, n)
    scale = np.max(np.abs(toeplitz.inverse(right, n))) * np.max(np.abs(product))
    expected = np.resize(np.pad(left, (0, n)), n)
    np.testing.assert_allclose(
        toeplitz.divide(product, right, n), expected, atol=1e-14 * n * max(1, scale)
    )


@given(series, st.integers(1, 60))
def test_squared_root_is_the_series(coef, n):
    root = toeplitz.sqrt(coef, n)
    scale = np.max(np.abs(root)) ** 2 * n
    expected = np.resize(np.pad(coef, (0, n)), n)
    np.testing.assert_allclose(toeplitz.multiply(root, root, n), expected, atol=1e-13 * scale)


def test_matrix_is_the_oracle():
    coef = decaying(20, 8)
    np.testing.assert_array_equal(toeplitz.matrix(coef), oracles.matrix(coef))


@pytest.mark.parametrize("terms", [1, 2, 5, 40])
@pytest.mark.parametrize("part", [1, 7, 40, 1000])
def test_a_division_in_parts_is_the_one_in_one_piece(terms, part, monkeypatch):
    random = np.random.default_rng(terms)
    left, right = random.normal(size=333), np.append(2.0, random.uniform(-1, 1, terms - 1) / terms)
    whole = np.linalg.solve(toeplitz.matrix(np.append(right, np.zeros(333 - terms))), left)
    monkeypatch.setattr(toeplitz, "_SOLVED", part * terms)
    assert np.allclose(toeplitz.divide(left, right, 333), whole, rtol=0, atol=1e-13)
