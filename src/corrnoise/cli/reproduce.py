"""``corrnoise reproduce``: the figures and tables of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corrnoise.cli import options


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="An experiment or a group; --list names them.")
    ] = None,
    paper: Annotated[str, typer.Option(help="Which paper.")] = "back_to_square_roots",
    smoke: Annotated[bool, typer.Option(help="A small size that takes seconds.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for numbers and pictures.")] = Path(
        "reproduced"
    ),
    names: Annotated[bool, typer.Option("--list", help="Name the experiments, and stop.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run an experiment of the paper again.

    Writes its numbers as JSON, its picture as SVG and PNG, and a README.md beside the paper's
    claims. Experiments that train models look in the folder that the environment variable
    CORRNOISE_DATA names (cifar10.npz, imdb/*.parquet), or ask torchvision and datasets; table-imdb
    fine-tunes the encoder in the folder CORRNOISE_ENCODER. Without a GPU they run in a reduced
    size, and say so.

    \b
    Examples:
      corrnoise reproduce --list --json
      corrnoise reproduce fig-convergence --smoke --out reproduced
    """
    from importlib import import_module

    from corrnoise import papers
    from corrnoise.cli import terminal

    package = papers.load(paper)
    known = (*package.names(), *package.GROUPS)
    if names:
        if as_json:
            terminal.print_json({"names": list(known)})
        else:
            print("\n".join(known))
        return
    if name is None:
        raise ValueError(f"name must be given, one of {', '.join(known)}")
    results = []
    for each in package.expand(name):
        with terminal.progress(each) as progress:
            result = package.reproduce(each, smoke=smoke, folder=out, progress=progress)
        results.append(result)
        if not as_json:
            terminal.console().print(f"{each}: {result['seconds']:.1f} s", soft_wrap=True)
    if not smoke:
        import_module(f"{package.__name__}.readme").write(out)
    if as_json:
        terminal.print_json({"results": results})
    else:
        terminal.console().print(f"written to {out}", soft_wrap=True)
