from functools import partial

import numpy as np
import oracles
import pytest

from corrnoise import Participation, workloads
from corrnoise.mechanisms import banded, banded_inverse, buffered, fitting
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
    [(banded._Banded(), 6), (banded_inverse._BandedInverse(), 6), (buffered._Interlaced(), 6)],
    ids=["band_mf", "band_inv_mf", "blt"],
)
def test_gradients_match_finite_differences(family, size, certified, error, workload):
    run = fitting._Fit("test", family, workload, PARTICIPATION, error)
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
