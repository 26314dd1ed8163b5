"""Every code block of the documentation runs, and the site builds without fetching anything."""

from __future__ import annotations

import doctest
import html
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from corrnoise.cli import main
from corrnoise.cli.app import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# What a terminal can be told in a page, besides corrnoise itself.
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


def blocks(page):
    """The language and the text of each block, with the line that it begins at."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text[: found.start()].count("\n") + 1
        yield found[2], textwrap.dedent(found[3]), line


def run_session(text, namespace, where):
    """A doctest."""
    test = doctest.DocTestParser().get_doctest(text, {}, *where)
    test.globs = namespace  # the very same, so that later blocks see what this one leaves
    report = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)


def run_console(text, capsys, where):
    """``$ corrnoise ...`` and what it prints; a line of "..." stands for any others."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        program, *words = shlex.split(command, comments=True)
        if program == "make":
            assert set(words) <= TARGETS, where
        elif program == "pip":
            asked = re.findall(r"\[([\w,]+)\]", command)
            assert {extra for names in asked for extra in names.split(",")} <= EXTRAS, where
        else:
            assert program == "corrnoise", where
            status = main(words)
            printed = capsys.readouterr()
            if expected.startswith("corrnoise: "):
                assert status == 2, where
                printed = printed.err
            else:
                assert status == 0, (where, printed.err)
                printed = printed.out
            if expected.strip():
                assert doctest.OutputChecker().check_output(expected, printed, FLAGS), (
                    f"{where}: {command}\nexpected\n{expected}\ngot\n{printed}"
                )


@pytest.mark.parametrize("page", [page for page in PAGES if any(True for _ in blocks(page))])
def test_every_block_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    for language, text, line in blocks(page):
        where = (page, page, line)
        if text.startswith("--8<--"):  # a file of examples/, which test_examples.py runs
            assert re.fullmatch(r"--8<--\nexamples/\w+\.py\n--8<--\n", text), where
        elif language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Opacus has some of its own
                exec(compile("\n" * line + text, f"docs/{page}", "exec"), namespace)
        elif language == "pycon":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_session(text, namespace, where)
        elif language == "console":
            capsys.readouterr()
            run_console(text, capsys, where)
        else:
            assert language in ("", "text"), f"{where}: a block that nothing runs"


def test_a_wrong_block_is_found():
    with pytest.raises(AssertionError, match="Expected"):
        run_session(">>> 1 + 1\n3\n", {}, ("page", "page", 1))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        # A build that asks for anything from outside fails at this proxy.
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_and_has_every_page(site):
    for page in PAGES:
        assert (site / page).with_suffix(".html").is_file(), page


def test_the_examples_are_in_the_page(site):
    page = re.sub("<[^>]+>", "", (site / "opacus.html").read_text(encoding="utf-8"))
    for name in ("opacus_stock", "opacus_corrnoise", "without_opacus"):
        code = html.escape((ROOT / "examples" / f"{name}.py").read_text(), quote=False)
        assert code.strip() in page.replace("&quot;", '"').replace("&#39;", "'"), name


def test_no_page_fetches_anything(site):
    outside = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//""")
    imported = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//""")
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not outside.search(text), (page, outside.search(text))
    for sheet in site.rglob("*.css"):
        assert not imported.search(sheet.read_text(encoding="utf-8")), sheet


def test_the_help_of_every_command_is_on_its_page(site):
    text = (site / "command-line.html").read_text(encoding="utf-8")
    names = [command.callback.__name__ for command in app.registered_commands]
    assert names
    for name in names:
        assert f"Usage: corrnoise {name} [OPTIONS]" in text, name


def test_every_public_name_is_in_the_reference(site):
    import corrnoise as cn

    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    for module in (cn.workloads, cn.mechanisms, cn.accounting, cn.planning, cn.noise, cn.bounds):
        for name in getattr(module, "__all__", ()):
            place = getattr(module, name)
            if getattr(place, "__doc__", None) and getattr(place, "__name__", None) == name:
                paths = (f"{module.__name__}.{name}", f"{place.__module__}.{name}")
                assert any(f'id="{path}"' in text for path in paths), paths


def cells(page, column):
    """The code in one column of the tables that link the paper to functions and tests."""
    for row in re.findall(r"^\| .* \|$", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE):
        parts = row.strip("|").split(" | ")
        if len(parts) == 3 and "test_" in parts[2]:
            yield from re.findall(r"`([^`]+)`", parts[column])


def test_the_tests_that_the_mathematics_names_exist():
    named = list(cells("mathematics.md", 2))
    assert len(named) > 20
    for name in named:
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), name


def test_the_plots_can_be_drawn_again(tmp_path):
    spec = importlib.util.spec_from_file_location("docs_plots", DOCS / "plots.py")
    plots = importlib.util.module_from_spec(spec)
    sys.modules["docs_plots"] = plots  # dataclasses look for their module
    spec.loader.exec_module(plots)
    for plot in plots.PLOTS:
        found = plot(tmp_path, plots.SMALL)
        assert found
        assert (tmp_path / f"{plot.__name__}.svg").read_text().startswith("<?xml")
        assert (DOCS / "assets" / f"{plot.__name__}.svg").is_file()
    fixed, bins = (plots.budgets(tmp_path, plots.SMALL)[f"bisr, {how}"] for how in
                   ("fixed", "balls-in-bins"))  # fmt: skip
    assert all(a >= b for a, b in zip(fixed, bins, strict=True))  # amplification never costs
