"""Every code block of the documentation runs, and the site builds without fetching anything."""

from __future__ import annotations

import ast
import doctest
import html
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import types
import warnings
from pathlib import Path

import pytest
from test_public import PUBLIC

import corrnoise as cn
from corrnoise._rounding import rounded_up
from corrnoise.apps.cli import main
from corrnoise.apps.cli.app import app
from corrnoise.mechanisms import registry as mechanisms_registry
from corrnoise.samplings import sampling as samplings_registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAPER = ROOT / "papers" / "back_to_square_roots"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
FENCE = re.compile(r"^( *)```(\w*)(?: [^\n]*)?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# The commands that a page may show, besides corrnoise itself: make targets, and pip with extras.
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OPTIONAL = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
EXTRAS = set(re.findall(r"^(\w+) = \[", OPTIONAL.partition("\n[")[0], re.MULTILINE))


def load(name, path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def blocks(page):
    """The language and the text of each block, with its first line."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text[: found.start()].count("\n") + 1
        yield found[2], textwrap.dedent(found[3]), line


def run_session(text, namespace, where):
    """A doctest."""
    test = doctest.DocTestParser().get_doctest(text, {}, *where)
    assert test.examples, f"{where}: a session without a prompt"
    test.globs = namespace  # the very same, so that later blocks see what this one defines
    report = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)


def run_console(text, capsys, where):
    """``$ corrnoise ...`` and what it prints; a line of "..." stands for any others."""
    assert text.startswith("$ "), f"{where}: a console block that does not begin with a prompt"
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        program, *words = shlex.split(command, comments=True)
        if program == "make":
            assert words, f"{where}: make without a target"
            assert set(words) <= TARGETS, f"{where}: no such target"
        elif program == "pip":
            asked = re.findall(r"\[(.+?)\]", command)
            assert asked, f"{where}: pip without extras"
            assert set(",".join(asked).split(",")) <= EXTRAS, f"{where}: no such extra"
        else:
            assert program == "corrnoise", f"{where}: no command of this project"
            status = main(words)
            printed = capsys.readouterr()
            if expected.startswith("corrnoise: "):
                assert status == 2, f"{where}: exit code {status}"
                printed = printed.err
            else:
                assert status == 0, (where, printed.err)
                printed = printed.out
            if expected.strip():
                assert doctest.OutputChecker().check_output(expected, printed, FLAGS), (
                    f"{where}: {command}\nexpected\n{expected}\ngot\n{printed}"
                )


@pytest.mark.parametrize(
    "page", ["accelerate.md", "clipping.md", "lightning.md", "transformers.md"]
)
def test_pages_for_beginners_give_a_budget(page):
    """A noise multiplier of 1 is ε = 50 with correlated noise, and make_private warns."""
    assert not [line for _, text, line in blocks(page) if "noise_multiplier=" in text]


@pytest.mark.parametrize("page", [page for page in PAGES if any(True for _ in blocks(page))])
def test_every_block_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for registry in (mechanisms_registry, samplings_registry):  # a page registers for itself alone
        monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))
    module = types.ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, "docs_page", module)  # dataclasses look for their module
    namespace = vars(module)
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


@pytest.mark.parametrize("page", PAGES)
def test_every_fence_is_read_as_a_block(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    fences = re.findall(r"^ *(?:`{3,}|~{3,})", text, re.MULTILINE)
    assert len(fences) == 2 * sum(1 for _ in blocks(page))


def test_a_wrong_session_is_found():
    with pytest.raises(AssertionError, match="Expected"):
        run_session(">>> 1 + 1\n3\n", {}, ("page", "page", 1))
    with pytest.raises(AssertionError, match="without a prompt"):
        run_session("1 + 1\n2\n", {}, ("page", "page", 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("$ corrnoise --version\n0.0.0\n", "expected"),
        ("$ corrnoise --version\ncorrnoise: an error\n", "exit code 0"),
        ("$ corrnoise plan\n", "corrnoise: "),  # it fails, and the page does not say so
        ("corrnoise --version\n", "does not begin with a prompt"),
        ("$ make nothing\n", "no such target"),
        ("$ make\n", "without a target"),
        ("$ pip install '.[nothing]'\n", "no such extra"),
        ("$ pip install '.[testpaths]'\n", "no such extra"),  # a list, but of something else
        ("$ pip install .\n", "without extras"),
        ("$ echo corrnoise\n", "no command of this project"),
    ],
)
def test_a_wrong_command_is_found(text, reason, capsys):
    with pytest.raises(AssertionError, match=reason):
        run_console(text, capsys, "page")


def messages():
    """Every text of the source, without what is put into it when it is printed."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "\0"
                              for part in node.values)  # fmt: skip
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_source():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    quoted = [part for cell in symptoms for part in re.findall("`([^`]+)`", cell) if " " in part]
    assert len(quoted) > 30
    said = "\n".join(messages())
    assert [part for part in quoted if part not in said] == []


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
    assert {"index.md", "architecture.md", "extending.md", "api/index.md"} <= set(PAGES)
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
    assert outside.search('<script async src="https://example.org/x.js">')
    assert outside.search("<link rel=stylesheet href=//example.org/x.css>")
    assert imported.search('@import url("https://example.org/x.css")')
    pages, sheets = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) >= len(PAGES)
    assert sheets
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not outside.search(text), (page, outside.search(text))
        assert 'class="mermaid"' not in text, f"{page}: the theme fetches a library for diagrams"
    for sheet in sheets:
        assert not imported.search(sheet.read_text(encoding="utf-8")), sheet


def test_the_help_of_every_command_is_on_its_page(site):
    text = (site / "command-line.html").read_text(encoding="utf-8")
    names = [command.callback.__name__ for command in app.registered_commands]
    assert names
    for name in names:
        assert f"Usage: corrnoise {name} [OPTIONS]" in text, name


def test_what_rounding_costs_is_on_its_page(site):
    text = html.unescape((site / "clipping.html").read_text(encoding="utf-8"))
    assert "<!-- rounding" not in text
    found = json.loads((ROOT / "benchmarks" / "rounding.json").read_text())
    for name, case in found["models"].items():
        assert name in text
        for cost in case.values():  # no example's factor is raised
            assert 0.0 <= cost["median"] <= cost["worst"] < 1.0
    assert load("rounding_table", ROOT / "benchmarks" / "rounding_table.py").about(found) in text


def test_the_counts_of_the_storm_are_on_its_page(site):
    text = (site / "guarantee.html").read_text(encoding="utf-8")
    storm = load("storm", ROOT / "benchmarks" / "storm.py")
    result = json.loads((ROOT / "benchmarks" / "storm.json").read_text())
    assert {row["kind"] for row in result["rows"]} == set(storm.KINDS)
    for row in result["rows"]:
        assert row["wrong"] == 0
        cells = [storm.KINDS[row["kind"]], *(f"{row[name]:,}" for name in ("events", *storm.ENDS))]
        found = r"\s*".join(f"<td[^>]*>{re.escape(cell)}</td>" for cell in cells)
        assert re.search(found, text), row
    assert storm.summary(result) in text


def test_the_audits_are_on_their_page(site):
    text = (site / "audit.html").read_text(encoding="utf-8")
    script = load("audit", ROOT / "benchmarks" / "audit.py")
    names = ("audit.json", "audit-large.json", "audit-cuda.json")
    for name in names:
        result = json.loads((ROOT / "benchmarks" / name).read_text())
        assert script.summary(result).partition(": **")[0] in text
        cells = re.findall(r"\d\.\d\d(?: to \d\.\d\d)?", script.table(result))
        assert len(cells) >= 3
        assert all(f"<td>{cell}</td>" in text for cell in cells)
    assert text.count("0 bounds are above their claim") == len(names)


def test_every_public_name_is_in_the_reference(site):
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html")}
    text = "".join(pages.values())
    modules = [importlib.import_module(name) for name in PUBLIC]
    checked = 0
    for module in modules:
        assert module.__all__, module
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.ismodule(thing):
                found = f'id="{thing.__name__}"' in text
            elif inspect.isclass(thing) or inspect.isfunction(thing):
                paths = {f"{m.__name__}.{name}" for m in modules if getattr(m, name, None) is thing}
                found = any(f'id="{path}"' in text for path in {*paths, full_name(thing)})
            else:  # a constant
                found = re.search(rf"<code>(?:cn\.)?{name}</code>", text) is not None
            assert found, f"{module.__name__}.{name}"
            checked += 1
    assert checked == sum(len(names.split()) for names in PUBLIC.values())
    assert checked > 80
    for name in cn.__all__:
        assert f"<code>cn.{name}</code>" in pages["index"], name


def full_name(thing):
    """The module and the name of a class or a function, where it is defined."""
    return f"{thing.__module__}.{thing.__qualname__}"


def rows(page, heading):
    """The cells of the first table below a heading, without its header."""
    section = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\|\n)+", section, re.MULTILINE)[0].splitlines()
    return [re.split(r" ?(?<!\\)\| ?", line)[1:-1] for line in lines[2:]]


def test_the_tests_that_the_mathematics_names_exist():
    table = rows("mathematics.md", "From the paper to the code")
    assert len(table) > 20
    for statement, _, tests in table:
        named = re.findall(r"`([^`]+)`", tests)
        assert named, f"{statement}: no test"
        for name in named:
            file, _, test = name.partition("::")
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {test}\(", source, re.MULTILINE), name


def test_the_noise_multipliers_of_the_errata_are_the_recorded_ones():
    recorded = json.loads((PAPER / "results" / "table-noise.json").read_text())["data"]["rows"]
    table = {where: (printed, holds) for where, printed, holds in rows("mathematics.md", "Errata")}
    for where, sampling in (
        ("CIFAR-10, multipliers without amplification", "fixed"),
        ("CIFAR-10, amplified multipliers", "balls-in-bins"),
    ):
        mine = [r for r in recorded if (r["dataset"], r["sampling"]) == ("CIFAR-10", sampling)]
        assert [r["method"] for r in mine] == ["dp_sgd", "bsr", "bisr", "band_mf", "band_inv_mf"]
        printed, holds = table[where]
        assert printed == ", ".join(str(r["printed"]) for r in mine)
        assert holds.startswith(", ".join(rounded_up(r["noise_multiplier"], 4) for r in mine))


def test_the_table_of_errors_is_what_the_script_computes():
    script = load("rmse_table", ROOT / "benchmarks" / "rmse_table.py")
    table = rows("choosing.md", "Error of every mechanism")
    header = f"| {' | '.join(script.HEADER)} |\n"
    assert header in (DOCS / "choosing.md").read_text(encoding="utf-8")
    assert len(table) == len(script.SETTINGS) + 2
    part = cn.Participation(1024, 256, 4)
    for label, workload in (
        ("prefix sum", cn.workloads.prefix_sum(1024)),
        ("decay 0.999", cn.workloads.sgd(1024, decay=0.999)),
    ):
        assert script.row(label, workload, part, script.Gaps()) in table


def test_the_plots_can_be_drawn_again(tmp_path):
    plots = load("docs_plots", DOCS / "plots.py")
    assert plots.PLOTS
    for plot in plots.PLOTS:
        found = plot(tmp_path, plots.SMALL)
        assert found
        assert (tmp_path / f"{plot.__name__}.svg").read_text().startswith("<?xml")
        assert (DOCS / "assets" / f"{plot.__name__}.svg").is_file()
    fixed, bins = (plots.budgets(tmp_path, plots.SMALL)[f"bisr, {how}"] for how in
                   ("fixed", "balls-in-bins"))  # fmt: skip
    assert len(fixed) == len(plots.SMALL.budgets)
    assert all(a >= b for a, b in zip(fixed, bins, strict=True))  # amplification never costs
