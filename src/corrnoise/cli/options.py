"""Options that several commands share, spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

from corrnoise.accounting import Sampling
from corrnoise.mechanisms.by_name import NAMES, Name
from corrnoise.participation import Participation

Family = Annotated[Name, typer.Option(help="The family.")]
Families = Annotated[
    list[str] | None,
    typer.Option(
        "--mechanism",
        autocompletion=lambda: list(NAMES),
        metavar="NAME",
        help=f"A family; again for more. Of: {', '.join(NAMES)}.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
NumExamples = Annotated[int | None, typer.Option(help="Size of the dataset.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected examples in a batch.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.")]
NumSteps = Annotated[int | None, typer.Option(help="n, the number of steps.")]
MinSep = Annotated[
    int | None, typer.Option(help="b: an example comes back after b steps, no sooner.")
]
MaxParticipations = Annotated[
    int | None, typer.Option(help="k: an example takes part k times, no more.")
]
Momentum = Annotated[float, typer.Option(help="β of the optimizer.")]
Decay = Annotated[float, typer.Option(help="α, the factor that weights keep in one step.")]
HowSampled = Annotated[Sampling, typer.Option(help="How examples come to steps.")]
FailureProbability = Annotated[
    float, typer.Option(help="How likely a certificate may be wrong (balls-in-bins).")
]
Samples = Annotated[int | None, typer.Option(help="Draws for a certificate (balls-in-bins).")]
Seed = Annotated[int, typer.Option(help="Of these draws.")]


def participation(
    *,
    num_examples: int | None,
    batch_size: int | None,
    epochs: int | None,
    num_steps: int | None,
    min_sep: int | None,
    max_participations: int | None,
    sampling: Sampling = "fixed",
) -> Participation:
    """From a dataset (examples, batch size, epochs or steps) or from n, b and k themselves."""
    from corrnoise import planning

    if num_examples is not None and batch_size is not None:
        if min_sep is not None or max_participations is not None:
            raise ValueError(
                "min-sep and max-participations follow from num-examples and batch-size; give "
                "either these two or those two"
            )
        return planning.participation(
            num_examples, batch_size, epochs=epochs, steps=num_steps, sampling=sampling
        )
    if num_steps is None or not (num_examples is batch_size is epochs is None):
        raise ValueError(
            "give num-examples, batch-size and epochs; or num-steps with min-sep or "
            "max-participations (one participation without them)"
        )
    if min_sep is None:
        k = 1 if max_participations is None else max_participations
        if not 1 <= k <= num_steps:
            raise ValueError(f"max-participations must be in [1, num-steps={num_steps}], got {k}")
        return Participation(num_steps, num_steps // k, k)
    fits = -(-num_steps // max(min_sep, 1))
    return Participation(num_steps, min_sep, max_participations or fits)
