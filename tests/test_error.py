import numpy as np
import oracles
import pytest

from corrnoise import error


@pytest.mark.parametrize("kind", ["mean", "last", "max"])
def test_weights_and_reductions_agree_with_the_matrix(kind):
    d = np.random.default_rng(0).standard_normal(30)
    rows = (oracles.matrix(d) ** 2).sum(axis=1)
    np.testing.assert_allclose(error.step_squares(d), rows)
    expected = {"mean": rows.mean(), "last": rows[-1], "max": rows.max()}[kind]
    assert error.reduce_squares(rows, kind) == pytest.approx(expected)
    assert error.coefficient_weights(30, kind) @ d**2 == pytest.approx(expected)


def test_last_is_not_max_in_general():
    assert error.reduce_squares(np.array([3.0, 1.0]), "last") == 1.0
    assert error.reduce_squares(np.array([3.0, 1.0]), "max") == 3.0


def test_bad_kind():
    with pytest.raises(ValueError, match="error must be one of mean, last, max, got 'sum'"):
        error.check_kind("sum")
