"""What MkDocs asks for while it builds: the help of the commands, and the paper's figures."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "papers" / "back_to_square_roots" / "figures"
_HELP = re.compile(r"<!-- help:(?P<command>[a-z ]*) -->")


def on_files(files: Files, config: Any) -> Files:
    """Put the figures of the paper beside the page that includes its README."""
    for path in sorted(FIGURES.glob("*.svg")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``<!-- help: plan -->`` by what ``corrnoise plan --help`` prints."""
    return _HELP.sub(lambda found: f"```text\n{help_of(found['command'].split())}```", markdown)


def help_of(command: list[str]) -> str:
    """What a command prints with ``--help``."""
    from corrnoise.apps.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*command, "--help"]) == 0
    return out.getvalue()
