import json

import numpy as np
import pytest

from corrnoise.algebra import toeplitz
from corrnoise.algebra.rational import Rational


def test_a_cascade_is_the_ratio_of_its_products():
    series = Rational.of([[1, 0.5], [1, -0.2, 0.1]], [[1, -0.9], [2, -0.3]])
    n = 50
    numerator = np.convolve([1, 0.5], [1, -0.2, 0.1])
    denominator = np.convolve([1, -0.9], [2, -0.3])
    expected = toeplitz.divide(numerator, denominator, n)
    np.testing.assert_allclose(series.coef(n), expected, atol=1e-15)
    np.testing.assert_allclose(
        (series * series.reciprocal).coef(n), toeplitz.impulse(n), atol=1e-14
    )
    assert (series.numerator_terms, series.denominator_terms) == (4, 3)


def test_pairs_of_factors_keep_clustered_poles_accurate():
    """Poles and zeros down to 1e-6 from 1: their expanded polynomials have lost every digit."""
    poles = 1 - np.geomspace(1e-6, 1e-1, 8)
    zeros = 1 - np.geomspace(2e-6, 2e-1, 8)
    series = Rational.of([[1, -z] for z in zeros], [[1, -p] for p in poles])
    there_and_back = (series * series.reciprocal).coef(20000)
    np.testing.assert_allclose(there_and_back, toeplitz.impulse(20000), atol=1e-13)
    assert np.all(series.coef(20000) > 0)  # interlaced: a positive sum of exponentials


def test_dictionary_round_trip_is_exact_through_json():
    series = Rational.of([[1 / 3, 0.1, 1e-300]], [[np.pi]])
    again = Rational.from_dict(json.loads(json.dumps(series.to_dict())))
    assert again == series
    assert hash(again) == hash(series)
    assert again != Rational.of([[1 / 3, 0.1]], [[np.pi]])


def test_factors_cannot_be_changed():
    series = Rational.of([[1.0, 2.0]])
    with pytest.raises(ValueError, match="read-only"):
        series.numerator[0][0] = 3.0


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        ([], "non-empty"),
        ([[1.0]], "shape"),
        ([0.0, 1.0], r"numerator\[0\], the diagonal, must be positive, got 0"),
        ([-1.0], "positive, got -1"),
        ([1.0, np.nan], "finite, got nan at index 1"),
        ([1.0, np.inf], "finite, got inf"),
    ],
)
def test_bad_factors(factor, message):
    with pytest.raises(ValueError, match=message):
        Rational.of([factor])
