"""``corrnoise train``: plan, train privately, and say what was promised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corrnoise.cli import options

if TYPE_CHECKING:
    from corrnoise.planning import Plan
    from corrnoise.run import Run
    from corrnoise.torch.datasets import Data


def train(
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
    batch_size: Annotated[int, typer.Option(help="Expected examples in a batch.")] = 64,
    momentum: options.Momentum = 0.9,
    decay: options.Decay = 1.0,
    sampling: options.HowSampled = "balls-in-bins",
    mechanisms: options.Families = None,
    num_bands: Annotated[int | None, typer.Option(help="p of the banded families.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan that `corrnoise plan --save` wrote, instead.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help="Train with DP-SGD at the same ε too, for comparison.")
    ] = False,
    model: Annotated[str, typer.Option(help="auto, linear, mlp or convnet.")] = "auto",
    learning_rate: Annotated[
        float | None, typer.Option(help="From the expected error by default; worth tuning.")
    ] = None,
    clip_norm: Annotated[float, typer.Option(help="Largest norm of one gradient.")] = 1.0,
    data_path: Annotated[
        Path | None, typer.Option(help="Where the files of a named dataset lie already.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="Column of a table to predict.")] = None,
    value_range: Annotated[
        tuple[float, float] | None,
        typer.Option(help="LOW HIGH of a table's columns, chosen without looking at them."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for checkpoint, ledger, run.json and report.html; resumes."),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Key file; OUT.key by default.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Train a classifier privately.

    Plans the noise for the budget, trains, and prints accuracy and the privacy statement. With
    --out it can be interrupted and called again, and writes a report.

    \b
    Examples:
      corrnoise train --data digits --epochs 3 --epsilon 3 --mechanism bisr --sampling fixed --compare
      corrnoise train --data digits --epochs 2 --epsilon 8 --mechanism bisr --sampling fixed --json
    """
    from corrnoise.cli import terminal
    from corrnoise.torch import datasets

    if compare and key is not None:
        raise ValueError("key must be left out with --compare: each of the runs has its own")
    found = datasets.load(data, path=data_path, label=label, value_range=value_range)
    chosen = _plan(
        plan, found, epsilon, delta, epochs, batch_size, momentum, decay, sampling, mechanisms,
        num_bands,
    )  # fmt: skip
    plans = {chosen.mechanism.name: chosen}
    if compare and chosen.mechanism.name != "dp_sgd":
        # A plan from a file has a workload of its own.
        own = chosen.mechanism.workload
        plans["dp_sgd"] = _plan(
            None, found, chosen.epsilon, chosen.delta, None, chosen.batch_size,
            momentum if own.momentum is None else own.momentum,
            decay if own.decay is None else own.decay,
            chosen.sampling, ["dp_sgd"], None, steps=chosen.num_steps,
        )  # fmt: skip
    runs: list[Run] = []
    for name, each in plans.items():
        place = None if out is None else out / name if compare else out
        runs.append(
            _train(each, found, name, model, learning_rate, clip_norm, seed, device, place, key)
        )
    if out is not None:
        _write(out, runs)
    if as_json:
        terminal.print_json({"runs": [run.to_dict() for run in runs]})
        return
    rows = [
        [
            run.label,
            f"{run.plan.noise_multiplier:.4g}",
            f"{run.plan.error:.4g}",
            f"{run.settings['learning_rate']:.3g}",
            f"{100 * (run.test_accuracy or 0.0):.1f} %",
            f"{run.seconds:.0f} s",
        ]
        for run in runs
    ]
    columns = ["mechanism", "noise", "error", "rate", "accuracy", "time"]
    terminal.print_table(columns, rows, bold=0)
    terminal.console().print(runs[0].statement.to_text(), soft_wrap=True)
    if out is not None:
        terminal.console().print(f"report: {out / 'report.html'}", soft_wrap=True)


def _plan(
    path: Path | None,
    data: Data,
    epsilon: float,
    delta: float | None,
    epochs: int | None,
    batch_size: int,
    momentum: float,
    decay: float,
    sampling: options.HowSampled,
    mechanisms: list[str] | None,
    num_bands: int | None,
    steps: int | None = None,
) -> Plan:
    from corrnoise import planning
    from corrnoise.cli import terminal

    if path is not None:
        return planning.Plan.from_json(path.read_text(encoding="utf-8"))
    size = len(data.train)
    with terminal.progress("planning") as progress:
        return planning.plan(
            num_examples=size,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=0.1 / size if delta is None else delta,
            momentum=momentum,
            decay=decay,
            sampling=sampling,
            mechanisms=mechanisms,
            num_bands=num_bands,
            progress=progress,
        )


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
    from corrnoise.cli import terminal
    from corrnoise.torch import training

    with terminal.progress(f"training with {name}") as progress:
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
            progress=lambda done, total, accuracy: progress(done, total),
        )


def _write(out: Path, runs: list[Run]) -> None:
    from corrnoise import report

    for run in runs:
        name = "run.json" if len(runs) == 1 else f"run-{run.label}.json"
        (out / name).write_text(run.to_json() + "\n", encoding="utf-8")
    (out / "statement.txt").write_text(runs[0].statement.to_text(), encoding="utf-8")
    report.write(out / "report.html", runs=runs)
