"""A library that is not installed is named, with the extra that has it."""

import subprocess
import sys
from pathlib import Path

import pytest

from corrnoise import _extras
from corrnoise.noise import Key, NoiseStream

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())

import corrnoise as cn

part = cn.Participation(20, 5, 4)
m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(20))
c = cn.calibrate(m, part, epsilon=1, delta=1e-5)
try:
    {use}
except ModuleNotFoundError as missing:
    print(missing.name, "|", missing)
else:
    print("it went through")
"""


def run(name, use):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(name=name, use=use)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_an_event_names_the_library_that_it_is_of():
    assert run("dp_accounting", "c.event()") == (
        "dp_accounting | dp_accounting is needed and not installed: "
        "in a clone of corrnoise, pip install '.[accounting]'"
    )


def test_a_ledger_names_what_locks_it(tmp_path):
    path = tmp_path / "ledger"
    assert run("portalocker", f"cn.records.Ledger({{}}, {str(path)!r})") == (
        "portalocker | portalocker is needed and not installed: "
        "in a clone of corrnoise, pip install '.[noise]'"
    )


@pytest.mark.parametrize("name", ["dp_accounting", "portalocker", "cryptography", "torch"])
def test_prices_need_none_of_them(name):
    use = 'c.spent(10); cn.calibrate(m, part, epsilon=1, delta=1e-5, sampling="poisson")'
    assert run(name, use) == "it went through"


def test_noise_without_openssl_is_made_by_numpy():
    use = "print(cn.noise.NoiseStream(cn.noise.Key.from_bytes(bytes(range(32)))).words(0, 0, 1)[0])"
    word = NoiseStream(Key.from_bytes(bytes(range(32)))).words(0, 0, 1)[0]
    assert run("cryptography", use).splitlines() == [str(word), "it went through"]


def test_a_module_of_somebody_else_keeps_its_message():
    with pytest.raises(ModuleNotFoundError, match="No module named 'never_made'"):
        _extras.load("never_made")
    other = ModuleNotFoundError("No module named 'x'", name="x")
    assert _extras.explained(other) is other


def test_a_missing_part_of_a_library_is_explained_too():
    missing = ModuleNotFoundError("No module named 'dp_accounting.pld'", name="dp_accounting.pld")
    assert "pip install '.[accounting]'" in str(_extras.explained(missing))


def test_every_extra_is_one_of_the_package():
    """What the message tells people to install must bring the library."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    distributions = {
        "dp_accounting": "dp-accounting",
        "jax_privacy": "jax-privacy",
        "sklearn": "scikit-learn",
    }
    for library, extra in _extras.EXTRAS.items():
        wanted = distributions.get(library, library)
        assert any(entry.startswith(wanted) for entry in extras[extra]), (library, extra)


def test_the_readme_names_every_extra():
    tomllib = pytest.importorskip("tomllib")
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    text = (root / "README.md").read_text(encoding="utf-8")
    install = text.partition("## Install")[2].partition("\n## ")[0]
    for extra in project["optional-dependencies"]:
        assert f"`{extra}`" in install, extra


@pytest.mark.parametrize("folder", ["src", "docs", "README.md"])
def test_no_hint_installs_from_a_registry(folder):
    """The package is on none: what is shown must work from a clone."""
    root = Path(__file__).parents[1] / folder
    files = [root] if root.is_file() else [*root.rglob("*.py"), *root.rglob("*.md")]
    for file in files:
        assert "install 'corrnoise[" not in file.read_text(encoding="utf-8"), file
