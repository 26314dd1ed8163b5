"""CIFAR-10 at five budgets: DP-SGD as people run it today, and three kinds of correlated noise.

    export CORRNOISE_DATA=DIR CORRNOISE_CACHE=DIR
    python benchmarks/cifar_headline.py prepare            # the plans, on any machine
    python benchmarks/cifar_headline.py run --minutes 9    # on a GPU, as often as it takes
    python benchmarks/cifar_headline.py time               # on a GPU: what a step costs alone
    python benchmarks/cifar_headline.py table [--from FILE] [--json FILE] [--figure FILE.svg]
    python benchmarks/cifar_headline.py restore --from FILE   # a table's runs, into an empty cache

The model, the batches of 512 and the 10 epochs are those of the paper's table; δ = 1e-5. Plans and
finished runs are kept in CORRNOISE_CACHE, and a call that is cut off loses the runs that were under
way. The table is written from a file with ``--from``, and from what is kept of other rows.

Every method is tuned alike on 5,000 training images that it is not trained on: 1.5, 3 and 6 times
``training.default_rate``, and beyond an end of these where that end is the best, twice at most.
Each run is evaluated with its last weights and with the average of the last tenth, and the better
one is kept. All that comes within 1.5 points of the best is trained with a second seed, and the
mean of both decides: 5,000 images and one seed tell accuracy to about a point. Five other seeds
then train on all images and see the test set once. The search is not part of ε. Larger batches help
independent noise more than correlated noise, so DP-SGD has a second column, and the planner too,
for which the batch size is tuned as well, in the same way.

Steps are replayed as CUDA graphs, with all images on the GPU, and several processes share it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cifar_headline_runs as runs
import cifar_headline_table as tables
from cifar_headline_runs import Case, Training, finished, plan_of
from corrnoise import _files


@dataclass(frozen=True)
class Choice:
    """What was best on the held-out images: a batch size, a rung of the ladder, and weights."""

    batch: int
    rung: int
    weights: str


Tried = dict[Training, dict[str, Any]]


def climbed(case: Case, batch: int) -> tuple[list[Training], Tried]:
    """What is still to be tried with batches of one size, and what was."""
    rungs, found = list(range(runs.TRIED)), Tried()
    while True:
        every = [Training(case, batch, rung, -1) for rung in rungs]
        got = {run: finished(run.name) for run in every if run not in found}
        found.update({run: result for run, result in got.items() if result is not None})
        left = [run for run, result in got.items() if result is None]
        if left:
            return left, found
        best = best_of(found).rung
        if len(rungs) == runs.TRIED + runs.MORE or min(rungs) < best < max(rungs):
            return [], found
        rungs.append(best + 1 if best == max(rungs) else best - 1)


def best_of(found: Tried) -> Choice:
    """The first of the best, by the mean over seeds."""
    values: dict[Choice, list[float]] = {}
    for run, result in found.items():
        for weights, value in result["accuracy"].items():
            values.setdefault(Choice(run.batch, run.rung, weights), []).append(value)
    return max(values, key=lambda choice: statistics.mean(values[choice]))


def closest(found: Tried) -> list[Training]:
    """The runs that come close to the best."""
    values = {run: max(result["accuracy"].values()) for run, result in found.items()}
    return [run for run, value in values.items() if value > max(values.values()) - runs.CLOSE]


def tuned(case: Case) -> tuple[list[Training], Choice | None, Tried]:
    """What is still to be tried, the best choice when nothing is, and all that was tried."""
    left, found = list[Training](), Tried()
    for batch in case.batches:
        more, got = climbed(case, batch)
        left += more
        found |= got
    if left:
        return left, None, found
    first = closest(found)
    if len(first) == 1:
        return [], best_of(found), found
    second = {run: finished(run.name) for run in (replace(run, seed=-2) for run in first)}
    left = [run for run, result in second.items() if result is None]
    found |= {run: result for run, result in second.items() if result is not None}
    close = {run: found[run] for run in (*first, *second) if run in found}
    return left, None if left else best_of(close), found


def final_runs(case: Case, choice: Choice) -> list[Training]:
    return [Training(case, choice.batch, choice.rung, seed) for seed in range(case.size.seeds)]


def open_runs(cases: Sequence[Case]) -> list[Training]:
    """What can be run now, the first cases first."""
    found: list[Training] = []
    for case in cases:
        left, best, _ = tuned(case)
        if best is not None:
            left = [run for run in final_runs(case, best) if finished(run.name) is None]
        found += left
    return found


def run_all(cases: Sequence[Case], minutes: float, workers: int) -> None:
    """Run what is open, and start nothing that might not end in time.

    Where processes share a GPU, a run may find no room on it. The others go on then, and the next
    call tries it again.

    Raises:
        RuntimeError: at the end, where runs have failed.
    """
    began, end, longest, count = time.monotonic(), time.monotonic() + 60 * minutes, 0.0, 0
    failed: dict[str, Exception] = {}
    if workers == 1:
        while left := open_runs(cases):
            told(left[0], runs.train(left[0]))
            if time.monotonic() > end:
                break
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        under_way: dict[Any, tuple[Training, float]] = {}
        while True:
            taken = {run.name for run, _ in under_way.values()} | failed.keys()
            for run in open_runs(cases):
                in_time = time.monotonic() + 1.2 * longest < end
                if run.name not in taken and len(under_way) < workers and in_time:
                    taken.add(run.name)  # two cases can have one run
                    under_way[pool.submit(runs.train, run)] = (run, time.monotonic())
            if not under_way:
                break
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                run, start = under_way.pop(done)
                longest, count = max(longest, time.monotonic() - start), count + 1
                try:
                    told(run, done.result())
                except Exception as error:
                    failed[run.name] = error
                    print(f"{run.name[:-5]}: {type(error).__name__}", flush=True)
    passed = time.monotonic() - began
    print(f"{count} runs in {passed:.0f} s; {len(open_runs(cases))} can be started next")
    if failed:
        raise RuntimeError(f"{len(failed)} runs failed") from next(iter(failed.values()))


def told(run: Training, result: dict[str, Any]) -> None:
    shown = ", ".join(f"{weights} {value:.2f} %" for weights, value in result["accuracy"].items())
    print(f"{run.name[:-5]}: {shown}, {result['seconds']:.1f} s", flush=True)


def row_of(case: Case, known: dict[tuple[float, str], dict[str, Any]]) -> dict[str, Any] | None:
    """A finished case, or one with some of its seeds, or what is known of it with all of them."""
    whole = {name: row for name, row in known.items() if len(row["runs"]) == case.size.seeds}
    old = whole.get((case.epsilon, case.label))
    _, best, tried = tuned(case)
    done = [] if best is None else [finished(run.name) for run in final_runs(case, best)]
    results = [result for result in done if result is not None]
    if best is None or len(results) < (1 if old is None else case.size.seeds):
        return old
    every = [tried[run] for run in sorted(tried, key=lambda run: (run.batch, run.rung, -run.seed))]
    for row in (old, whole.get((case.epsilon, case.method))):
        if row is not None and made_by(row, results, best.weights):
            return {**row, "method": case.label, "tried": every}
    plan = plan_of(case, best.batch, tuning=False)
    scheme, chosen = plan.scheme, plan.chosen
    accuracies = [result["accuracy"][best.weights] for result in results]
    first = final_runs(case, best)[0]
    alone = finished(first.time_name)
    return {
        "epsilon": case.epsilon,
        "method": case.label,
        "mechanism": repr(plan.mechanism),
        "sampling": plan.sampling.name,
        "noise_multiplier": plan.noise_multiplier,
        "kind": plan.calibration.kind,
        "expected_error": plan.error,
        "steps": plan.num_steps,
        "cost": {
            "vectors_stored": scheme.num_vectors,
            "bytes_stored": scheme.state_bytes(results[0]["num_parameters"]),
            "draws_per_step": scheme.draws_per_step,
            "noise_relative_to_dp_sgd": None if chosen is None else chosen.step_cost,
            "alone": alone,
        },
        "batch": best.batch,
        "multiple": first.multiple,
        "weights": best.weights,
        "accuracies": accuracies,
        **tables.summary(accuracies),
        "tried": every,
        "runs": results,
    }


def made_by(row: dict[str, Any], results: Sequence[dict[str, Any]], weights: str) -> bool:
    """Whether a row is of these runs; its plan is theirs, and another one might have been made."""
    names = ("batch", "rung", "seed", "accuracy")
    of_row, of_runs = ([[run[n] for n in names] for run in some] for some in (row["runs"], results))
    return row["weights"] == weights and of_row == of_runs


def result(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that the table and the figure need, and the settings that the cases share.

    Args:
        cases: of the table.
        rows: that are known. One with all its seeds stays until another choice is the best, and
            has all its seeds too.
    """
    known = {(row["epsilon"], row["method"]): row for row in rows}
    found = dict(known)
    for case in cases:
        row = row_of(case, known)
        if row is not None:
            found[case.epsilon, case.label] = row
    return {
        "delta": runs.DELTA,
        "momentum": runs.MOMENTUM,
        "decay": runs.DECAY,
        "clip_norm": runs.CLIP_NORM,
        "averaged_part": runs.AVERAGED,
        "tuning_seeds": runs.TUNING_SEEDS,
        "close": runs.CLOSE,
        "precision": cases[0].precision,
        "size": asdict(cases[0].size),
        "rows": sorted(found.values(), key=tables.place),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "run", "time", "table", "restore"))
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing later")
    parser.add_argument("--workers", type=int, default=6, help="processes that share the GPU")
    parser.add_argument(
        "--epsilon", type=float, nargs="+", choices=runs.EPSILONS, help="only these"
    )
    parser.add_argument("--precision", choices=("tf32", "bf16"), default="tf32")
    parser.add_argument("--smoke", action="store_true", help="tiny data, to see that it runs")
    parser.add_argument("--method", nargs="+", choices=tables.COLUMNS, help="only these")
    parser.add_argument("--from", dest="source", type=Path, help="a file of --json, of known rows")
    parser.add_argument("--json", type=Path, help="write the table's rows there")
    parser.add_argument("--figure", type=Path, help="write the figure there, as SVG")
    given = parser.parse_args(arguments)
    source = json.loads(given.source.read_text(encoding="utf-8")) if given.source else None
    if "CORRNOISE_CACHE" not in os.environ and (source is None or given.command != "table"):
        parser.error("set CORRNOISE_CACHE to a folder that keeps plans and finished runs")
    if source is not None and source["precision"] != given.precision:
        parser.error(f"--precision must be that of the file, {source['precision']}")
    if given.command == "restore" and source is None:
        parser.error("restore needs --from, the file of a table")
    cases = [
        case
        for epsilon in given.epsilon or runs.EPSILONS
        for best_batch in (False, True)
        for method in runs.METHODS
        if (case := Case(epsilon, method, best_batch, given.precision, given.smoke)).label
        in (given.method or tables.COLUMNS)
    ]
    if given.command == "prepare":
        for case, tuning in itertools.product(cases, (True, False)):
            for batch in case.batches:
                plan = plan_of(case, batch, tuning=tuning)
                print(
                    f"{case.epsilon:g} {case.label}, {plan.num_examples} by {batch}: "
                    f"{plan.mechanism!r}, {plan.sampling.name}, noise {plan.noise_multiplier:.4g}, "
                    f"error {plan.error:.4g}",
                    flush=True,
                )
    elif given.command == "run":
        run_all(cases, given.minutes, given.workers)
    elif given.command == "time":
        for case in cases:
            _, best, _ = tuned(case)
            if best is None:
                print(f"{case.epsilon:g} {case.label} is still to be tuned")
            else:
                found = runs.measure(final_runs(case, best)[0])
                print(f"{case.epsilon:g} {case.label}: {found['milliseconds']:.2f} ms a step")
    elif given.command == "restore":
        every = {(case.epsilon, case.label): case for case in cases}
        rows = [(row, every.get((row["epsilon"], row["method"]))) for row in source["rows"]]
        print(f"{sum(runs.restore(row, case) for row, case in rows if case is not None)} runs")
    else:
        if source is not None and "CORRNOISE_CACHE" not in os.environ:
            found = source
        else:
            found = result(cases, [] if source is None else source["rows"])
        print(f"{tables.table(found)}\n\n{tables.about(found)}")
        if given.json:
            _files.write(given.json, json.dumps(found, indent=1) + "\n")
        if given.figure:
            tables.draw(found, given.figure)


if __name__ == "__main__":
    main()
