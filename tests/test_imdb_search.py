"""``benchmarks/imdb_adamw.py``: how learning rate, clip norm and schedule are searched for."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
NAMES = ("imdb_adamw", "imdb_table", "cifar_headline_runs")


@pytest.fixture(scope="module")
def imdb():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module(NAMES[0])
    for name in NAMES:
        sys.modules.pop(name, None)


def search(imdb, accuracy, at_once=100):
    """All runs of a search where ``accuracy`` tells what a run reaches, and its choice."""
    done, case = {}, imdb.Case(9.0, "full", "AdamW, planner's choice")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            imdb, "finished", lambda run: {"accuracy": done[run]} if run in done else None
        )
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


def test_a_table_can_be_restored_into_an_empty_cache(imdb, tmp_path, monkeypatch):
    monkeypatch.setenv("CORRNOISE_CACHE", str(tmp_path))
    rows = json.loads((ROOT / "benchmarks" / "imdb-adamw.json").read_text())["rows"]
    cases = [imdb.Case(row["epsilon"], row["part"], row["method"]) for row in rows]
    assert imdb.restore(rows, cases[:1]) == len(rows[0]["tried"]) + len(rows[0]["runs"])
    assert imdb.restore(rows, cases) > 0
    assert imdb.restore(rows, cases) == 0
    assert not imdb.open_runs(cases)

    def in_order(row):
        return {**row, "tried": sorted(row["tried"], key=json.dumps)}

    assert list(map(in_order, imdb.results(cases))) == list(map(in_order, rows))


def test_the_page_on_adam_says_what_was_measured():
    """By at least one point at ε = 9 and 2, and by how much."""
    rows = json.loads((ROOT / "benchmarks" / "imdb-adamw.json").read_text())["rows"]
    mean = {
        (row["epsilon"], row["part"], row["method"]): statistics.mean(
            run["accuracy"] for run in row["runs"]
        )
        for row in rows
    }
    assert all(len(row["runs"]) == 3 for row in rows)
    gains = {
        key: accuracy - mean[(*key[:2], key[2].partition(",")[0] + ", DP-SGD Poisson")]
        for key, accuracy in mean.items()
        if "planner" in key[2]
    }
    clear = [gain for (epsilon, part, _), gain in gains.items() if epsilon > 1 or part == "lora"]
    equal = [gain for (epsilon, part, _), gain in gains.items() if epsilon < 1 and part == "full"]
    assert (len(clear), len(equal)) == (7, 2)
    assert min(clear) >= 1.0
    assert max(map(abs, equal)) <= 0.3
    text = " ".join((ROOT / "docs" / "adam.md").read_text("utf-8").split())
    said = f"planner's choice is {min(clear):.1f} to {max(clear):.1f} points above DP-SGD"
    assert said in text
