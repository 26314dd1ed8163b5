"""CIFAR-10 at five budgets: DP-SGD as people run it today, and three kinds of correlated noise.

    export CORRNOISE_DATA=DIR CORRNOISE_CACHE=DIR
    python benchmarks/cifar_headline.py prepare            # the plans, on any machine
    python benchmarks/cifar_headline.py run --minutes 9    # on a GPU, as often as it takes
    python benchmarks/cifar_headline.py time               # on a GPU: what a step costs alone
    python benchmarks/cifar_headline.py table [--json FILE] [--figure FILE.svg]

The model, the batches of 512 and the 10 epochs are those of the paper's table; δ = 1e-5. Plans and
finished runs are kept in CORRNOISE_CACHE, and a call that is cut off loses the runs that were under
way. The table is written from what is kept, or from a file with ``--from``.

Every method is tuned alike, one seed, on 5,000 training images that it is not trained on: 1.5, 3
and 6 times ``training.default_rate``, and beyond an end of these where that end is the best, twice
at most. Each run is evaluated with its last weights and with the average of the last tenth, and the
better one is kept. Five other seeds then train on all images and see the test set once. The search
is not part of ε.

Steps are replayed as CUDA graphs, with all images on the GPU, and several processes share it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cifar_headline_runs as runs
import cifar_headline_table as tables
from cifar_headline_runs import Case, Training, finished, plan_of
from corrnoise import _files


@dataclass(frozen=True)
class Choice:
    """What was best on the held-out images: a rung of the ladder, and which weights."""

    rung: int
    weights: str


def tuned(case: Case) -> tuple[list[Training], Choice | None, dict[int, dict[str, Any]]]:
    """What is still to be tried, the best choice when nothing is, and all that was tried."""
    rungs, found = list(range(runs.TRIED)), dict[int, dict[str, Any]]()
    while True:
        every = [Training(case, rung, -1) for rung in rungs if rung not in found]
        got = {run: finished(run.name) for run in every}
        found.update({run.rung: result for run, result in got.items() if result is not None})
        left = [run for run, result in got.items() if result is None]
        if left:
            return left, None, found
        _, best = max(
            (
                (value, Choice(rung, weights))
                for rung, result in found.items()
                for weights, value in result["accuracy"].items()
            ),
            key=lambda pair: pair[0],
        )
        if len(rungs) == runs.TRIED + runs.MORE or min(rungs) < best.rung < max(rungs):
            return [], best, found
        rungs.append(best.rung + 1 if best.rung == max(rungs) else best.rung - 1)


def final_runs(case: Case, choice: Choice) -> list[Training]:
    return [Training(case, choice.rung, seed) for seed in range(case.size.seeds)]


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
    """Run what is open, and start nothing that might not end in time."""
    began, end, longest, count = time.monotonic(), time.monotonic() + 60 * minutes, 0.0, 0
    if workers == 1:
        while left := open_runs(cases):
            told(left[0], runs.train(left[0]))
            if time.monotonic() > end:
                break
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        under_way: dict[Any, tuple[Training, float]] = {}
        while True:
            busy = {run for run, _ in under_way.values()}
            for run in open_runs(cases):
                in_time = time.monotonic() + 1.2 * longest < end
                if run not in busy and len(under_way) < workers and in_time:
                    under_way[pool.submit(runs.train, run)] = (run, time.monotonic())
            if not under_way:
                break
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                run, start = under_way.pop(done)
                longest, count = max(longest, time.monotonic() - start), count + 1
                told(run, done.result())
    passed = time.monotonic() - began
    print(f"{count} runs in {passed:.0f} s; {len(open_runs(cases))} can be started next")


def told(run: Training, result: dict[str, Any]) -> None:
    shown = ", ".join(f"{weights} {value:.2f} %" for weights, value in result["accuracy"].items())
    print(f"{run.name[:-5]}: {shown}, {result['seconds']:.1f} s", flush=True)


def row_of(case: Case) -> dict[str, Any] | None:
    """A finished case, or one with some of its seeds."""
    _, best, tried = tuned(case)
    done = [] if best is None else [finished(run.name) for run in final_runs(case, best)]
    results = [result for result in done if result is not None]
    if best is None or not results:
        return None
    plan = plan_of(case, tuning=False)
    scheme, chosen = plan.scheme, plan.chosen
    accuracies = [result["accuracy"][best.weights] for result in results]
    alone = finished(runs.time_name(case))
    return {
        "epsilon": case.epsilon,
        "method": case.method,
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
        "multiple": Training(case, best.rung, 0).multiple,
        "weights": best.weights,
        "accuracies": accuracies,
        **tables.summary(accuracies),
        "tried": [tried[rung] for rung in sorted(tried)],
        "runs": results,
    }


def result(cases: Sequence[Case]) -> dict[str, Any]:
    """All that the table and the figure need, and the settings that the cases share."""
    rows = [row for case in cases if (row := row_of(case)) is not None]
    return {
        "delta": runs.DELTA,
        "momentum": runs.MOMENTUM,
        "decay": runs.DECAY,
        "clip_norm": runs.CLIP_NORM,
        "averaged_part": runs.AVERAGED,
        "tuning_seed": runs.TUNING_SEED,
        "precision": cases[0].precision,
        "size": asdict(cases[0].size),
        "rows": sorted(rows, key=lambda row: row["epsilon"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("prepare", "run", "time", "table"))
    parser.add_argument("--minutes", type=float, default=9.0, help="start nothing later")
    parser.add_argument("--workers", type=int, default=6, help="processes that share the GPU")
    parser.add_argument(
        "--epsilon", type=float, nargs="+", choices=runs.EPSILONS, help="only these"
    )
    parser.add_argument("--precision", choices=("tf32", "bf16"), default="tf32")
    parser.add_argument("--smoke", action="store_true", help="tiny data, to see that it runs")
    parser.add_argument("--from", dest="source", type=Path, help="a file of --json, for the table")
    parser.add_argument("--json", type=Path, help="write the table's rows there")
    parser.add_argument("--figure", type=Path, help="write the figure there, as SVG")
    given = parser.parse_args(arguments)
    if given.source is None and "CORRNOISE_CACHE" not in os.environ:
        parser.error("set CORRNOISE_CACHE to a folder that keeps plans and finished runs")
    cases = [
        Case(epsilon, method, given.precision, given.smoke)
        for epsilon in given.epsilon or runs.EPSILONS
        for method in runs.METHODS
    ]
    if given.command == "prepare":
        for case in cases:
            for tuning in (True, False):
                plan = plan_of(case, tuning=tuning)
                print(
                    f"{case.epsilon:g} {case.method}, {plan.num_examples}: {plan.mechanism!r}, "
                    f"{plan.sampling.name}, noise {plan.noise_multiplier:.4g}, error "
                    f"{plan.error:.4g}",
                    flush=True,
                )
    elif given.command == "run":
        run_all(cases, given.minutes, given.workers)
    elif given.command == "time":
        for case in cases:
            found = runs.measure(case)
            print(f"{case.epsilon:g} {case.method}: {found['milliseconds']:.2f} ms a step")
    else:
        if given.source is not None:
            found = json.loads(given.source.read_text(encoding="utf-8"))
        else:
            found = result(cases)
        print(f"{tables.table(found)}\n\n{tables.about(found)}")
        if given.json:
            _files.write(given.json, json.dumps(found, indent=1) + "\n")
        if given.figure:
            tables.draw(found, given.figure)


if __name__ == "__main__":
    main()
