"""The table of tools/pythons.py: a test that only lacks a library is left out, not failed."""

import importlib.util
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[1] / "tools" / "pythons.py"
_SPEC = importlib.util.spec_from_file_location("pythons", _PATH)
pythons = importlib.util.module_from_spec(_SPEC)


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    # dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pythons", pythons)
        _SPEC.loader.exec_module(pythons)
        yield


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "left out"),
        (
            "corrnoise: torch is needed and not installed: pip install 'corrnoise[torch]'",
            "left out",
        ),
        ("PackageNotFoundError: No package metadata was found for torch", "left out"),
        ("ModuleNotFoundError: No module named 'scipy'", "failed"),
        ("PackageNotFoundError: No package metadata was found for corrnoise", "failed"),
        ("assert 2 == 0", "failed"),
    ],
)
@pytest.mark.parametrize("place", ["failure", "system-err"])
def test_what_a_failure_counts_as(tmp_path, words, kind, place):
    said = f'<failure message="assert 1 == 2">{words}</failure>'
    if place == "system-err":
        said = f'<failure message="assert 1 == 2"/><system-err>{words}</system-err>'
    file = tmp_path / "results.xml"
    file.write_text(f'<testsuite><testcase classname="a" name="b">{said}</testcase></testsuite>')
    outcome = pythons.Outcome("3.12")
    pythons.count(file, outcome, pythons.LEFT_OUT)
    assert outcome.counts == {kind: 1}
    pythons.count(file, full := pythons.Outcome("3.11"), frozenset())
    assert full.counts == {"failed": 1}
