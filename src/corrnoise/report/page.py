"""One self-contained HTML file for a plan or for runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from corrnoise import _checks as checks
from corrnoise import _files
from corrnoise._version import __version__
from corrnoise.auditing import Audit
from corrnoise.planning import Plan
from corrnoise.records import Run
from corrnoise.report import alternatives, mechanism, statement, training
from corrnoise.report.audits import audited
from corrnoise.report.evidence import Evidence
from corrnoise.report.header import header, title
from corrnoise.report.kit import style
from corrnoise.report.kit.markup import carried_data, data, joined, tag

# With this policy the browser loads nothing from outside the file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
# The place where a page that compares runs lists their labels, in its order.
_LABELS = re.compile(r'<body data-runs="([^"]*)">')


def html(
    plan: Plan | None = None, runs: Sequence[Run] = (), audits: Sequence[Audit] = ()
) -> Markup:
    """The page of a plan, or of a run and those that it is compared with.

    It opens from disk, loads no other file and runs no script. Every number comes from the plan and
    the runs. Two are computed here if they are not recorded: DP-SGD at the same budget, and ε after
    fewer steps. This takes a few seconds if they must be certified, otherwise less than one.

    Args:
        plan: the plan; by default the first run's.
        runs: the run that the page is about, then runs to compare it with.
        audits: audits of the plan, at one δ or several.

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms=["dp_sgd", "bisr"])
    >>> page = html(plan)
    >>> page.startswith("<!doctype html>"), "http" + "://" in page
    (True, False)
    """
    evidence = Evidence.of(plan, runs)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width,initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title(evidence)),
        style.sheet(),
    )
    main = tag(
        "main",
        statement.statement(evidence),
        training.results(evidence),
        mechanism.error(evidence),
        mechanism.noise(evidence),
        alternatives.memory(evidence),
        statement.spending(evidence),
        audited(audits) if audits else None,
        alternatives.considered(evidence),
        statement.verifying(evidence),
    )
    footer = tag(
        "footer",
        f"Written by corrnoise {__version__}. This page loads no other file and runs no script.",
    )
    body = tag(
        "body",
        tag("div", header(evidence), main, footer, class_="page"),
        data("plan", evidence.plan.to_json()),
        data_runs=json.dumps([run.label for run in runs]) if len(runs) > 1 else None,
    )
    return joined([Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), "\n"])


def write(
    path: str | Path,
    plan: Plan | None = None,
    runs: Sequence[Run] = (),
    audits: Sequence[Audit] = (),
) -> Path:
    """Write ``html`` to a file atomically, and return its path.

    >>> import tempfile, corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms=["dp_sgd", "bisr"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read(write(f"{folder}/report.html", plan)) == plan
    True
    """
    target = Path(path)
    _files.write(target, html(plan, runs, audits))
    return target


def read(path: str | Path) -> Plan:
    """The plan that is stored in a page, to the last bit.

    Raises:
        ValueError: the file is not such a page, or its plan has another format version.
    """
    found = carried_data(Path(path).read_text(encoding="utf-8"), "plan")
    if found is None:
        raise ValueError(f"path must be a page that report.write made, got {str(path)!r}")
    return Plan.from_json(found)


def labels(path: str | Path) -> list[str]:
    """The labels of the runs that a page compares, in its order; none for a page of one run."""
    found = _LABELS.search(Path(path).read_text(encoding="utf-8"))
    names = [] if found is None else checks.parsed("list of runs", Markup(found[1]).unescape())
    return [checks.text("label of a run", name) for name in checks.listed("runs", names)]
