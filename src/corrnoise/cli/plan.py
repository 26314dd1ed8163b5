"""``corrnoise plan``: from a dataset and a budget to the best mechanism."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corrnoise.cli import options

if TYPE_CHECKING:
    from corrnoise.planning import Plan


def _memory(text: str) -> float:
    try:
        return math.inf if text == "none" else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'none'.") from None


def plan(
    num_examples: Annotated[int, typer.Option(help="Size of the dataset.")],
    batch_size: Annotated[int, typer.Option(help="Expected examples in a batch.")],
    epsilon: Annotated[float, typer.Option(help="ε of the budget.")],
    delta: Annotated[float, typer.Option(help="δ of the budget.")],
    epochs: options.Epochs = None,
    steps: Annotated[int | None, typer.Option(help="Steps, instead of epochs.")] = None,
    momentum: options.Momentum = 0.0,
    decay: options.Decay = 1.0,
    sampling: options.HowSampled = "balls-in-bins",
    mechanisms: options.Families = None,
    num_bands: Annotated[int | None, typer.Option(help="p of the banded families.")] = None,
    num_parameters: Annotated[int | None, typer.Option(help="Of the model, to tell bytes.")] = None,
    memory: Annotated[
        float,
        typer.Option(
            parser=_memory,
            metavar="VECTORS",
            help="Model-sized vectors that the noise may keep; 'none' is no limit.",
        ),
    ] = 0.0,
    rounds: Annotated[int, typer.Option(help="Of ChaCha: 20, 12 or 8.")] = 20,
    failure_probability: options.FailureProbability = 1e-9,
    samples: options.Samples = None,
    seed: options.Seed = 0,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file, as JSON.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Choose the best mechanism for a budget.

    It has the least expected error at the noise that (ε, δ) asks for. Its promise is exact, a
    proven bound or certified; an alternative that is an "estimate" was only ranked. "time" is that
    of the noise in a step, relative to independent noise.

    \b
    Examples:
      corrnoise plan --num-examples 1000 --batch-size 50 --epochs 4 --epsilon 4 --delta 1e-6 --momentum 0.9 --samples 50000
      corrnoise plan --num-examples 1000 --batch-size 50 --steps 70 --epsilon 4 --delta 1e-6 --sampling fixed --memory none --json
      corrnoise plan --num-examples 1000 --batch-size 50 --epochs 4 --epsilon 4 --delta 1e-6 --mechanism bisr --num-bands 4 --save plan.json
    """
    from corrnoise import planning
    from corrnoise.cli import terminal

    terminal.check_file(save)
    with terminal.progress("planning") as progress:
        found = planning.plan(
            num_examples=num_examples,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            momentum=momentum,
            decay=decay,
            sampling=sampling,
            mechanisms=mechanisms,
            num_bands=num_bands,
            num_parameters=num_parameters,
            memory=None if memory == math.inf else memory,
            rounds=rounds,
            failure_probability=failure_probability,
            samples=samples,
            seed=seed,
            progress=progress,
        )
    if save is not None:
        save.write_text(found.to_json() + "\n", encoding="utf-8")
    if as_json:
        print(found.to_json())
    else:
        _show(found)


def _show(plan: Plan) -> None:
    from corrnoise.cli import terminal

    terminal.console().print(plan.summary, soft_wrap=True)
    rows: list[list[str]] = []
    chosen = -1
    for index, a in enumerate(plan.alternatives):
        if a.error is None or a.noise_multiplier is None or a.step_cost is None:
            rows.append([a.label, "", "", "", "", a.reason])
            continue
        rows.append(
            [
                a.label,
                f"{a.error:.4g}",
                f"{a.noise_multiplier:.4g}",
                a.kind or "",
                f"{a.step_cost:.1f}",
                a.reason,
            ]
        )
        if (a.error, a.noise_multiplier) == (plan.error, plan.noise_multiplier):
            chosen = index
    columns = ["mechanism", "error", "noise", "kind", "time", "why not"]
    terminal.print_table(columns, rows, bold=chosen)
