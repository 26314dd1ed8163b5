"""``corrnoise reproduce``: the figures and tables of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corrnoise.apps.cli import options


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="An experiment or a group; --list shows their names.")
    ] = None,
    paper: Annotated[str, typer.Option(help="Which paper.")] = "back_to_square_roots",
    smoke: Annotated[bool, typer.Option(help="A small size that takes seconds.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for numbers and figures.")] = Path("reproduced"),
    names: Annotated[
        bool, typer.Option("--list", help="Print the names of the experiments, and stop.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Reproduce an experiment of the paper.

    Writes its numbers as JSON, its figure as SVG and PNG, and a README.md that sets them beside
    the paper's claims. Experiments that train models read their data from the folder in the
    environment variable CORRNOISE_DATA (cifar10.npz, imdb/*.parquet), or load it with torchvision
    and datasets; table-imdb fine-tunes the encoder in the folder CORRNOISE_ENCODER. Without a GPU
    they run at a reduced size, and their results say so.

    \b
    Examples:
      corrnoise reproduce --list --json
      corrnoise reproduce fig-convergence --smoke --out reproduced
    """
    from importlib import import_module

    from corrnoise import papers
    from corrnoise._progress import Bar
    from corrnoise.apps.cli import terminal

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
        with Bar(each) as progress:
            result = package.reproduce(each, smoke=smoke, folder=out, progress=progress)
        results.append(result)
        if not as_json:
            print(f"{each}: {result['seconds']:.1f} s", flush=True)
    if not smoke:
        import_module(f"{package.__name__}.readme").write(out)
    if as_json:
        terminal.print_json({"results": results})
    else:
        print(f"written to {out}")
