"""``benchmarks/imdb_adamw.py``: how learning rate, clip norm and schedule are searched for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
NAMES = ("imdb_adamw", "imdb_table", "cifar_headline_runs")


@pytest.fixture(scope="module")
def imdb():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module(NAMES[0])
    for name in NAMES:
        sys.modules.pop(name, None)


def search(imdb, accuracy, at_once=100):
    """All runs of a search where ``accuracy`` tells what a run reaches, and its choice."""
    done, case = {}, imdb.Case(9.0, "full", "AdamW, planner's choice")
    imdb.finished = lambda run: {"accuracy": done[run]} if run in done else None
    while True:
        left, best, found = imdb.tuned(case)
        if best is not None:
            assert not left
            assert found == done
            return done, best
        assert left
        assert not done.keys() & set(left)
        done.update({run: accuracy(run) for run in left[:at_once]})


@given(
    peak=st.floats(-4.0, 9.0),
    clip_norm=st.sampled_from([0.1, 1.0, 10.0]),
    stays=st.floats(-2.0, 2.0),
    at_once=st.integers(1, 4),
)
def test_the_search_finds_the_top_of_one_hill_and_can_be_interrupted(
    imdb, peak, clip_norm, stays, at_once
):
    def accuracy(run):
        kept = run.schedule == imdb.STAYS
        way = run.rate + kept  # a rate that stays moves the weights twice as far
        return -abs(way - peak) - 10.0 * (run.clip_norm != clip_norm) + stays * kept

    runs, best = search(imdb, accuracy, at_once)
    assert (runs, best) == search(imdb, accuracy)
    low, high = imdb.ENDS
    assert best.clip_norm == clip_norm
    assert abs(best.rate + (best.schedule == imdb.STAYS) - min(max(peak, low), high)) <= 0.51
    assert (best.schedule == imdb.STAYS) == (stays > 0) or abs(stays) <= 0.51
    assert accuracy(best) == max(runs.values())
    assert len(runs) <= imdb.ENDS[1] - imdb.ENDS[0] + 1 + 2 + 3 + 2


def test_a_second_seed_decides_between_the_two_best(imdb):
    def accuracy(run):
        lucky = (run.rate, run.schedule, run.seed) == (2, imdb.STAYS, -1)
        return -abs(run.rate - 3.0) + 3.0 * lucky - (run.schedule == imdb.STAYS)

    runs, best = search(imdb, accuracy)
    assert max(runs, key=runs.__getitem__).rate == 2
    assert (best.rate, best.seed) == (3, -1)
    assert sum(run.seed == -2 for run in runs) == 2


def test_names_of_runs_differ(imdb):
    runs, _ = search(imdb, lambda run: -abs(run.rate - 3.4))
    assert len({run.name for run in runs}) == len(runs)
