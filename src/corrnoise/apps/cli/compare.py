"""``corrnoise compare``: the error of mechanisms against their bands or the number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from corrnoise import _checks as checks
from corrnoise.apps.cli import options
from corrnoise.participation import Participation

# The units of one mechanism on the progress bar.
_UNITS = 100


def compare(
    num_examples: options.NumExamples = None,
    batch_size: options.BatchSize = None,
    epochs: options.Epochs = None,
    num_steps: options.NumSteps = None,
    min_sep: options.MinSep = None,
    max_participations: options.MaxParticipations = None,
    momentum: options.Momentum = 0.0,
    decay: options.Decay = 1.0,
    mechanisms: options.FamilyNames = None,
    against: Annotated[
        Literal["bands", "steps"], typer.Option(help="The quantity that changes from row to row.")
    ] = "bands",
    values: Annotated[
        str | None, typer.Option(help="Its values, such as 2,4,8; powers of 2 by default.")
    ] = None,
    num_bands: Annotated[
        int, typer.Option(help="p of the banded families, if the rows are steps.")
    ] = 4,
    num_buffers: Annotated[int, typer.Option(help="Number of buffers of blt.")] = 4,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the errors into this file: .png, .svg or .pdf.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare mechanisms by their error.

    The error is the root mean squared error sens(C)·‖B‖_F/√n at unit noise; no factorization is
    below the lower bound.

    \b
    Examples:
      corrnoise compare --num-steps 256 --max-participations 4 --values 2,8,64
      corrnoise compare --max-participations 4 --against steps --values 64,256 --num-bands 8 --mechanism bisr --mechanism bsr --json
      corrnoise compare --num-examples 1000 --batch-size 50 --epochs 4 --momentum 0.9 --values 1,2,4,8,20 --plot errors.svg
    """
    from corrnoise import _extras, bounds, workloads
    from corrnoise._progress import Bar, Share
    from corrnoise.apps.cli import terminal

    terminal.check_file(plot)
    if plot is not None:
        _extras.load("matplotlib.figure")  # so that a missing library is found before the work
    families = options.families(mechanisms)
    if against == "steps":
        parts = _participations(values, num_steps, max_participations)
        sizes = [min(num_bands, part.num_steps) for part in parts]
        rows = [part.num_steps for part in parts]
    else:
        part = options.participation(
            num_examples=num_examples,
            batch_size=batch_size,
            epochs=epochs,
            num_steps=num_steps,
            min_sep=min_sep,
            max_participations=max_participations,
        )
        sizes = rows = _integers(values, part.min_sep)
        parts = [part] * len(rows)
    found: dict[str, list[float]] = {family.name: [] for family in families}
    lower: list[float] = []
    with Bar("comparing") as progress:
        share = Share(progress, len(rows) * len(families) * _UNITS)
        for row, (part, bands) in enumerate(zip(parts, sizes, strict=True)):
            again = against == "bands" and row > 0  # families that do not depend on the bands
            workload = workloads.sgd(part.num_steps, momentum=momentum, decay=decay)
            for family in families:
                errors = found[family.name]
                if again and not family.banded:
                    errors.append(errors[0])
                else:
                    size = options.size(family, bands, num_buffers)
                    built = family.build(workload, part, size, progress=share.part(_UNITS))
                    errors.append(built.rmse(part))
                share.advance(_UNITS)
            lower.append(lower[0] if again else bounds.lower_bound(workload, part))
    if plot is not None:
        _draw(plot, against, rows, found, lower)
    if as_json:
        data = {"against": against, "values": rows, "rmse": found, "lower_bound": lower}
        terminal.print_json(data | {"participations": [part.to_dict() for part in parts]})
        return
    lines = [
        [str(row), *(f"{errors[i]:.4g}" for errors in found.values()), f"{lower[i]:.4g}"]
        for i, row in enumerate(rows)
    ]
    terminal.print_table([against, *found, "lower bound"], lines)


def _participations(
    values: str | None, num_steps: int | None, max_participations: int | None
) -> list[Participation]:
    """One participation for each number of steps, all with the same k."""
    k = 1 if max_participations is None else max_participations
    steps = [n for n in _integers(values, num_steps or 1024) if values is not None or n >= k]
    return [options.participation(num_steps=n, max_participations=k) for n in steps]


def _integers(text: str | None, largest: int) -> list[int]:
    """The integers of "2,4,8", or the powers of 2 up to ``largest`` and itself."""
    if text is None:
        return [*(2**i for i in range(largest.bit_length()) if 2**i < largest), largest]
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        shown = checks.quoted(text)
        raise ValueError(f"values must be integers with commas between, got {shown}") from None


def _draw(
    path: Path,
    against: str,
    rows: Sequence[int],
    found: dict[str, list[float]],
    lower: Sequence[float],
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, errors in found.items():
        axes.plot(rows, errors, marker="o", markersize=3, label=name)
    axes.plot(rows, lower, color="black", linestyle="--", label="lower bound")
    axes.set(xscale="log", yscale="log", ylabel="root mean squared error at unit noise")
    axes.set_xlabel("number of bands" if against == "bands" else "number of steps")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
