import numpy as np
import oracles
import pytest

from corrnoise.mechanisms import errors


@pytest.mark.parametrize("kind", ["mean", "last", "max"])
def test_weights_and_reductions_agree_with_the_matrix(kind):
    d = np.random.default_rng(0).standard_normal(30)
    rows = (oracles.matrix(d) ** 2).sum(axis=1)
    np.testing.assert_allclose(errors.step_squares(d), rows)
    expected = {"mean": rows.mean(), "last": rows[-1], "max": rows.max()}[kind]
    assert errors.reduce_squares(rows, kind) == pytest.approx(expected)
    assert errors.coefficient_weights(30, kind) @ d**2 == pytest.approx(expected)


def test_last_is_not_max_in_general():
    assert errors.reduce_squares(np.array([3.0, 1.0]), "last") == 1.0
    assert errors.reduce_squares(np.array([3.0, 1.0]), "max") == 3.0


def test_bad_kind():
    with pytest.raises(ValueError, match="over must be one of mean, last, max, got 'sum'"):
        errors.check_kind("sum")
