"""``benchmarks/cifar_headline.py``: every method tuned alike; it resumes, and writes its table."""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")
NAMES = ("cifar_headline", "cifar_headline_runs", "cifar_headline_table")


@pytest.fixture
def headline(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    monkeypatch.setenv("CORRNOISE_CACHE", str(tmp_path / "cache"))
    yield importlib.import_module(NAMES[0])
    for name in NAMES:
        sys.modules.pop(name, None)


def tried(headline, accuracies):
    """A case whose runs end with these accuracies, and how many of them were asked for."""
    asked = set()

    def finished(name):
        for rung, (last, averaged) in accuracies.items():
            if name.endswith(f"rung {rung + 10} seed tuning.json"):
                asked.add(rung)
                return {"accuracy": {"last": last, "averaged": averaged}}
        return None

    headline.finished = finished
    return headline.runs.Case(2.0, "planner's choice"), asked


def test_the_ladder_goes_on_beyond_an_end_that_is_the_best_twice_at_most(headline):
    rising = {rung: (10.0 + 2 * rung, 9.0) for rung in range(-5, 9)}
    case, asked = tried(headline, rising)
    left, best, _ = headline.tuned(case)
    assert (left, best, asked) == ([], headline.Choice(512, 4, "last"), {0, 1, 2, 3, 4})
    falling = {rung: (9.0, 10.0 - 2 * rung) for rung in range(-5, 9)}
    case, asked = tried(headline, falling)
    assert headline.tuned(case)[1] == headline.Choice(512, -2, "averaged")
    assert asked == {-2, -1, 0, 1, 2}


def test_the_best_rate_and_weights_are_those_of_the_held_out_images(headline):
    case, asked = tried(headline, {0: (50.0, 51.0), 1: (54.6, 52.0), 2: (0.0, 53.0)})
    assert headline.tuned(case)[1] == headline.Choice(512, 1, "last")
    assert asked == {0, 1, 2}
    case, _ = tried(headline, {0: (50.0, 51.0), 2: (0.0, 53.0)})
    left, best, _ = headline.tuned(case)
    assert best is None
    assert [(run.rung, run.seed) for run in left] == [(1, -1)]
    assert math.isclose(left[0].multiple, 3.0)


def test_what_is_close_to_the_best_is_tried_again_and_the_mean_decides(headline):
    first = {0: (50.0, 51.0), 1: (54.0, 52.0), 2: (0.0, 53.0)}
    case, _ = tried(headline, first)
    once = headline.finished
    left, best, found = headline.tuned(case)
    assert best is None
    assert [(run.rung, run.seed) for run in left] == [(1, -2), (2, -2)]
    assert sorted(run.rung for run in found) == [0, 1, 2]
    again = {1: (50.0, 51.0)}

    def finished(name):
        for rung, (last, averaged) in again.items():
            if f"rung {rung + 10} seed tuning again" in name:
                return {"accuracy": {"last": last, "averaged": averaged}}
        return once(name)

    headline.finished = finished
    left, best, found = headline.tuned(case)
    assert best is None
    assert [(run.rung, run.seed) for run in left] == [(2, -2)]
    assert len(found) == 4
    for averaged, wanted in ((50.9, (1, "last")), (51.1, (2, "averaged"))):
        again[2] = 60.0 * (averaged > 51.0), averaged
        left, best, found = headline.tuned(case)
        assert (left, best) == ([], headline.Choice(512, *wanted))
        assert len(found) == 5
    seeds = [run.seed for run in found]
    assert (seeds.count(-1), seeds.count(-2)) == (3, 2)
    # One seed of an accuracy that is not close counts for nothing.
    first[0] = (52.5, 52.5)
    assert headline.tuned(case)[1] == headline.Choice(512, 2, "averaged")


def test_batch_sizes_are_tuned_where_the_best_is_looked_for(headline):
    accuracies = {512: 50.0, 1024: 60.0, 2048: 62.0, 4096: 52.0, 8192: 60.5}

    def finished(name):
        batch = next(size for size in accuracies if f"batch {size} " in name)
        return {"accuracy": {"last": accuracies[batch] - (0 if "rung 11" in name else 5)}}

    headline.finished = finished
    runs = headline.runs
    left, best, tried = headline.tuned(runs.Case(2.0, runs.BASE, best_batch=True))
    assert (left, best) == ([], headline.Choice(2048, 1, "last"))
    assert {run.batch for run in tried} == set(accuracies)
    assert len(tried) == 15
    # Batches of the first size are the same runs for both columns of DP-SGD.
    both = [runs.Training(runs.Case(2.0, runs.BASE, best), 512, 0, -1) for best in (False, True)]
    assert both[0].name == both[1].name
    assert headline.tuned(runs.Case(2.0, runs.BASE))[1] == headline.Choice(512, 1, "last")


def test_a_small_run_is_prepared_resumed_and_written(headline, tmp_path, capsys, monkeypatch):
    small = ["--smoke", "--epsilon", "9"]
    headline.main(["prepare", *small])
    assert capsys.readouterr().out.count("\n") == 16
    calls = []
    made = headline.runs._train

    def counted(run, device):
        calls.append(run)
        return made(run, device)

    monkeypatch.setattr(headline.runs, "_train", counted)
    headline.main(["run", "--workers", "1", *small])
    finals = [run for run in calls if run.seed >= 0]
    # Two columns of a method share the runs of the smaller batches.
    larger = {run.case.method for run in finals if run.batch > 12}
    assert len(finals) == 8 + 2 * len(larger)
    assert len({run.name for run in calls}) == len(calls) == len(set(calls))
    assert all(run.case.epsilon == 9.0 for run in calls)
    # A run that was under way when the process ended is all that is run again.
    (lost,) = (tmp_path / "cache").glob("headline-run-9-bisr*seed-1.json")
    lost.unlink()
    calls.clear()
    headline.main(["run", "--workers", "1", *small])
    assert [(run.case.method[:4], run.seed) for run in calls] == [("BISR", 1)]
    headline.main(["time", *small])
    capsys.readouterr()

    file, picture = tmp_path / "rows.json", tmp_path / "figure.svg"
    headline.main(["table", *small, "--json", str(file), "--figure", str(picture)])
    shown = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [row["method"] for row in found["rows"]] == list(headline.tables.COLUMNS)
    for row in found["rows"]:
        accuracies = [run["accuracy"][row["weights"]] for run in row["runs"]]
        assert [run["seed"] for run in row["runs"]] == [0, 1]
        assert math.isclose(row["mean"], statistics.mean(accuracies))
        assert math.isclose(row["standard_error"], statistics.stdev(accuracies) / math.sqrt(2))
        by_seed = {-1: {}, -2: {}}
        for run in row["tried"]:
            by_seed[run["seed"]][run["batch"], run["rung"]] = run["accuracy"]
        once = {chosen: max(values.values()) for chosen, values in by_seed[-1].items()}
        close = {chosen for chosen, value in once.items() if value > max(once.values()) - 1.5}
        assert set(by_seed[-2]) == (close if len(close) > 1 else set())
        both = {
            (*chosen, kind): value + by_seed[-2].get(chosen, by_seed[-1][chosen])[kind]
            for chosen in close
            for kind, value in by_seed[-1][chosen].items()
        }
        won = both[row["batch"], row["runs"][0]["rung"], row["weights"]]
        assert math.isclose(won, max(both.values()))
        assert row["cost"]["alone"]["milliseconds"] > 0
        assert f"{row['mean']:.1f} ± {row['standard_error']:.1f}" in shown
    assert "not part of ε" in shown
    names = {node.get("id", "") for node in ET.parse(picture).getroot().iter()}
    assert sum(name.startswith("LineCollection") for name in names) == 12  # the legend too

    # What the file has stays, whatever is kept; the runs can be kept again.
    headline.main(["table", *small, "--from", str(file), "--json", str(tmp_path / "same.json")])
    assert (tmp_path / "same.json").read_text() == file.read_text()
    monkeypatch.setenv("CORRNOISE_CACHE", str(tmp_path / "other"))
    headline.main(["restore", *small, "--from", str(file)])
    capsys.readouterr()
    calls.clear()
    headline.main(["run", "--workers", "1", *small])
    assert calls == []
    capsys.readouterr()

    # A part of the table is computed again, with rows that had too few seeds.
    known = json.loads(file.read_text())["rows"]
    known[2]["runs"] = known[2]["runs"][:1]
    cases = [headline.runs.Case(9.0, "BISR p = 4, balls-in-bins", smoke=True)]
    again = headline.result(cases, known)["rows"]
    assert [row["method"] for row in again] == list(headline.tables.COLUMNS)
    assert [len(row["runs"]) for row in again] == [2] * 6

    # A row keeps its plan while its runs are those of the best choice, and gives way to another
    # choice once all seeds of that are there.
    cases = [headline.runs.Case(9.0, headline.runs.BASE, smoke=True)]
    known[0] |= {"noise_multiplier": -1.0}
    assert headline.result(cases, known)["rows"][0]["noise_multiplier"] == -1.0
    own = known[0]["runs"]
    for change in ({"rung": 9}, {"batch": 13}, {"accuracy": {"last": 0.0, "averaged": 0.0}}):
        known[0]["runs"] = [{**run, **change} for run in own]
        assert headline.result(cases, known)["rows"][0]["noise_multiplier"] > 0.0
    for path in (tmp_path / "other").glob("headline-run-9-dp-sgd*seed-1.json"):
        path.unlink()
    assert headline.result(cases, known)["rows"][0]["noise_multiplier"] == -1.0

    # The same table and picture from the file, without the runs.
    monkeypatch.delenv("CORRNOISE_CACHE")
    again = tmp_path / "again.svg"
    headline.main(["table", "--from", str(file), "--figure", str(again)])
    assert capsys.readouterr().out == shown
    assert again.read_bytes() == picture.read_bytes()


def test_a_run_that_fails_leaves_the_others_and_is_tried_again_by_the_next_call(
    headline, monkeypatch, capsys
):
    made, lost, begun = headline.runs._train, [], []

    def once(run, device):
        begun.append(run.name)
        if run.rung == 1 and not lost:
            lost.append(run.name)
            raise MemoryError("no room on the GPU")
        return made(run, device)

    monkeypatch.setattr(headline.runs, "_train", once)
    monkeypatch.setattr(
        headline, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(1)
    )
    names = ["planner's choice", "planner's choice, best batch"]
    small = ["--smoke", "--epsilon", "9", "--method", *names, "--workers", "2"]
    with pytest.raises(RuntimeError, match="1 runs failed") as failure:
        headline.main(["run", *small])
    assert isinstance(failure.value.__cause__, MemoryError)
    assert "rung 11 seed tuning: MemoryError" in capsys.readouterr().out
    case = headline.runs.Case(9.0, "planner's choice", smoke=True)
    assert [run.name for run in headline.tuned(case)[0]] == lost
    headline.main(["run", *small])
    assert headline.open_runs([case]) == []
    # Two columns have one run for each rate of the smaller batches.
    assert sorted(begun) == sorted([*set(begun), *lost])


def test_a_rate_that_is_too_large_is_a_result_and_not_an_error(headline, monkeypatch):
    runs = headline.runs
    run = runs.Training(runs.Case(9.0, "planner's choice", smoke=True), 12, 0, -1)
    monkeypatch.setattr(runs.training, "default_rate", lambda *_: 1e38)
    found = runs.train(run)
    assert found["accuracy"] == {"last": 0.0, "averaged": 0.0}
    assert found["steps"] < runs.plan_of(run.case, 12, tuning=True).num_steps


def test_a_captured_step_has_room_for_most_random_batches(headline):
    runs = headline.runs
    plan = runs.plan_of(runs.Case(9.0, "planner's choice", smoke=True), 12, tuning=False)
    size = runs.graph_size(plan)
    work = {m: m * (1 + runs.binom.sf(m, 120, 0.1)) for m in range(12, 40)}
    assert size == min(work, key=work.__getitem__) > plan.expected_batch
