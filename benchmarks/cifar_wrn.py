"""CIFAR-10 from scratch with WRN-16-4: accuracy against GPU minutes, planner's choice and DP-SGD.

    export CORRNOISE_DATA=DIR CORRNOISE_CACHE=DIR        # DIR/cifar10.npz; plans and runs
    python benchmarks/cifar_wrn.py prepare               # plans, on any machine
    python benchmarks/cifar_wrn.py probe                 # views a second, on the GPU, one minute
    python benchmarks/cifar_wrn.py clean --only planner-8-3 --epochs 12 --views 4   # no noise
    python benchmarks/cifar_wrn.py tune --views 1 --minutes 9   # rates, on 45,000 pictures
    python benchmarks/cifar_wrn.py run --minutes 9 [--json FILE]   # as often as it takes
    python benchmarks/cifar_wrn.py table [--json FILE] [--figure FILE.svg]
    python benchmarks/cifar_wrn.py restore --json FILE   # a table's runs, into an empty cache

The recipe is that of De et al. (2022): weight-standardised convolutions of activations that go
through ReLU and then GroupNorm, several random crops and flips of each example in a step, an
exponential average of the weights, SGD and clip norm 1. Both methods see as many views of each
example, in batches of one size; in the shortest runs each has the better one of two. A call stops
after --minutes, a run continues from its last checkpoint in the next one, and its clock counts the
training of all calls. By default the rate is that at which the noise moves the weights as far in
every run, and an exponential average of the weights counts. ``tune`` chooses both, and the size of
batches, on 5,000 pictures that are not trained on: it tries three rates, and beyond an end of these
where that end is the best, twice at most. The search is not part of ε. The planner's workload is
that of a constant rate.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cifar_wrn_table import draw, long, table
from corrnoise import _files
from wrn_settings import (
    DELTA,
    METHODS,
    Machine,
    Recipe,
    Run,
    cache,
    default_rate,
    num_examples,
    plan_of,
    with_rate,
)
from wrn_training import AVERAGES, train

EPSILONS, MINUTES = (8.0, 4.0, 2.0, 1.0), (1, 3, 10, 30)
# Of the default rate, in the order in which they are tried, and how often one more is.
MULTIPLES, MORE = (0.5, 1.0, 0.25), 2


def recipes_of(method: str, minutes: int, epsilon: float) -> list[Recipe]:
    """What fits into the time on an H200, the same for both methods but for what the planner knows.

    In 1 minute the better one of two sizes of batches counts. For 3 minutes the planner is told of
    a memory of a tenth of the steps, and without momentum of 500 steps. In 3 minutes, 100 epochs
    with 2 views were 1 to 2.5 points below 40 epochs with 3, at ε = 8 and 4, both with momentum;
    without it the rate of 40 epochs is too high. The longer runs have none, as De et al. have it.
    In 10 minutes 8 views would fit; 3 take less than half of it, and 16 gained 1.4 points at ε = 8.
    """
    if minutes == 1:
        return [Recipe(batch, 3, 10, momentum=0.9) for batch in (1024, 4096)]
    if minutes == 3:
        recipe = Recipe(4096, 3, 40, momentum=0.9, told=0.98)
    else:
        recipe = Recipe(4096, {10: 3, 30: 16}[minutes], long(epsilon), told=0.998)
    return [recipe if method == "planner" else replace(recipe, told=None)]


SMOKE = Recipe(16, 2, 2)
COMMANDS = ("prepare", "check", "probe", "clean", "tune", "run", "table", "restore")


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def held_out(run: Run) -> dict[int, list[dict[str, Any]]]:
    """What was tried with the recipe of a run on held-out pictures, by the number of views."""
    pattern = replace(run, rate=0.0, seed=-1).folder.name.replace("-r0-", "-r*-")
    pattern = pattern.replace(f"-v{run.recipe.views}-", "-v*-")
    by_views: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(cache().glob(f"{pattern}/result.json")):
        got = result_of(path.parent)
        by_views.setdefault(got["recipe"]["views"], []).append(got)
    return by_views


def tuned(run: Run) -> tuple[Run, dict[float, float]]:
    """The run with the rate and average that are best on held-out pictures, if any was tried.

    With as many views, or else with the number of them for which most rates were tried: one view
    takes the least time.
    """
    by_views = held_out(run)
    if not by_views:
        return run, {}
    most = max(by_views, key=lambda views: len(by_views[views]))
    tried = by_views.get(run.recipe.views, by_views[most])
    best = max(tried, key=lambda got: got["accuracy"])
    return replace(run, rate=best["rate"], average=best["average"]), accuracy_by_rate(tried)


def accuracy_by_rate(tried: Sequence[dict[str, Any]]) -> dict[float, float]:
    return {got["rate"]: got["accuracy"] for got in tried}


def next_rate(found: dict[float, float], default: float) -> float | None:
    """The rate to try after those whose accuracies are known, or ``None`` where it is enough."""
    for multiple in MULTIPLES:
        if default * multiple not in found:
            return default * multiple
    best = max(found, key=found.__getitem__)
    if min(found) < best < max(found) or len(found) >= len(MULTIPLES) + MORE:
        return None
    return 2.0 * best if best == max(found) else 0.5 * best


def climb(run: Run, default: float) -> Generator[Run]:
    """The runs that tune one, each after the last has ended."""
    while True:
        tried = held_out(run).get(run.recipe.views, [])
        rate = next_rate(accuracy_by_rate(tried), default)
        if rate is None:
            return
        yield replace(run, rate=rate)


def chosen(runs: Sequence[Run], rate: float | None, average: str | None) -> list[Run]:
    """With rate and average that are given, or tuned, or else by default.

    Of those that differ in their recipe alone, the one that was best on held-out pictures. What was
    run before, and not tuned, keeps its average.
    """
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.name, run.seed), []).append(run)
    found: list[Run] = []
    for group in groups.values():
        best, tried = tuned(best_recipe(group))
        if not tried and (best.folder / "result.json").exists():  # with what was set before it
            best = replace(best, average=result_of(best.folder)["average"])
        best = best if rate is None else replace(best, rate=rate)
        found.append(best if average is None else replace(best, average=average))
    return found


def best_recipe(runs: Sequence[Run]) -> Run:
    """The run whose recipe was best on held-out pictures, or the first where that is not known.

    All are compared with the number of views for which most rates were tried: with more views a
    recipe is better, and that for which the rate was tried again with all of its views would win.
    """
    tried = [held_out(run) for run in runs]
    views = set.intersection(*map(set, tried))
    if not views:
        return runs[0]
    most = max(views, key=lambda count: min(len(each[count]) for each in tried))
    accuracies = [max(accuracy_by_rate(each[most]).values()) for each in tried]
    return runs[accuracies.index(max(accuracies))]


def results() -> list[list[dict[str, Any]]]:
    """What is finished, the seeds of one setting together."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(cache().glob("wrn-*-seed*/result.json")):
        groups.setdefault(path.parent.name.rpartition("-")[0], []).append(result_of(path.parent))
    return sorted(groups.values(), key=lambda row: (-row[0]["epsilon"], row[0]["minutes"]))


def tried() -> list[dict[str, Any]]:
    """What was tried on held-out pictures."""
    return [result_of(path.parent) for path in sorted(cache().glob("wrn-*-tune/result.json"))]


def restore(found: dict[str, Any]) -> int:
    """Keep a table's runs again, where none is kept, and say how many those are."""
    count = 0
    for got in [*itertools.chain(*found["rows"]), *found["tried"]]:
        run = Run(**{each.name: got[each.name] for each in fields(Run) if each.name != "average"})
        path = replace(run, recipe=Recipe(**got["recipe"])).folder / "result.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _files.write(path, json.dumps(got, indent=1))
            count += 1
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after them")
    parser.add_argument(
        "--only", action="append", help="METHOD-EPSILON-MINUTES, such as dp-sgd-8-10"
    )
    for name in ("batch", "views", "epochs"):
        parser.add_argument(f"--{name}", type=int, help="instead of the recipe's")
    parser.add_argument("--schedule", choices=("constant", "cosine"), help="likewise")
    for name in ("momentum", "decay", "told"):
        parser.add_argument(f"--{name}", type=float, help="likewise")
    parser.add_argument("--rate", type=float, nargs="+", help="instead of the tuned one")
    parser.add_argument(
        "--average", choices=("last", *AVERAGES), help="of the weights, instead of the tuned one"
    )
    parser.add_argument("--shown", type=int, default=6, help="how often tune shows accuracy")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=int, default=Machine.rows, help="in the model at once")
    parser.add_argument("--precision", choices=("bf16", "tf32"), default="bf16")
    parser.add_argument("--layout", choices=("last", "first"), default="last", help="of channels")
    parser.add_argument("--no-kernels", action="store_true", help="torch's operations alone")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--json", type=Path, help="the table's file; run writes it after each")
    parser.add_argument("--figure", type=Path, help="write the table's figure there, as SVG")
    given = parser.parse_args(arguments)
    if "CORRNOISE_CACHE" not in os.environ:
        parser.error("set CORRNOISE_CACHE to a folder that keeps plans and runs")
    if given.command == "restore" and given.json is None:
        parser.error("restore needs --json, the file of a table")
    machine = Machine(
        given.rows, given.precision == "bf16", given.layout == "last", not given.no_kernels
    )  # fmt: skip
    changes = {
        name: value
        for name in ("batch", "views", "epochs", "schedule", "momentum", "decay", "told")
        if (value := getattr(given, name)) is not None
    }
    runs: list[Run] = []
    for minutes, epsilon, method in itertools.product(MINUTES, EPSILONS, METHODS):
        recipes = [SMOKE] if given.smoke else recipes_of(method, minutes, epsilon)
        recipes = dict.fromkeys(replace(recipe, **changes) for recipe in recipes)
        runs += [Run(method, epsilon, minutes, recipe) for recipe in recipes]
    runs = [run for run in runs if given.only is None or run.name in given.only]
    if not runs:
        parser.error(f"--only must name a run, such as planner-8-10, got {given.only}")
    if given.command == "prepare":
        for run in runs:
            for seed in (-1, 0):
                count = num_examples(replace(run, seed=seed), given.smoke)
                plan = plan_of(run, count)
                print(
                    f"{run.name} {count}: {plan.mechanism} {plan.sampling.name}, "
                    f"noise {plan.noise_multiplier:.4g}, rate {default_rate(run, plan):g}"
                )
    elif given.command in ("check", "probe"):
        import wrn_probe

        wrn_probe.check() if given.command == "check" else wrn_probe.probe(given.minutes)
    elif given.command == "restore":
        print(f"{restore(json.loads(given.json.read_text(encoding='utf-8')))} runs")
    elif given.command == "table":
        found = kept(given.json)
        print(table(found))
        if given.figure:
            draw(found, given.figure)
    else:
        if given.command == "run":
            if given.rate is not None and len(given.rate) > 1:
                parser.error(f"run takes one --rate, got {given.rate}")
            runs = chosen(
                [with_rate(run, smoke=given.smoke) for run in runs],
                given.rate[0] if given.rate else None,
                given.average,
            )
            runs = [replace(run, seed=seed) for run in runs for seed in range(given.seeds)]
        else:
            runs = [replace(run, seed=-1) for run in runs]
            noise: dict[str, float] = {}
            if given.command == "clean":  # the rates of one ε are enough
                noise["epsilon"] = math.inf
                runs = [*{(r.method, r.minutes, r.recipe): r for r in reversed(runs)}.values()]
            runs = itertools.chain.from_iterable(
                [replace(run, rate=rate, **noise) for rate in given.rate]
                if given.rate
                else climb(replace(run, **noise), with_rate(run, smoke=given.smoke).rate)
                for run in runs
            )
        end = time.monotonic() + 60.0 * given.minutes
        execute(runs, machine, end, shown=given.shown, smoke=given.smoke, file=given.json)


def kept(file: Path | None) -> dict[str, Any]:
    """What is finished; written into a file as well, if there is one."""
    found = {"delta": DELTA, "rows": results(), "tried": tried()}
    if file is not None:
        _files.write(file, json.dumps(found, indent=1) + "\n")
    return found


def execute(
    runs: Iterable[Run],
    machine: Machine,
    end: float,
    *,
    shown: int,
    smoke: bool,
    file: Path | None = None,
) -> None:
    """One run after the other, until the time is over; the file has each as soon as it ends."""
    for run in runs:
        if time.monotonic() > end:
            print(f"{run.name} is the next to be run")
            return
        got = train(run, machine, end, shown=shown, smoke=smoke)
        if got is not None:
            rate = got["views"] / (60.0 * got["gpu_minutes"])
            print(
                f"{run.name} rate {run.rate:g} {'held out' if run.seed < 0 else 'test'}: "
                f"{got['accuracy']:.2f} % with average {got['average']}, "
                f"{got['plain_accuracy']:.2f} % last, "
                f"{got['gpu_minutes']:.2f} minutes, {rate:,.0f} views/s",
                flush=True,
            )
            if file is not None:
                kept(file)


if __name__ == "__main__":
    main()
