"""``corrnoise verify``: the files of a run, checked and computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corrnoise.apps.cli import options


def verify(
    folder: Annotated[Path, typer.Argument(help="What `corrnoise train --out` wrote.")],
    key: Annotated[
        list[Path] | None,
        typer.Option(help="Key file of a run, to check the codes of its ledger; repeatable."),
    ] = None,
    as_json: options.AsJson = False,
) -> int:
    """Check the files of a run, and compute every number again.

    Reads run.json, ledger, statement.txt and report.html of a folder. Computes the price of the noise, the sensitivity, the ε of the released steps, the statement and the report again, and compares all copies. The exit code is 0 where every check holds and 1 where one fails.

    \b
    Examples:
      corrnoise verify run
      corrnoise verify run --key run.key --json
    """
    from corrnoise import evidence
    from corrnoise.apps.cli import terminal

    verdict = evidence.verify(folder, keys=key or ())
    if as_json:
        terminal.print_json(verdict.to_dict())
    else:
        print(verdict.to_text(), end="")
    return 0 if verdict.holds else 1
