"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any

import typer

from corrnoise import _checks as checks
from corrnoise import mechanisms, samplings
from corrnoise.mechanisms import Family
from corrnoise.participation import Participation

# Options whose values are names of a registry, by the name of their parameter. ``app`` adds the names
# that are registered when the command runs to the help.
REGISTRIES: dict[str, Callable[[], tuple[str, ...]]] = {
    "mechanism": mechanisms.names,
    "mechanisms": mechanisms.names,
    "sampling": samplings.names,
    "allow": samplings.names,
}


def _named(registry: ModuleType, words: str, *spelled: str, also: tuple[str, ...] = ()) -> Any:
    """An option whose values are names of a registry, or one of ``also``."""

    def check(given: str | list[str] | None) -> str | list[str] | None:
        for name in [given] if isinstance(given, str) else given or []:
            if name not in also:
                try:
                    registry.get(name)
                except ValueError as unknown:
                    raise typer.BadParameter(f"{unknown}.") from None
        return given

    return typer.Option(
        *spelled,
        callback=check,
        autocompletion=lambda: [*also, *registry.names()],
        metavar="NAME",
        help=words,
    )


FamilyName = Annotated[str, _named(mechanisms, "The family of mechanisms.")]
FamilyNames = Annotated[
    list[str] | None,
    _named(mechanisms, "A family of mechanisms; repeat the option for several.", "--mechanism"),
]
SamplingName = Annotated[str, _named(samplings, "How batches are sampled.")]
SamplingOrBest = Annotated[
    str,
    _named(
        samplings,
        "How batches are sampled, or 'best' for the best of all.",
        also=(samplings.BEST,),
    ),
]
SamplingNames = Annotated[
    list[str] | None,
    _named(
        samplings, "A sampling that 'best' may choose; repeat the option for several.", "--allow"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
NumExamples = Annotated[int | None, typer.Option(help="Size of the dataset.")]
BatchSize = Annotated[int | None, typer.Option(help="Expected number of examples in a batch.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data.")]
NumSteps = Annotated[int | None, typer.Option(help="n, the number of steps.")]
MinSep = Annotated[
    int | None,
    typer.Option(help="b: an example takes part again after b steps at the earliest."),
]
MaxParticipations = Annotated[
    int | None, typer.Option(help="k: an example takes part at most k times.")
]
Momentum = Annotated[float, typer.Option(help="β of the optimizer.")]
Decay = Annotated[
    float, typer.Option(help="α, the factor by which weights are multiplied in each step.")
]
FailureProbability = Annotated[float, typer.Option(help="Failure probability of a certificate.")]
Samples = Annotated[int | None, typer.Option(help="Number of random draws for a certificate.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws for a certificate.")]


def _memory(text: str) -> float:
    try:
        return math.inf if text == "none" else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor 'none'.") from None


Memory = Annotated[
    float,
    typer.Option(
        parser=_memory,
        metavar="VECTORS",
        help="Model-sized vectors that the noise may keep; 'none' is no limit.",
    ),
]

# The limits of a budget on the command line: beyond them no guarantee is meaningful, and accountants
# run out of memory or digits.
_LIMITS = {"epsilon": (1e-6, 1e4), "delta": (1e-100, 1.0), "noise_multiplier": (1e-2, 1e12)}
# Of these, the values that must be strictly below the upper limit.
_BELOW = ("delta",)


def check_budget(**given: float | None) -> None:
    """Raise unless the given ones of ε, δ and the noise multiplier are within limits."""
    for name, value in given.items():
        if value is not None:
            within(name, value, *_LIMITS[name], below=name in _BELOW)


def within(name: str, value: float, low: float, high: float, *, below: bool = False) -> float:
    """Return ``value`` if it is in [low, high], or in [low, high) if ``below``; else raise."""
    if not low <= value <= high or (below and value == high):
        end = ")" if below else "]"
        raise ValueError(f"{name} must be in [{low:g}, {high:g}{end}, got {value:g}")
    return value


def check_sizes(**given: int | None) -> None:
    """Raise unless the given numbers of bands and buffers are positive."""
    for name, value in given.items():
        if value is not None:
            checks.integer(name, value, 1)


def families(names: list[str] | None) -> list[Family]:
    """The families of these names, each once; without names, all that are compared by default.

    By default, families whose size is optional are left out: the dense ones, which take O(n³).
    """
    if names is None:
        return [family for family in mechanisms.families() if not family.optional]
    return [mechanisms.get(name) for name in dict.fromkeys(names)]


def size(family: Family, num_bands: int, num_buffers: int) -> int | None:
    """The size of a family, of the two that a command has for all families."""
    if family.banded:
        return num_bands
    return num_buffers if family.size == "num_buffers" else None


def participation(
    *,
    num_examples: int | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    num_steps: int | None = None,
    min_sep: int | None = None,
    max_participations: int | None = None,
    sampling: str = samplings.ASSUMED,
) -> Participation:
    """The participation for a dataset (examples, batch size, epochs or steps), or for n, b and k."""
    from corrnoise import planning

    if num_examples is not None and batch_size is not None:
        if min_sep is not None or max_participations is not None:
            raise ValueError(
                "min-sep and max-participations follow from num-examples and batch-size; give "
                "either the first two or the last two"
            )
        return planning.participation(
            num_examples, batch_size, epochs=epochs, num_steps=num_steps, sampling=sampling
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
    k = fits if max_participations is None else max_participations
    return Participation(num_steps, min_sep, k)
