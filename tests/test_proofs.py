"""The pages of docs/proofs, and the functions that rest on them."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("proofs", ROOT / "tools" / "proofs.py")
proofs = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(proofs)

PAGES = sorted(path.name for path in proofs.PAGES.glob("*.md"))
# Pages that no function rests on.
ALONE = {"index.md"}


@pytest.mark.parametrize("page", PAGES)
def test_no_function_changed_since_its_page_was_read(page):
    changed = proofs.stale(proofs.PAGES / page)
    assert not changed, (
        f"{', '.join(changed)} changed: read docs/proofs/{page} again, correct it where it has to "
        f"be, then run: python tools/proofs.py --review docs/proofs/{page}"
    )
    assert bool(proofs.functions(proofs.PAGES / page)) == (page not in ALONE)


def test_there_is_a_page_for_every_result():
    wanted = {"sensitivity", "balls-in-bins", "importance-sampling", "without-draws"}
    wanted |= {"early-stopping", "poisson", "normals", "clipping", "floating-point", "index"}
    wanted |= {"random-allocation", "sums-on-grids", "many-bins"}
    assert {page.removesuffix(".md") for page in PAGES} == wanted


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ALONE])
def test_the_tests_that_a_page_names_exist(page):
    text = (proofs.PAGES / page).read_text()
    named = re.findall(r"`(tests/\w+\.py)`", text)
    assert named
    assert all((ROOT / name).is_file() for name in named)


def canonical(text):
    return proofs.canonical(ast.parse(text))


def test_layout_and_words_do_not_count():
    one = canonical('def f(x):\n    """Add."""\n    # why\n    return (x +\n            1)\n')
    assert one == canonical("def f(x): return x + 1")


@pytest.mark.parametrize(
    "other",
    [
        "def f(x): return x + 2",
        "def f(x): return x - 1",
        "def f(x, y=0): return x + 1",
        "def f(x):\n    x = x + 1\n    return x + 1",
        "def f(x: int): return x + 1",
    ],
)
def test_every_other_change_counts(other):
    assert canonical(other) != canonical("def f(x): return x + 1")


def test_a_change_is_listed_until_the_page_is_reviewed(tmp_path, monkeypatch, capsys):
    source = tmp_path / "src" / "room" / "part.py"
    source.parent.mkdir(parents=True)
    source.write_text("LIMIT, REST = 3, 4\n\nclass A:\n    def f(self):\n        return 1\n")
    pages = tmp_path / "docs"
    pages.mkdir()
    page = pages / "page.md"
    page.write_text("---\nfunctions:\n  room.part.A.f: new\n  room.part.LIMIT: new\n---\n\n# A\n")
    for name, value in (("ROOT", tmp_path), ("SOURCE", tmp_path / "src"), ("PAGES", pages)):
        monkeypatch.setattr(proofs, name, value)
    assert proofs.main([]) == 1
    assert proofs.main(["--review", str(page)]) == 0
    assert proofs.main([]) == 0
    assert page.read_text().endswith("---\n\n# A\n")
    source.write_text(source.read_text().replace("return 1", "return 2"))
    capsys.readouterr()
    assert proofs.main([]) == 1
    assert "read it again for room.part.A.f," in capsys.readouterr().out
    source.write_text(source.read_text().replace("return 2", "return 1  # as before"))
    assert proofs.main([]) == 0
    for wrong in ("room.part.gone", "nowhere.f"):
        with pytest.raises(ValueError, match="must be"):
            proofs.digest(wrong)
    page.write_text("---\nfunctions:\n  room.part.A.f 12\n---\n")
    with pytest.raises(ValueError, match="front matter"):
        proofs.functions(page)
