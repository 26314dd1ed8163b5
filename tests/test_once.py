"""``_once``: a result is made once, whichever thread asks first; and what fits with it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

import corrnoise as cn
from corrnoise._once import Once
from corrnoise.mechanisms import banded_inverse


def test_who_asks_for_what_is_under_way_waits_for_it():
    once, made, begun, go = Once(10), [], Event(), Event()

    def make():
        begun.set()
        assert go.wait(10)
        made.append(1)
        return object()

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(once.get, "key", make)
        assert begun.wait(10)
        others = [pool.submit(once.get, "key", make) for _ in range(3)]
        go.set()
        assert all(other.result(10) is first.result(10) for other in others)
    assert made == [1]


def test_the_oldest_result_makes_room():
    once = Once(2)
    assert [once.get(key, lambda key=key: key) for key in "abc"] == ["a", "b", "c"]
    assert once.get("c", lambda: "again") == "c"
    assert once.get("a", lambda: "again") == "again"


@pytest.mark.parametrize("problem", [OverflowError, MemoryError, KeyboardInterrupt])
def test_a_failure_is_not_kept(problem):
    once = Once(2)

    def fail():
        raise problem

    with pytest.raises(problem):
        once.get("a", fail)
    assert once.get("a", lambda: "done") == "done"


def test_who_waits_for_a_failure_tries_anew():
    once, begun, go = Once(2), Event(), Event()

    def fail():
        begun.set()
        assert go.wait(10)
        raise OverflowError

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once.get, "a", fail)
        assert begun.wait(10)
        other = pool.submit(once.get, "a", lambda: "done")
        go.set()
        assert other.result(10) == "done"
        assert isinstance(first.exception(10), OverflowError)


def test_a_result_may_ask_for_itself():
    once = Once(2)
    assert once.get("a", lambda: once.get("a", lambda: 1) + 1) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_fits_waits_for_nobody(monkeypatch):
    part, workload = cn.Participation(40, 10, 4), cn.workloads.sgd(40, momentum=0.4321)
    begun, go = Event(), Event()
    whole = banded_inverse.optimize

    def optimize(*given, **named):
        begun.set()
        assert go.wait(60)
        return whole(*given, **named)

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(banded_inverse, "optimize", optimize)
        first = pool.submit(cn.mechanisms.band_inv_mf, workload, part, num_bands=3)
        assert begun.wait(60)
        monkeypatch.setattr(banded_inverse, "optimize", whole)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            cn.mechanisms.band_inv_mf(workload, part, num_bands=3)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        go.set()
        first.result(60)


def test_a_mechanism_is_fitted_once_for_each_question():
    part, workload = cn.Participation(40, 10, 4), cn.workloads.sgd(40, momentum=0.5)
    fit = cn.mechanisms.band_inv_mf
    first = fit(workload, part, num_bands=4)
    assert fit(cn.workloads.sgd(40, momentum=0.5), part, num_bands=4) is first
    for other in (
        fit(workload, part, num_bands=5),
        fit(workload, part, num_bands=4, over="max"),
        fit(workload, cn.Participation(40, 20, 2), num_bands=4),
        fit(cn.workloads.sgd(40, momentum=0.6), part, num_bands=4),
    ):
        assert not np.array_equal(other.noising_coef, first.noising_coef)
    with pytest.raises(ValueError, match="read-only"):
        first.noising.numerator[0][1] = -5.0


@pytest.mark.parametrize("num_bands", [2, 4])
def test_a_workload_whose_squares_are_large_is_fitted(num_bands):
    """The fourth powers of its numbers are beyond the range of floats."""
    part, workload = cn.Participation(120, 12, 10), cn.workloads.toeplitz([1.0, 10.0] + 118 * [0.0])
    found = cn.mechanisms.band_inv_mf(workload, part, num_bands=num_bands)
    assert 0.0 < found.rmse(part) < np.inf


def test_a_workload_beyond_the_range_of_floats_is_refused():
    part = cn.Participation(40, 10, 4)
    with pytest.raises(OverflowError, match="scale the workload"):
        cn.mechanisms.band_inv_mf(cn.workloads.toeplitz(np.full(40, 1e80)), part, num_bands=4)


def test_long_bands_need_no_square_matrix(monkeypatch):
    """With as many as 20,000 of them it would take 3 GB."""
    part, workload = cn.Participation(60, 15, 4), cn.workloads.sgd(60, momentum=0.3)
    usual = cn.mechanisms.band_inv_mf(workload, part, num_bands=8)
    monkeypatch.setattr(banded_inverse, "_MOST_PRODUCTS", 0)
    banded_inverse._FITTED.clear()
    plain = cn.mechanisms.band_inv_mf(workload, part, num_bands=8)
    assert plain is not usual
    assert plain.rmse(part) == pytest.approx(usual.rmse(part), rel=1e-4)
    parameters = banded_inverse._BandedInverse(np.zeros(7), workload, "mean")
    assert parameters.directions is None
    np.testing.assert_array_equal(
        parameters.series(parameters.variables(np.arange(7.0))).numerator[0][1:], np.arange(7.0)
    )
