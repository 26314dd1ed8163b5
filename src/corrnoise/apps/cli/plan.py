"""``corrnoise plan``: from a dataset and a budget to the best mechanism."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from corrnoise import samplings
from corrnoise.apps.cli import options


def plan(
    num_examples: Annotated[int, typer.Option(help="Size of the dataset.")],
    batch_size: Annotated[int, typer.Option(help="Expected number of examples in a batch.")],
    epsilon: Annotated[float, typer.Option(help="ε of the budget.")],
    delta: Annotated[float, typer.Option(help="δ of the budget.")],
    epochs: options.Epochs = None,
    num_steps: Annotated[
        int | None, typer.Option(help="n, the number of steps, instead of epochs.")
    ] = None,
    momentum: options.Momentum = 0.0,
    decay: options.Decay = 1.0,
    sampling: options.SamplingOrBest = samplings.BEST,
    allow: options.SamplingNames = None,
    mechanisms: options.FamilyNames = None,
    num_bands: Annotated[int | None, typer.Option(help="p of the banded families.")] = None,
    num_parameters: Annotated[
        int | None, typer.Option(help="Size of the model, to show the memory in bytes.")
    ] = None,
    memory: options.Memory = 0.0,
    rounds: Annotated[int, typer.Option(help="Rounds of ChaCha: 20, 12 or 8.")] = 20,
    failure_probability: options.FailureProbability = 1e-9,
    samples: options.Samples = None,
    seed: options.Seed = 0,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file, as JSON.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Choose the best sampling and mechanism for a budget.

    They have the least expected error at the noise that (ε, δ) requires; errors within 0.1 % count
    as equal, and the cheaper mechanism is taken. The table has the best of each sampling and
    everything that was considered for the chosen one. The guarantee is exact, a proven bound or
    certified; an alternative marked "estimate" was ranked and not certified. "time" is the time of
    the noise in a step, relative to independent noise. Printed noise multipliers are rounded up,
    toward privacy; --json has every digit.

    \b
    Examples:
      corrnoise plan --num-examples 1000 --batch-size 50 --epochs 4 --epsilon 4 --delta 1e-6 --momentum 0.9 --samples 50000
      corrnoise plan --num-examples 1000 --batch-size 50 --num-steps 70 --epsilon 4 --delta 1e-6 --sampling fixed --memory none --json
      corrnoise plan --num-examples 1000 --batch-size 50 --epochs 4 --epsilon 4 --delta 1e-6 --mechanism bisr --num-bands 4 --save plan.json
    """
    from corrnoise.apps.cli import terminal

    terminal.check_file(save)
    options.check_budget(epsilon=epsilon, delta=delta)
    options.check_sizes(num_bands=num_bands)
    with terminal.begin("planning", at_once=not as_json) as progress:
        from corrnoise import _files, planning

        found = planning.plan(
            num_examples=num_examples,
            batch_size=batch_size,
            epochs=epochs,
            num_steps=num_steps,
            epsilon=epsilon,
            delta=delta,
            momentum=momentum,
            decay=decay,
            sampling=sampling,
            allow=allow,
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
    terminal.warn_of_delta(delta, num_examples)
    if save is not None:
        _files.write(save, found.to_json() + "\n")
    if as_json:
        print(found.to_json())
    else:
        terminal.print_summary(found.summary + "\n")
        terminal.print_text(
            found.table(), bold=found.shown.index(found.chosen) if found.chosen else None
        )
