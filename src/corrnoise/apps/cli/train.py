"""``corrnoise train``: plan, train privately, and print the privacy statement."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corrnoise import samplings
from corrnoise.apps.cli import options

if TYPE_CHECKING:
    from corrnoise.apps.datasets import Data
    from corrnoise.planning import Plan
    from corrnoise.records import Run

# What --compare trains too: DP-SGD with Poisson batches, the usual baseline.
_BASELINE, _BATCHES = "dp_sgd", "poisson"
# Options that a plan decides, so that they cannot be given with --plan; and their other spellings.
_OF_A_PLAN = (
    "epsilon", "delta", "epochs", "batch_size", "momentum", "decay", "sampling", "mechanisms",
    "num_bands", "memory",
)  # fmt: skip
_SPELLED = {"mechanisms": "mechanism"}
# The limits of learning rate and clip norm: in float32 their products must be finite.
_LEAST, _MOST = 1e-12, 1e12


def train(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(
            help="digits, fashion-mnist, cifar10, imdb, or a path: an .npz, a .csv, or a folder "
            "with one folder of pictures for each class."
        ),
    ] = "digits",
    epsilon: Annotated[float, typer.Option(help="ε of the budget.")] = 3.0,
    delta: Annotated[
        float | None, typer.Option(help="δ of the budget; 1/(10·examples) by default.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 20,
    batch_size: Annotated[int, typer.Option(help="Expected number of examples in a batch.")] = 64,
    momentum: options.Momentum = 0.9,
    decay: options.Decay = 1.0,
    sampling: options.SamplingName = samplings.DRAWN,
    mechanisms: options.FamilyNames = None,
    num_bands: Annotated[int | None, typer.Option(help="p of the banded families.")] = None,
    memory: options.Memory = 0.0,
    plan: Annotated[
        Path | None,
        typer.Option(help="Train by a plan that `corrnoise plan --save` wrote, and do not plan."),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            help="Also train with DP-SGD on Poisson batches at the same ε, and, where batches are "
            "secret, with the best mechanism for fixed ones."
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="auto, linear, mlp or convnet.")] = "auto",
    learning_rate: Annotated[
        float | None,
        typer.Option(help="Learning rate; derived from the expected error by default."),
    ] = None,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of one example's gradient.")] = 1.0,
    data_path: Annotated[
        Path | None, typer.Option(help="Folder that has the files of a named dataset.")
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="Column of a table to predict; the last by default.")
    ] = None,
    value_range: Annotated[
        tuple[float, float] | None,
        typer.Option(help="LOW HIGH of a table's columns; choose it without looking at the data."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for checkpoint, ledger, run.json and report.html; a run that is there "
            "is resumed."
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            help="Key file; beside OUT by default, as OUT.key, or OUT-RUN.key with --compare."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the initial weights.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Train a classifier privately.

    Plans the noise for the budget, trains, and prints the accuracy and the privacy statement. With
    --out the run can be interrupted and resumed by the same command, and a report is written.

    \b
    Examples:
      corrnoise train --data digits --epochs 3 --epsilon 3 --mechanism bisr --sampling fixed --compare
      corrnoise train --data digits --epochs 2 --epsilon 8 --mechanism bisr --sampling fixed --json
    """
    from corrnoise import _checks as checks
    from corrnoise._rounding import rounded_up
    from corrnoise.apps.cli import terminal

    if plan is not None:
        _check_left_out(context)
    if compare and key is not None:
        raise ValueError("key must be left out with --compare: each of the runs has its own")
    options.check_budget(epsilon=epsilon, delta=delta)
    options.check_sizes(num_bands=num_bands)
    options.within("clip_norm", clip_norm, _LEAST, _MOST)
    if learning_rate is not None:
        options.within("learning_rate", learning_rate, _LEAST, _MOST)
    checks.integer("seed", seed, 0, 2**64 - 1)
    with terminal.begin("loading", at_once=not as_json):
        from corrnoise.apps import datasets, models

        _check_device(device)
        checks.choice("model", model, models.MODELS)
    given = None if plan is None else _read(plan)
    with terminal.begin("loading", at_once=not as_json):
        found = datasets.load(data, path=data_path, label=label, value_range=value_range)
    models.check(model, found.shape)
    if given is not None:
        chosen = given
    else:
        size = len(found.train)
        chosen = _plan(
            at_once=not as_json,
            num_examples=size,
            batch_size=batch_size,
            epochs=epochs,
            epsilon=epsilon,
            delta=0.1 / size if delta is None else delta,
            momentum=momentum,
            decay=decay,
            sampling=sampling,
            mechanisms=mechanisms,
            num_bands=num_bands,
            memory=None if memory == math.inf else memory,
        )
    terminal.warn_of_delta(chosen.delta, chosen.num_examples)
    plans = {chosen.mechanism.name: chosen}
    if compare:
        plans |= _compared(chosen, momentum, decay)
    runs: list[Run] = []
    for name, each in plans.items():
        place, secret = (out, key) if out is None or not compare else _places(out, name)
        runs.append(
            _train(each, found, name, model, learning_rate, clip_norm, seed, device, place, secret)
        )
    if out is not None:
        _write(out, runs)
    if as_json:
        terminal.print_json({"runs": [run.to_dict() for run in runs]})
        return
    rows = [
        [
            run.label,
            run.plan.sampling.name,
            rounded_up(run.plan.noise_multiplier, 4),
            f"{run.plan.error:.4g}",
            f"{run.settings['learning_rate']:.3g}",
            f"{100 * (run.test_accuracy or 0.0):.1f} %",
            f"{run.seconds:.0f} s",
        ]
        for run in runs
    ]
    columns = ["mechanism", "batches", "noise", "error", "rate", "accuracy", "time"]
    terminal.print_table(columns, rows, bold=0)
    print("\n" + runs[0].statement.to_text())
    if out is not None:
        print(f"report: {out / 'report.html'}")


def _check_left_out(context: typer.Context) -> None:
    """Raise if options were given that the plan of a file decides."""
    given = [
        f"--{_SPELLED.get(name, name).replace('_', '-')}"
        for name in _OF_A_PLAN
        if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
    ]
    if given:
        raise ValueError(
            f"{', '.join(given)} must be left out with --plan, which decides "
            f"{'it' if len(given) == 1 else 'them'}; make another plan with `corrnoise plan`"
        )


def _places(out: Path, name: str) -> tuple[Path, Path]:
    """The folder of one of several runs, and its key file, which is beside the common folder."""
    whole = Path(os.path.abspath(out))
    return out / name, whole.with_name(f"{whole.name}-{name}.key")


def _compared(chosen: Plan, momentum: float, decay: float) -> dict[str, Plan]:
    """The plans that a chosen one is compared with, by name."""
    own = chosen.mechanism.workload
    asked: dict[str, Any] = {
        "num_examples": chosen.num_examples,
        "batch_size": chosen.batch_size,
        "num_steps": chosen.num_steps,
        "epsilon": chosen.epsilon,
        "delta": chosen.delta,
        # A plan from a file has a workload of its own.
        "momentum": momentum if own.momentum is None else own.momentum,
        "decay": decay if own.decay is None else own.decay,
    }
    found: dict[str, Plan] = {}
    whole = chosen.num_steps * chosen.batch_size >= chosen.num_examples
    sampling = _BATCHES if whole else chosen.sampling
    if not (chosen.mechanism.independent and chosen.sampling.name == str(sampling)):
        found[f"{_BASELINE}-{sampling}"] = _plan(**asked, sampling=sampling, mechanisms=[_BASELINE])
    if chosen.sampling.secret:
        fixed = _plan(**asked, sampling="fixed")
        found[f"{fixed.mechanism.name}-fixed"] = fixed
    return found


def _read(path: Path) -> Plan:
    """The plan of a file, verified before any data is loaded."""
    from corrnoise._progress import Bar
    from corrnoise.planning import Plan

    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
        with Bar("verifying the plan") as progress:
            return plan.verified(progress)
    except ValueError as problem:
        raise ValueError(
            f"plan must be a file that `corrnoise plan --save` wrote, got {path}: {problem}"
        ) from None


def _check_device(device: str) -> None:
    """Raise unless this machine has the device and a model can be trained on it."""
    import torch

    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {device!r}; use cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise ValueError(
            f"device must be one that this machine has, got {device!r}: "
            f"{str(problem).partition(chr(10))[0]}; use cpu"
        ) from None


def _plan(*, at_once: bool = False, **options: Any) -> Plan:
    from corrnoise.apps.cli import terminal

    with terminal.begin("planning", at_once=at_once) as progress:
        from corrnoise import planning

        return planning.plan(**options, progress=progress)


def _train(
    plan: Plan,
    data: Data,
    name: str,
    model: str,
    learning_rate: float | None,
    clip_norm: float,
    seed: int,
    device: str,
    folder: Path | None,
    key: Path | None,
) -> Run:
    from corrnoise._progress import Bar
    from corrnoise.apps import training
    from corrnoise.apps.cli import terminal

    try:
        with Bar(f"training with {name}") as progress:
            return training.train(
                plan,
                data,
                model=model,
                learning_rate=learning_rate,
                clip_norm=clip_norm,
                label=name,
                seed=seed,
                device=device,
                folder=folder,
                key=key,
                progress=progress,
            )
    except KeyboardInterrupt:
        raise terminal.StoppedError(_kept(folder, plan.num_steps)) from None


def _kept(folder: Path | None, num_steps: int) -> str:
    """A sentence on what an interrupted run has on disk, and how to continue it."""
    if folder is None:
        return "interrupted: nothing of the run is kept; with --out the same command would go on"
    from corrnoise.apps import training

    step = training.saved(folder)
    if step == 0:
        return f"interrupted before the first checkpoint; the same command begins {folder} again"
    return (
        f"interrupted; {folder} has a checkpoint after step {step:,} of {num_steps:,}: "
        "the same command goes on from it"
    )


def _write(out: Path, runs: list[Run]) -> None:
    from corrnoise import _files, report

    for run in runs:
        name = "run.json" if len(runs) == 1 else f"run-{run.label}.json"
        _files.write(out / name, run.to_json() + "\n")
    _files.write(out / "statement.txt", runs[0].statement.to_text())
    report.write(out / "report.html", runs=runs)
