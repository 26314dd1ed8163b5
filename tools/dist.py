"""Build the source archive and the wheel, and check the wheel in a fresh environment.

python tools/dist.py

The archives are left in dist/, and the environments are created under build/. The checks run from a
temporary folder, so that only the installed wheel can be imported. Modules that need a library of
an extra that is not installed there are listed and not checked; `make test` covers them.
"""

from __future__ import annotations

import doctest
import importlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
BUILDER = ROOT / "build" / "dist-builder"
FRESH = ROOT / "build" / "dist-fresh"
EXTRAS = ("accounting", "cli", "noise", "report")
# Libraries of the other extras. A module may need these; any other missing library is an error.
LEFT_OUT = frozenset({"jax", "matplotlib", "opacus", "optax", "sklearn", "torch", "triton"})
PLAN = "plan --num-examples 1000 --batch-size 100 --epochs 2 --epsilon 4 --delta 1e-6"
PIP = ("-m", "pip", "--disable-pip-version-check")


class StepError(Exception):
    """A step that did not do what it must."""


def step(title: str) -> None:
    """Print what comes next."""
    print(f"\n== {title}", flush=True)


def run(*command: str | Path, cwd: Path = ROOT, capture: bool = False) -> str:
    """Run a command outside the reach of PYTHONPATH; its output is returned if captured."""
    words = [str(word) for word in command]
    print("$", shlex.join(words), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=False,
    )
    if capture:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        raise StepError(f"exit status {done.returncode} from: {shlex.join(words)}")
    return done.stdout or ""


def environment(folder: Path) -> Path:
    """The Python of a new, empty virtual environment."""
    run(sys.executable, "-m", "venv", "--clear", folder)
    return folder / "bin" / "python"


def build() -> Path:
    """Both archives, in an emptied dist/; the wheel is built from the source archive."""
    step("Build the source archive and the wheel")
    python = environment(BUILDER)
    run(python, *PIP, "install", "-qq", "build")
    shutil.rmtree(DIST, ignore_errors=True)
    run(python, "-m", "build", "--outdir", DIST, ROOT)
    archives, wheels = sorted(DIST.glob("*.tar.gz")), sorted(DIST.glob("*.whl"))
    if len(archives) != 1 or len(wheels) != 1:
        raise StepError(f"dist/ must hold one archive and one wheel, has {os.listdir(DIST)}")
    return wheels[0]


def check(wheel: Path) -> None:
    """Install the wheel alone, then run the command line and the doctests from elsewhere."""
    step(f"Install {wheel.name} with {', '.join(EXTRAS)} into a fresh environment")
    python = environment(FRESH)
    requirement = f"corrnoise[{','.join(EXTRAS)}] @ {wheel.as_uri()}"
    constraints = ROOT / "constraints.txt"
    run(python, *PIP, "install", "-qq", "-c", constraints, requirement)
    run(python, *PIP, "check")
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        step("Run the command line")
        corrnoise = python.parent / "corrnoise"
        version = wheel.name.split("-")[1]
        printed = run(corrnoise, "--version", cwd=elsewhere, capture=True)
        if version not in printed.split():
            raise StepError(f"corrnoise --version must print {version}, printed {printed!r}")
        run(corrnoise, *PLAN.split(), "--sampling", "fixed", cwd=elsewhere)
        step("Run the doctests of the installed package")
        # -I keeps this script's folder and the current one off the path.
        run(python, "-I", Path(__file__).resolve(), "--doctests", cwd=elsewhere)


def module_names(package: Path) -> Iterator[str]:
    """Every module below a package's folder, also where a subfolder has no __init__.py."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if parts[-1] != "__main__":  # importing it would run the program
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def missing_library(error: BaseException | None) -> str | None:
    """The library of an extra left out that an import asked for, if that is what went wrong."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    name = (error.name or "").partition(".")[0]
    return name if name in LEFT_OUT else None


class Runner(doctest.DocTestRunner):
    """Counts examples that failed because a library was left out, and reports all others."""

    def __init__(self) -> None:
        super().__init__(verbose=False, optionflags=doctest.ELLIPSIS)  # as pytest's default
        self.left_out: Counter[str] = Counter()
        self.failed: set[str] = set()

    def report_unexpected_exception(self, out, test, example, exc_info):  # type: ignore[no-untyped-def]
        """Tell a library that was left out from a failure."""
        library = missing_library(exc_info[1])
        if library:
            self.left_out[f"{test.name} needs {library}"] += 1
        else:
            self.failed.add(test.name)
            super().report_unexpected_exception(out, test, example, exc_info)

    def report_failure(self, out, test, example, got):  # type: ignore[no-untyped-def]
        """Remember which test failed."""
        self.failed.add(test.name)
        super().report_failure(out, test, example, got)


def doctests() -> None:
    """Run the doctests of the corrnoise that this interpreter has installed."""
    package = importlib.import_module("corrnoise")
    folder = Path(str(package.__file__)).resolve().parent
    if not folder.is_relative_to(Path(sys.prefix).resolve()):
        raise StepError(f"corrnoise must come from the fresh environment, came from {folder}")
    runner, finder = Runner(), doctest.DocTestFinder(exclude_empty=True)
    modules = 0
    left_out: list[str] = []
    for name in module_names(folder):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            library = missing_library(error)
            if library is None:
                raise
            left_out.append(f"{name} needs {library}")
            continue
        modules += 1
        for test in finder.find(module, name):
            if test.examples:
                runner.run(test)
    for line in (*left_out, *runner.left_out):
        print(f"not checked: {line}")
    print(f"{runner.tries} examples in {modules} modules, {len(runner.failed)} doctests failed")
    if runner.failed:
        raise StepError(f"doctests failed: {', '.join(sorted(runner.failed))}")
    if not runner.tries:
        raise StepError("no doctest was found in the installed package")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and check; 1 where a step failed, with one line that says which."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words == ["--doctests"]:
            doctests()
        elif words:
            raise StepError(f"no arguments are expected, got {shlex.join(words)}")
        else:
            check(build())
            step(f"The wheel works; dist/ holds {' and '.join(sorted(os.listdir(DIST)))}")
    except StepError as error:
        print(f"\nFAILED: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
