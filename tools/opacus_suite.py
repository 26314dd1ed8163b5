"""Run Opacus's own tests of its engine against this one, and print how many pass.

python tools/opacus_suite.py [--sdist FILE] [--mechanism NAME] [--epochs N] [--examples N] [-k EXPR]

The tests come from Opacus's source distribution, which is downloaded into build/opacus-suite, or
from the file that --sdist names. Three things are substituted: the import of ``PrivacyEngine``,
``epochs=`` where a test gives none, and ``mechanism=`` if --mechanism names one. Everything else is
theirs. The tests need torchvision, for fake data and two models: where the environment has none, it
is downloaded too, or --modules names a folder that has it.

The tests that fail are in the table in docs/opacus.md, each with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "opacus-suite"
VERSION = "1.6.0"
FILES = (
    "privacy_engine_test.py",
    "privacy_engine_validation_test.py",
    "gradient_accumulation_test.py",
    "batch_memory_manager_test.py",
    "poisson_test.py",
    "randomness_test.py::PrivacyEngineSecureModeTest",
)
# The engine that the tests import. Only what the substitutions need is added.
ENGINE = """
import os

import corrnoise.torch


class PrivacyEngine(corrnoise.torch.PrivacyEngine):
    def make_private(self, **given):
        given.setdefault("epochs", int(os.environ["SUITE_EPOCHS"]))
        return super().make_private(**_named(given))

    def make_private_with_epsilon(self, **given):
        return super().make_private_with_epsilon(**_named(given))


def _named(given):
    if os.environ["SUITE_MECHANISM"]:
        given.setdefault("mechanism", os.environ["SUITE_MECHANISM"])
    return given
"""
# The operators of torchvision are compiled for one version of torch. The tests use none of them.
SETTINGS = """
import os
import sys
import types

import hypothesis

try:
    import torchvision
except RuntimeError:
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("_meta_registrations")
hypothesis.settings.register_profile(
    "suite",
    max_examples=int(os.environ["SUITE_EXAMPLES"]),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # a failure is enough
    derandomize=True,
    database=None,
)
hypothesis.settings.load_profile("suite")
"""


def main() -> int:
    """Download, substitute, run, print; the exit status is 0 if the tests could run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sdist", type=Path, help="Opacus's source distribution")
    parser.add_argument("--modules", type=Path, help="a folder with torchvision")
    parser.add_argument("--mechanism", default="", help="as in make_private; its default if empty")
    parser.add_argument("--epochs", type=int, default=3, help="where a test gives none")
    parser.add_argument("--examples", type=int, default=20, help="of each property-based test")
    parser.add_argument("-k", default="", help="which tests, as in pytest")
    parser.add_argument("--files", nargs="*", default=FILES, help="which files of Opacus's tests")
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    unpack(given.sdist or download())
    given.modules = given.modules or torchvision()
    found = run(given)
    if found is None:
        return 1
    show(found)
    return 0


def download() -> Path:
    """Opacus's source distribution."""
    place = FOLDER / f"opacus-{VERSION}.tar.gz"
    if not place.exists():
        wanted = ["--no-binary", "opacus", "--no-deps", f"opacus=={VERSION}", "-d", str(FOLDER)]
        subprocess.run([sys.executable, "-m", "pip", "download", *wanted], check=True)
    return place


def torchvision() -> Path | None:
    """A folder with torchvision, without what it needs; ``None`` if it is installed."""
    if find_spec("torchvision") is not None:
        return None
    place = FOLDER / "modules"
    if not place.exists():
        wanted = ["--target", str(place), "--no-deps", "torchvision"]
        subprocess.run([sys.executable, "-m", "pip", "install", *wanted], check=True)
    return place


def unpack(sdist: Path) -> None:
    """Opacus's tests as the package ``opacus_tests``, with another engine."""
    tests = FOLDER / "opacus_tests"
    tests.mkdir(exist_ok=True)
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            inside = re.fullmatch(r"[^/]+/opacus/tests/(\w+\.py)", member.name)
            file = archive.extractfile(member) if inside else None
            if inside and file:
                text = file.read().decode()
                text = text.replace(
                    "from opacus import PrivacyEngine", "from suite_engine import PrivacyEngine"
                )
                (tests / inside[1]).write_text(text)
    (FOLDER / "suite_engine.py").write_text(ENGINE)
    (FOLDER / "conftest.py").write_text(SETTINGS)


def run(given: argparse.Namespace) -> ElementTree.Element | None:
    """The results of the tests, as pytest writes them."""
    results = FOLDER / "results.xml"
    results.unlink(missing_ok=True)
    places = [ROOT / "src", FOLDER, *([given.modules.resolve()] if given.modules else [])]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "SUITE_EPOCHS": str(given.epochs),
        "SUITE_EXAMPLES": str(given.examples),
        "SUITE_MECHANISM": given.mechanism,
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(FOLDER), "-c", os.devnull, "--confcutdir", str(FOLDER)]
    command += [f"--junitxml={results}", "-k", given.k]
    command += [str(FOLDER / "opacus_tests" / name) for name in given.files]
    log = FOLDER / "log.txt"
    with log.open("w") as file:
        subprocess.run(
            command, cwd=FOLDER, env={**os.environ, **settings}, stdout=file, stderr=file
        )
    print(f"the log is {log}")
    return ElementTree.parse(results).getroot() if results.exists() else None


def show(results: ElementTree.Element) -> None:
    """The counts, and for each message of a failure the tests that have it."""
    counts: Counter[str] = Counter()
    reasons: dict[str, list[str]] = {}
    for case in results.iter("testcase"):
        kinds = {part.tag for part in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
        counts[kind] += 1
        for part in case:
            if part.tag in ("failure", "error"):
                name = f"{case.get('classname', '').rsplit('.', 1)[-1]}.{case.get('name')}"
                reasons.setdefault((part.get("message") or "?").split("\n")[0], []).append(name)
    for message, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} × {message[:400]}")
        for name in names:
            print(f"    {name}")
    total = counts["passed"] + counts["failed"]
    print(f"\n{counts['passed']} of {total} pass; {counts['skipped']} are skipped by Opacus itself")


if __name__ == "__main__":
    sys.exit(main())
