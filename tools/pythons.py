"""Run the tests on every supported Python that is installed, and print a table.

python tools/pythons.py [--list] [--only 3.12 ...] [--full 3.11 ...]

Each Python gets an environment of its own under build/pythons. Those named by --full, by default
the one that runs this script, get everything that `make test` installs. The others get what needs
no torch, which is quick to install. Tests that fail there because a library is missing are counted
as left out and listed with the library; every other failure counts as a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "pythons"
SUPPORTED = ("3.10", "3.11", "3.12", "3.13")
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
FULL = (".[dev]",)
LIGHT = (
    ".[accounting,cli,noise,plots,report]",
    *("hypothesis", "mpmath", "pytest", "pytest-xdist"),
)
# Libraries that FULL has and LIGHT has not, by the names under which they are imported.
LEFT_OUT = frozenset(
    {
        "PLD_accounting",
        "accelerate",
        "datasets",
        "jax",
        "jax_privacy",
        "lightning",
        "mkdocs",
        "opacus",
        "optax",
        "orbax",
        "peft",
        "pyarrow",
        "selenium",
        "sklearn",
        "torch",
        "transformers",
        "triton",
    }
)
MISSING = re.compile(
    r"No module named '?(\w+)|(\w+) is needed and not installed"
    r"|No package metadata was found for (\w+)"
)


@dataclass
class Outcome:
    """What one Python did."""

    version: str
    installed: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether tests ran and none failed."""
        return not self.problem and not self.counts["failed"] and self.counts["passed"] > 0

    def row(self) -> str:
        """One line of the table."""
        if self.problem:
            cells = [self.version, self.installed or "-", self.problem]
            return f"| {' | '.join(cells)} | | | |"
        names = ("passed", "failed", "skipped", "left out")
        cells = [self.version, self.installed, *(str(self.counts[name]) for name in names)]
        return f"| {' | '.join(cells)} |"


def candidates(version: str) -> Iterator[Path]:
    """Where a Python may be: on PATH, then among pyenv's versions, the newest first."""
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)
    pyenv = shutil.which("pyenv")
    if pyenv:
        root = _answer(pyenv, "root")
        places = (Path(root) / "versions").glob(f"{version}.*/bin/python") if root else ()
        yield from sorted(places, key=_patch, reverse=True)


def find(version: str) -> tuple[Path, str] | None:
    """The first of the candidates that runs, and its full version; a pyenv shim may not."""
    for path in candidates(version):
        answer = _answer(str(path), "-c", "import sys; print(*sys.version_info[:3], sep='.')")
        if answer.startswith(f"{version}."):
            return path, answer
    return None


def _answer(*command: str) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def _patch(python: Path) -> int:
    digits = re.match(r"\d+", python.parents[1].name.split(".")[2])
    return int(digits[0]) if digits else -1


def test(python: Path, version: str, exact: str, full: bool) -> Outcome:
    """Install into a new environment and run the tests there."""
    outcome = Outcome(exact)
    print(f"\n== Python {exact}: {'everything' if full else 'without torch'}", flush=True)
    folder = FOLDER / version
    subprocess.run([str(python), "-m", "venv", "--clear", str(folder)], check=True)
    own = folder / "bin" / "python"
    what = FULL if full else LIGHT
    if _install(own, what, "-c", "constraints.txt"):
        outcome.installed = f"{what[0]}, pinned"
    elif _install(own, what):
        print("The pins of constraints.txt cannot be met here; installed without them.")
        outcome.installed = f"{what[0]}, NOT pinned"
    else:
        outcome.problem = f"{what[0]} cannot be installed"
        return outcome
    results = FOLDER / f"{version}.xml"
    results.unlink(missing_ok=True)
    options = ["-p", "no:cacheprovider", f"--junitxml={results}"]
    if not full:  # assertions in full, so that the name of a missing library is not cut away
        options += ["--continue-on-collection-errors", "--tb=short", "--no-summary"]
        options += ["-o", "verbosity_assertions=2", "-o", "junit_logging=all"]
    done = subprocess.run(
        [str(own), "-m", "pytest", *options], cwd=ROOT, env=_environment(), check=False
    )
    if done.returncode not in (0, 1) or not results.is_file():
        outcome.problem = f"pytest stopped with exit status {done.returncode}"
        return outcome
    count(results, outcome, frozenset() if full else LEFT_OUT)
    if done.returncode and not (outcome.counts["failed"] or outcome.counts["left out"]):
        outcome.problem = "pytest failed, and no test did"
    return outcome


def _install(python: Path, what: Sequence[str], *options: str) -> bool:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-qq", *options]
    command = [*pip, "-e", *what]
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode == 0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def count(results: Path, outcome: Outcome, left_out: frozenset[str]) -> None:
    """Sort the results that pytest wrote into passed, failed, skipped and left out."""
    for case in ElementTree.parse(results).iter("testcase"):
        place = case.get("classname") or case.get("name") or "?"
        bad = [part for part in case if part.tag in ("failure", "error")]
        if not bad:
            outcome.counts["skipped" if case.find("skipped") is not None else "passed"] += 1
            continue
        text = "\n".join(f"{part.get('message')}\n{part.text}" for part in case)
        missing = {name for found in MISSING.findall(text) for name in found} & left_out
        if missing:
            outcome.counts["left out"] += 1
            outcome.left_out[", ".join(sorted(missing)), place] += 1
        else:
            outcome.counts["failed"] += 1
            outcome.failures.append(f"{place}::{case.get('name')}")


def report(outcomes: Sequence[Outcome], absent: Sequence[str]) -> None:
    """The table, and what was left out of it."""
    print("\n| Python | installed | passed | failed | skipped | left out |")
    print("|---|---|---:|---:|---:|---:|")
    for outcome in outcomes:
        print(outcome.row())
    for outcome in outcomes:
        for failure in outcome.failures:
            print(f"failed on {outcome.version}: {failure}")
    for outcome in outcomes:
        for (library, place), number in sorted(outcome.left_out.items()):
            where = f"{place} ({number})"
            print(f"left out on {outcome.version}: {where}, because {library} is not installed")
    for version in absent:
        print(f"not tested: Python {version} is not installed")
    if any(outcome.left_out for outcome in outcomes):
        print("A module that cannot be imported counts once, however many tests it has.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Find, install, test and report; 1 where a Python that was found did not pass."""
    parser = argparse.ArgumentParser(description="Run the tests on every supported Python.")
    parser.add_argument("--list", action="store_true", help="only say which Pythons are there")
    parser.add_argument("--only", nargs="+", choices=SUPPORTED, default=SUPPORTED)
    parser.add_argument("--full", nargs="*", choices=SUPPORTED, default=[RUNNING])
    options = parser.parse_args(arguments)
    found = {version: find(version) for version in options.only}
    for version, place in found.items():
        print(f"Python {version}: {f'{place[1]} at {place[0]}' if place else 'not installed'}")
    if options.list:
        return 0
    outcomes = [
        test(path, version, exact, version in options.full)
        for version, place in found.items()
        if place is not None
        for path, exact in [place]
    ]
    report(outcomes, [version for version, place in found.items() if place is None])
    return 0 if outcomes and all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
