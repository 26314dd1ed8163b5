from functools import partial

import numpy as np
import oracles
import pytest

from corrnoise import Participation, workloads
from corrnoise.mechanisms import banded, banded_inverse, buffered, fitting, solver
from corrnoise.mechanisms.dense import _Problem, soft_heaviest

PARTICIPATION = Participation(40, 11, 4)
WORKLOADS = [
    workloads.sgd(40, momentum=0.6, decay=0.99),
    workloads.toeplitz(np.exp(-np.arange(40.0) / 9)),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=["sgd", "toeplitz"])
@pytest.mark.parametrize("error", ["mean", "last"])
@pytest.mark.parametrize("certified", [False, True])
@pytest.mark.parametrize(
    ("family", "size"),
    [(banded._Banded, 6), (banded_inverse._BandedInverse, 6), (buffered._Interlaced, 6)],
    ids=["band_mf", "band_inv_mf", "blt"],
)
def test_gradients_match_finite_differences(family, size, certified, error, workload):
    where = np.linspace(-0.6, 0.1, size), workload, error
    parameters = family(*where) if family is banded_inverse._BandedInverse else family()
    run = fitting._Fit("test", parameters, workload, PARTICIPATION, error)
    square = run.certified(1e-2) if certified else run.attained
    x = 0.2 * np.random.default_rng(1).standard_normal(size)
    _, gradient = run.objective(x, square, np.inf)
    for i in range(size):
        h = 1e-6 * np.eye(size)[i]
        difference = (
            run.objective(x + h, square, np.inf)[0] - run.objective(x - h, square, np.inf)[0]
        ) / 2e-6
        assert gradient[i] == pytest.approx(difference, rel=2e-5, abs=1e-7)


def test_long_factors_take_the_transform_and_agree_with_the_filter(monkeypatch):
    n = 400
    workload, participation = workloads.sgd(n, momentum=0.5), Participation(n, 200, 2)
    run = fitting._Fit("test", banded._Banded(), workload, participation, "mean")
    x = workload.sqrt_coef(200)[1:]
    value, gradient = run.objective(x, run.attained, np.inf)
    monkeypatch.setattr(fitting.toeplitz, "_LONGEST_DIVISOR", 1000)
    slow, slow_gradient = run.objective(x, run.attained, np.inf)
    assert value == pytest.approx(slow, rel=1e-12)
    np.testing.assert_allclose(gradient, slow_gradient, atol=1e-12)


@pytest.mark.parametrize("error", ["mean", "max"])
@pytest.mark.parametrize("equal_columns", [False, True])
def test_dense_gradient_matches_finite_differences(error, equal_columns):
    workload, participation = workloads.prefix_sum(8), Participation(8, 3, 3)
    problem = _Problem(workload, participation, 3, equal_columns, error)
    rng = np.random.default_rng(2)
    x = rng.uniform(0.2, 1, problem.rows.size) + 2.0 * (problem.rows == problem.columns)
    smooth = partial(problem.objective, 0.1)
    _, gradient = smooth(x)
    for i in range(x.size):
        h = 1e-6 * np.eye(x.size)[i]
        difference = (smooth(x + h)[0] - smooth(x - h)[0]) / 2e-6
        assert gradient[i] == pytest.approx(difference, rel=1e-5, abs=1e-7)


def test_soft_maximum_over_patterns_is_the_sum_over_all_of_them():
    participation = Participation(9, 2, 3)
    weight = np.random.default_rng(3).uniform(0, 1, 9)
    chosen = oracles.patterns(9, 2, 3)
    scale = 0.3 * weight.mean()
    energies = np.array([weight[list(p)].sum() for p in chosen]) / scale
    total, gradient = soft_heaviest(weight, participation, 0.3)
    assert total == pytest.approx(scale * np.log(np.exp(energies).sum()))
    for i in range(9):
        h = 1e-6 * np.eye(9)[i]
        ends = [soft_heaviest(weight + s * h, participation, 0.3)[0] for s in (1, -1)]
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


def test_a_search_that_cannot_finish_says_so(monkeypatch):
    monkeypatch.setattr(fitting, "_SOLVER", fitting.Solver(memory=5, iterations=4, tolerance=1e-12))
    participation = Participation(256, 64, 4)
    m = banded_inverse.band_inv_mf(workloads.prefix_sum(256), participation, num_bands=16)
    assert not m.optimization.converged
    assert "LIMIT" in m.optimization.message
    assert m.optimization.final < m.optimization.start


def test_a_trace_is_told_the_start_and_every_step():
    participation, workload = Participation(256, 64, 4), workloads.prefix_sum(256)
    told: list[float] = []
    m = banded_inverse.band_inv_mf(workload, participation, num_bands=4, trace=told.append)
    assert told[0] == pytest.approx(m.optimization.start)
    assert told[-1] == pytest.approx(m.optimization.final)
    assert told == sorted(told, reverse=True)
    silent = banded_inverse.band_inv_mf(workload, participation, num_bands=4)
    np.testing.assert_array_equal(silent.noising_coef, m.noising_coef)


@pytest.mark.parametrize("error", ["mean", "last"])
@pytest.mark.parametrize("workload", WORKLOADS, ids=["sgd", "toeplitz"])
def test_error_and_sensitivity_change_alike_in_all_directions(workload, error):
    """The Gram matrix of the derivatives of u/‖u‖ and c/‖c‖ is the identity at the center."""
    center = workload.inverse_sqrt_coef(6)[1:] / workload.inverse_sqrt_coef(6)[0]
    parameters = banded_inverse._BandedInverse(center, workload, error)
    weights = fitting._Fit("test", parameters, workload, PARTICIPATION, error).weights

    def both(variables):
        noising = parameters.series(variables)
        u = np.sqrt(weights) * (noising * workload.series).coef(40)
        c = noising.reciprocal.coef(40)
        return np.concatenate([u / np.linalg.norm(u), c / np.linalg.norm(c)])

    steps = 1e-5 * np.eye(5)
    slopes = np.stack([(both(h) - both(-h)) / 2e-5 for h in steps])
    np.testing.assert_allclose(slopes @ slopes.T, np.eye(5), atol=1e-6)
    np.testing.assert_allclose(parameters.series(np.zeros(5)).numerator[0][1:], center)
    other = np.linspace(-0.5, 0.5, 5)
    back = parameters.series(parameters.variables(other)).numerator[0][1:]
    np.testing.assert_allclose(back, other, atol=1e-9)


@pytest.mark.parametrize(("num_bands", "most"), [(16, 40), (32, 400)])
def test_wide_bands_are_fitted_in_few_evaluations(num_bands, most):
    """Without those directions the search takes 61 and 918 of them, for no less error."""
    participation = Participation(980, 98, 10)
    workload = workloads.sgd(980, momentum=0.9, decay=0.9999)
    m = banded_inverse.band_inv_mf(workload, participation, num_bands=num_bands)
    assert m.optimization.evaluations < most
    assert m.rmse(participation) < {16: 89.3823, 32: 88.6599}[num_bands]


def test_a_descent_comes_back_from_where_nothing_is_known():
    """A valley that bends, known within a distance of 0.8 of the start alone."""
    asked: list[float] = []

    def function(x):
        asked.append(float(np.linalg.norm(x)))
        if asked[-1] > 0.8:
            return np.inf, np.zeros(2)
        bend, along = x[1] - x[0] ** 2, x[0] - 0.6
        slope = np.array([-40.0 * x[0] * bend + 2.0 * along, 20.0 * bend])
        return 10.0 * bend**2 + along**2, slope

    settings = {"radius": 1.0, "iterations": 15, "tolerance": 1e-6}
    found = solver.descend(function, np.zeros(2), **settings)
    assert function(found)[0] < 1e-5  # 0.36 at the start, 0 at (0.6, 0.36)
    assert max(asked) > 0.8
    assert len(asked) < 40
    np.testing.assert_array_equal(
        solver.descend(lambda x: (float(x @ x), 2.0 * x), np.zeros(2), **settings), np.zeros(2)
    )
