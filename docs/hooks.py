"""What MkDocs asks for while it builds: help of commands, counts of the storm, paper's figures."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "papers" / "back_to_square_roots" / "figures"
BENCHMARKS = ROOT / "benchmarks"
STORM = ROOT / "benchmarks" / "storm.json"
_HELP = re.compile(r"<!-- help:(?P<command>[a-z ]*) -->")
# Benchmarks with a file NAME_table.py, and their results.
_TABLES = {
    "rounding": ["rounding.json"],
    "imdb": ["imdb-adamw.json"],
    "cifar_headline": ["cifar-headline.json"],
    "batches": ["batches.json"],
    "cifar_wrn": ["cifar-wrn.json"],
    "exact": ["exact.json", "exact-h200.json"],
    "jax_noise": ["jax-noise.json"],
    "tightness": ["tightness.json"],
    "forgetting": ["forgetting.json"],
    "requests": ["requests.json"],
    "plans": ["plans.json"],
}
_STEPS = re.compile(r"<!-- steps: (?P<file>[a-z0-9.-]+) -->")


def on_files(files: Files, config: Any) -> Files:
    """Put the figures of the paper beside the page that includes its README."""
    for path in sorted(FIGURES.glob("*.svg")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``<!-- help: plan -->`` by what ``corrnoise plan --help`` prints.

    And ``<!-- audit -->``, ``<!-- storm -->``, ``<!-- steps: FILE -->`` and the names of
    ``_TABLES`` by what those benchmarks have measured.
    """
    if "<!-- audit -->" in markdown:
        markdown = markdown.replace("<!-- audit -->", audits())
    if "<!-- storm -->" in markdown:
        markdown = markdown.replace("<!-- storm -->", storm_counts())
    for name, files in _TABLES.items():
        if f"<!-- {name} -->" in markdown:
            shown = "\n\n".join(measured(name, file) for file in files)
            markdown = markdown.replace(f"<!-- {name} -->", shown)
    markdown = _STEPS.sub(lambda found: steps(found["file"]), markdown)
    return _HELP.sub(lambda found: f"```text\n{help_of(found['command'].split())}```", markdown)


def steps(name: str) -> str:
    """The table of whole steps that a benchmark has measured."""
    table = _of_benchmarks("step_table").table
    found = json.loads((BENCHMARKS / name).read_text())
    versions = ", ".join(f"{key} {value}" for key, value in found["versions"].items())
    about = f"{found['machine']}, {versions}, {found['date']}; medians of {found['rounds']} rounds."
    return f"{table(found)}\n\n{about}"


def measured(name: str, file: str) -> str:
    """The table of a benchmark, and where its numbers come from."""
    if not (BENCHMARKS / file).exists():
        return f"(Not measured yet: `benchmarks/{file}` is missing.)"
    tables = _of_benchmarks(f"{name}_table")
    found = json.loads((BENCHMARKS / file).read_text())
    return f"{tables.table(found)}\n\n{tables.about(found)}"


def audits() -> str:
    """The table of claims and lower bounds that benchmarks/audit.py has measured."""
    script = _of_benchmarks("audit")
    files = ("audit.json", "audit-large.json", "audit-cuda.json")
    results = [json.loads((BENCHMARKS / file).read_text(encoding="utf-8")) for file in files]
    return "\n\n".join(f"{script.summary(found)}\n\n{script.table(found)}" for found in results)


def storm_counts() -> str:
    """The table of the storm, and where and when it was counted."""
    storm = _of_benchmarks("storm")
    result = json.loads(STORM.read_text(encoding="utf-8"))
    return f"{storm.table(result)}\n\n{storm.summary(result)}"


def help_of(command: list[str]) -> str:
    """What a command prints with ``--help``."""
    from corrnoise.apps.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*command, "--help"]) == 0
    return out.getvalue()


def _of_benchmarks(name: str) -> Any:
    """A script of the benchmarks as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
