"""``corrnoise verify``: the files of a run, checked and computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corrnoise.apps.cli import options


def verify(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder that `corrnoise train --out` wrote, or the run.json in it."),
    ],
    key: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="<path>",
            help="Key file of a run, to check the codes of its ledger; repeatable.",
        ),
    ] = None,
    checklist: Annotated[
        bool, typer.Option(help="Also answer a reviewer's questions from the files.")
    ] = False,
    as_json: options.AsJson = False,
) -> int:
    """Check the files of a run, and compute every number again.

    Reads run.json, ledger, statement.txt and report.html of a folder. Computes the price of the noise, the sensitivity, the ε of the released steps, the statement and the report again, and compares all copies. The exit code is 0 where every check holds and 1 where one fails.

    \b
    Examples:
      corrnoise verify run
      corrnoise verify run --key run.key --json
      corrnoise verify run --checklist
    """
    from corrnoise import evidence
    from corrnoise.apps.cli import terminal
    from corrnoise.evidence.verification import run_files_of

    if folder.is_file() and run_files_of(folder.parent) == [folder]:
        folder = folder.parent
    if folder.is_file():
        raise ValueError(
            f"folder must be the folder of a run, got the file {folder}; give {folder.parent}"
        )
    verdict = evidence.verify(folder, keys=key or ())
    runs = evidence.runs(folder) if checklist and verdict.holds else []
    if as_json:
        answers = [[vars(each) for each in evidence.checklist(run)] for run in runs]
        terminal.print_json({**verdict.to_dict(), **({"checklists": answers} if runs else {})})
    else:
        print(verdict.to_text(), end="")
        for run in runs:
            print(f"\n{run.label}\n{evidence.checklist_text(evidence.checklist(run))}", end="")
    return 0 if verdict.holds else 1
