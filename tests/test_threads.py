"""How many threads work, and when they stop."""

import os
import threading

import pytest

from corrnoise._threads import pool, processors


def test_processors_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert processors() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert processors() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert processors() == 1


def test_nothing_is_begun_after_an_interruption():
    """Else Ctrl-C would wait for all candidates of a plan."""
    begun, go = [], threading.Event()

    def work(number):
        begun.append(number)
        go.wait(10.0)

    def interrupted():
        with pool() as threads:
            for number in range(50 * processors()):
                threads.submit(work, number)
            threading.Timer(0.2, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(begun) <= processors()
    with pool() as threads:
        assert list(threads.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
