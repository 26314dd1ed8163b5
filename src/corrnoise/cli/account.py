"""``corrnoise account``: ε, δ and noise; two of them give the third."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from corrnoise.cli import options

if TYPE_CHECKING:
    from corrnoise.accounting import Calibration


def _size(text: str) -> int | Literal["best"]:
    if text == "best":
        return "best"
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither an integer nor 'best'.") from None


def account(
    mechanism: options.Family,
    num_bands: Annotated[
        str | None, typer.Option(help="p of a banded family; 'best' for bisr.")
    ] = None,
    num_buffers: Annotated[int | None, typer.Option(help="Of blt.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Standard deviation of the noise over the clip norm.")
    ] = None,
    num_examples: options.NumExamples = None,
    batch_size: options.BatchSize = None,
    epochs: options.Epochs = None,
    num_steps: options.NumSteps = None,
    min_sep: options.MinSep = None,
    max_participations: options.MaxParticipations = None,
    momentum: options.Momentum = 0.0,
    decay: options.Decay = 1.0,
    sampling: options.HowSampled = "fixed",
    failure_probability: options.FailureProbability = 1e-9,
    samples: options.Samples = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Find the noise, ε or δ of a run.

    Give two of --epsilon, --delta and --noise-multiplier, get the third. The mechanism is priced with the float32 coefficients that run.

    \b
    Examples:
      corrnoise account --mechanism bisr --num-bands 4 --num-steps 980 --min-sep 98 --epsilon 9 --delta 1e-5
      corrnoise account --mechanism dp_sgd --num-examples 1000 --batch-size 50 --epochs 5 --noise-multiplier 2 --delta 1e-5 --sampling balls-in-bins --json
      corrnoise account --mechanism bsr --num-bands 8 --num-steps 100 --max-participations 4 --noise-multiplier 2 --epsilon 3 --sampling cyclic-poisson
    """
    from corrnoise import accounting, mechanisms, workloads
    from corrnoise.cli import terminal
    from corrnoise.noise.filters import Filter

    if [epsilon, delta, noise_multiplier].count(None) != 1:
        raise ValueError(
            "exactly two of epsilon, delta and noise-multiplier must be given, got "
            f"{3 - [epsilon, delta, noise_multiplier].count(None)}; the third is found"
        )
    part = options.participation(
        num_examples=num_examples,
        batch_size=batch_size,
        epochs=epochs,
        num_steps=num_steps,
        min_sep=min_sep,
        max_participations=max_participations,
        sampling=sampling,
    )
    workload = workloads.sgd(part.num_steps, momentum=momentum, decay=decay)
    size = num_buffers if mechanism == "blt" else None if num_bands is None else _size(num_bands)
    built = Filter.of(mechanisms.build(mechanism, workload, part, size)).realized
    with terminal.progress("certifying") as progress:
        if noise_multiplier is None:
            assert epsilon is not None
            assert delta is not None
            found = accounting.calibrate(
                built,
                part,
                epsilon=epsilon,
                delta=delta,
                sampling=sampling,
                failure_probability=failure_probability,
                samples=samples,
                seed=seed,
                progress=progress,
            )
        else:
            found = accounting.account(
                built,
                part,
                noise_multiplier=noise_multiplier,
                epsilon=epsilon,
                delta=delta,
                sampling=sampling,
                failure_probability=failure_probability,
                samples=samples,
                seed=seed,
                progress=progress,
            )
    if as_json:
        terminal.print_json({"error": found.rmse(), **found.to_dict()})
    else:
        _show(found)


def _show(found: Calibration) -> None:
    from corrnoise.cli import terminal

    part = found.participation
    how = found.kind
    if found.kind == "certified":
        how += f" but for probability {found.failure_probability:g}"
    facts = {
        "mechanism": repr(found.mechanism),
        "participation": f"{part.num_steps} steps; an example at most "
        f"{part.max_participations} times, {part.min_sep} steps apart; {found.sampling}",
        "epsilon": f"{found.epsilon:.6g}",
        "delta": f"{found.delta:.6g}",
        "noise multiplier": f"{found.noise_multiplier:.6g}",
        "kind": f"{how}; unit: one {found.unit}, {found.neighbours}",
        "error": f"{found.rmse():.6g} per unit of clip norm",
    }
    if found.epsilon_without_sampling is not None:
        facts["surely"] = f"epsilon {found.epsilon_without_sampling:.6g} at this noise and delta"
    terminal.print_facts(facts)
