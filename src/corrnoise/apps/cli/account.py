"""``corrnoise account``: given two of ε, δ and noise, compute the third."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from corrnoise import _checks as checks
from corrnoise import mechanisms, samplings
from corrnoise._rounding import counted, rounded_up
from corrnoise.apps.cli import options
from corrnoise.mechanisms.registry import Size

if TYPE_CHECKING:
    from corrnoise.samplings import Calibration


def account(
    mechanism: options.FamilyName,
    num_bands: Annotated[
        str | None, typer.Option(help="p of a banded family; 'best' for bisr.")
    ] = None,
    num_buffers: Annotated[int | None, typer.Option(help="Number of buffers of blt.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="ε; leave it out to compute it.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ; leave it out to compute it.")] = None,
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
    sampling: options.SamplingName = samplings.ASSUMED,
    failure_probability: options.FailureProbability = 1e-9,
    samples: options.Samples = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Find the noise, ε or δ of a run.

    Give two of --epsilon, --delta and --noise-multiplier; the third is found. The mechanism is priced with the float32 coefficients that run. Printed numbers are rounded up, toward privacy; --json has every digit.

    \b
    Examples:
      corrnoise account --mechanism bisr --num-bands 4 --num-steps 980 --min-sep 98 --epsilon 9 --delta 1e-5
      corrnoise account --mechanism dp_sgd --num-examples 1000 --batch-size 50 --epochs 5 --noise-multiplier 2 --delta 1e-5 --sampling balls-in-bins --json
      corrnoise account --mechanism bsr --num-bands 8 --num-steps 100 --max-participations 4 --noise-multiplier 2 --epsilon 3 --sampling cyclic-poisson
    """
    from corrnoise import workloads
    from corrnoise._progress import Bar
    from corrnoise.apps.cli import terminal

    given = 3 - [epsilon, delta, noise_multiplier].count(None)
    if given != 2:
        raise ValueError(
            "exactly two of epsilon, delta and noise-multiplier must be given, got "
            f"{given}; the third is found"
        )
    options.check_budget(epsilon=epsilon, delta=delta, noise_multiplier=noise_multiplier)
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
    size = _size(mechanism, num_bands, num_buffers)
    with Bar(f"optimising {mechanism}") as progress:
        built = mechanisms.build(mechanism, workload, part, size, progress=progress).in_float32()
    with Bar("certifying") as progress:
        if noise_multiplier is None:
            assert epsilon is not None
            assert delta is not None
            found = samplings.calibrate(
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
            found = samplings.account(
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
    terminal.warn_of_delta(found.delta, num_examples)
    if as_json:
        terminal.print_json({"error": found.error, **found.to_dict()})
    else:
        _show(found)


def _size(mechanism: str, num_bands: str | None, num_buffers: int | None) -> Size:
    """The size argument of the family; the other size argument must not be given."""
    buffered = mechanisms.get(mechanism).size == "num_buffers"
    if (num_bands if buffered else num_buffers) is not None:
        wrong, right = ("num-bands", "num-buffers") if buffered else ("num-buffers", "num-bands")
        raise ValueError(
            f"{wrong} must be left out for {mechanism}; the size of a family is either "
            f"num-bands or num-buffers, here {right}"
        )
    if num_bands == "best":
        return "best"
    bands = None if num_bands is None else _bands(num_bands)
    options.check_sizes(num_bands=bands, num_buffers=num_buffers)
    return num_buffers if buffered else bands


def _bands(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        shown = checks.quoted(text)
        raise ValueError(f"num-bands must be an integer or 'best', got {shown}") from None


def _show(found: Calibration) -> None:
    from corrnoise.apps.cli import terminal

    part = found.participation
    often = found.sampling.takes_part(found.mechanism, part)
    facts = {
        "mechanism": repr(found.mechanism),
        "participation": f"{counted(part.num_steps, 'step')}; each example {often}; "
        f"{found.sampling}",
        "epsilon": rounded_up(found.epsilon, 6),
        "delta": rounded_up(found.delta, 6),
        "noise multiplier": rounded_up(found.noise_multiplier, 6),
        "kind": f"{found.assurance}; unit: one {found.unit}, {found.neighbours}",
        "error": f"{found.error:.6g} per unit of clip norm",
    }
    if found.epsilon_without_sampling is not None:
        surely = rounded_up(found.epsilon_without_sampling, 6)
        facts["with certainty"] = f"epsilon {surely} at this noise and delta"
    terminal.print_facts(facts)
