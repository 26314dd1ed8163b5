"""What a private run writes beside the model: its state, its statement, its report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corrnoise import _files, report
from corrnoise.records import Run
from corrnoise.torch import PrivacyEngine

STATE = "corrnoise.pt"
STATEMENT, REPORT = "privacy-statement", "privacy-report.html"
_FOLDER = re.compile(r"checkpoint-(\d+)")
_LAST_WRITTEN = "trainer_state.json"  # by transformers, of a checkpoint's files


def last_checkpoint(folder: Path) -> str | None:
    """The last checkpoint that was written to its end; a killed process may leave half of one."""
    found = sorted(
        (int(name[1]), place)
        for place in (folder.iterdir() if folder.is_dir() else ())
        if (name := _FOLDER.fullmatch(place.name))
        and (place / STATE).exists()
        and (place / _LAST_WRITTEN).exists()
        and (place / _LAST_WRITTEN).stat().st_size > 0
    )
    return str(found[-1][1]) if found else None


def write_beside(
    engine: PrivacyEngine, folder: Path, about: Mapping[str, Any], *, report_too: bool = False
) -> None:
    """Write the privacy statement, as text and JSON, and the report on the run.

    Args:
        engine: of the run.
        folder: of the model.
        about: data, model and settings, for the report.
        report_too: whether to write the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    statement = engine.statement()
    _files.write(folder / f"{STATEMENT}.txt", statement.to_text())
    _files.write(folder / f"{STATEMENT}.json", statement.to_json() + "\n")
    if report_too:
        run = Run(
            label=engine.plan.mechanism.name,
            plan=engine.plan,
            statement=statement,
            records=(),
            seconds=0.0,
            **about,
        )
        report.write(folder / REPORT, runs=[run])
