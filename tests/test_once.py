"""``_once``: a result is made once, whichever thread asks first."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

import corrnoise as cn
from corrnoise._once import Once


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


def test_an_error_is_kept_and_an_interrupt_is_not():
    once = Once(2)

    def fail(problem):
        raise problem

    with pytest.raises(OverflowError, match="first"):
        once.get("a", lambda: fail(OverflowError("first")))
    with pytest.raises(OverflowError, match="first"):
        once.get("a", lambda: "not asked")
    with pytest.raises(KeyboardInterrupt):
        once.get("b", lambda: fail(KeyboardInterrupt()))
    assert once.get("b", lambda: "done") == "done"


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
