"""``verify``: compare the files of a run, and compute every number again.

The files of a run repeat each other: the plan is in the run file, in the header of the ledger and
in the report; the statement is in the run file, as text, and on the report's page. Each copy is
compared with the others. Every number that follows from others is computed again: δ of the noise,
the sensitivity, the ε of the released steps, the errors, the text of the statement and the page of
the report.

Whether the ledger's lines are those that the run wrote can be checked only with the key, by their
codes. Without the key the verdict lists this check as unchecked.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corrnoise import _checks as checks
from corrnoise._rounding import rounded_up
from corrnoise._threads import one_blas_thread
from corrnoise.evidence import ledgers, spending
from corrnoise.evidence.findings import ROUNDING, Findings, Verdict
from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.planning.choosing import choice
from corrnoise.records import Run, Statement
from corrnoise.records.run import check_checksum
from corrnoise.records.statement import STOCK, versions

_REPORT, _TEXT = "report.html", "statement.txt"
_NO_RUN = "there is no run file to compare it with"


@one_blas_thread()
def verify(
    folder: str | os.PathLike[str], *, keys: Sequence[str | os.PathLike[str]] = ()
) -> Verdict:
    """Check the files of a run against each other, and compute every number again.

    A certificate is repeated with its recorded seed, which takes as long as the certificate did.
    Checks that the files do not allow are listed as "unchecked", not as failed.

    Args:
        folder: a folder that ``corrnoise train --out`` wrote, or any folder with some of these:
            ``run.json`` or ``run-*.json``, ``ledger`` (of other ranks too), ``statement.txt``,
            ``report.html``.
        keys: the key files of the runs, to check the codes of the ledgers.

    Returns:
        the verdict; ``holds`` says whether no check failed.

    Raises:
        ValueError: the folder has none of these files.

    >>> import tempfile, corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms="dp_sgd")
    >>> stated = Statement.of(plan, clip_norm=1.0, num_parameters=100)
    >>> run = Run("mine", plan, stated, records=(), data={}, model={}, settings={}, seconds=60.0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "run.json").write_text(run.to_json())
    ...     verdict, same = verify(folder), runs(folder) == [run]
    >>> verdict.holds, [each.file for each in verdict.findings if each.status == "unchecked"], same
    (True, ['ledger', 'statement.txt', 'report.html'], True)
    """
    place, found = Path(folder), Findings()
    run_files = run_files_of(place)
    # Each of several compared runs has a folder of its own, named by the run.
    labels = [path.stem.removeprefix("run-") for path in run_files if path.stem != "run"]
    books = [b for b in (place / "ledger", *(place / n / "ledger" for n in labels)) if b.exists()]
    page, text = place / _REPORT, place / _TEXT
    if not run_files and not books:
        raise ValueError(
            f"folder must have a run file (run.json) or a ledger, got {str(place)!r} with neither; "
            "give the folder of corrnoise train --out"
        )
    secrets = [Key.load(path) for path in keys]
    if not run_files:
        found.unchecked("run.json", "the statement and its ε", "not here")
    read: dict[Path, Run] = {}
    for path in run_files:
        run = _run(path, found)
        if run is not None:
            read[path] = run
    claimed: set[Path] = set()
    for path, run in read.items():
        own = [b for b in books if len(run_files) == 1 or b.parent.name == run.label]
        claimed.update(own)
        if not own:
            found.unchecked("ledger", "the released steps", f"no ledger of {run.label!r} is here")
        for book in own:
            ledgers.check(book, place, run, secrets, found)
        _check_numbers(path.name, run, found)
    for book in books:
        if book not in claimed:
            ledgers.check(book, place, None, secrets, found)
    known = {key.fingerprint for key in secrets} - ledgers.fingerprints(books)
    if known:
        found.differs("key", "every key belongs to a ledger", f"none has {', '.join(known)}")
    _check_text(text, list(read.values()), found)
    _check_page(page, list(read.values()), found)
    return Verdict(str(place), tuple(found.found))


def runs(folder: str | os.PathLike[str]) -> list[Run]:
    """The runs whose files are in a folder, as they are written; ``verify`` checks them."""
    return [Run.from_json(path.read_text(encoding="utf-8")) for path in run_files_of(folder)]


def run_files_of(folder: str | os.PathLike[str]) -> list[Path]:
    """The run files of a folder: ``run.json``, or ``run-*.json`` of several compared runs."""
    place = Path(folder)
    return sorted([*place.glob("run.json"), *place.glob("run-*.json")])


def _run(path: Path, found: Findings) -> Run | None:
    """The run of a file, if it can be read; the fields that readers skip are compared too."""
    name = path.name

    def opened() -> tuple[dict[str, Any], Run]:
        text = path.read_text(encoding="utf-8")
        data = check_checksum(checks.parsed("run", text))
        return data, Run.from_dict(data)

    made = found.attempt(name, "format versions, checksum, fields and their types", opened)
    if made is None:
        return None
    data, run = made
    found.same(name, "fields that follow from others", data, run.to_dict(), rel=ROUNDING)
    return run


def _check_numbers(name: str, run: Run, found: Findings) -> None:
    """Verify the plan, and compute the statement and the records again."""
    plan, stated = run.plan, run.statement
    c = plan.calibration
    budget = f"ε = {rounded_up(c.epsilon)} at δ = {rounded_up(c.delta, 3)}, {c.assurance}"
    # A copy, since plans that this process made are not verified again.
    copy = dataclasses.replace(plan)
    found.attempt(name, "plan: noise gives ε at δ", copy.verified, budget)
    with found.guarded(name, "plan: its numbers can be computed again"):
        _check_plan(name, plan, found)
    with found.guarded(name, "statement: its numbers can be computed again"):
        _check_statement(name, run, found)
    taken = [record.step for record in run.records]
    ordered = all(a < b for a, b in itertools.pairwise(taken))
    if not ordered or (taken and taken[-1] != stated.steps_taken):
        found.differs(
            name,
            "records: steps",
            f"must increase to the {stated.steps_taken} steps released, got {taken[-3:]} at last",
        )
    else:
        found.holds(name, "records: steps", f"{len(taken)}, the last after {stated.steps_taken}")
    facts = {
        "data.num_train": (run.data.get("num_train"), plan.num_examples),
        "model.num_parameters": (run.model.get("num_parameters"), stated.num_parameters),
        "settings.clip_norm": (run.settings.get("clip_norm"), stated.clip_norm),
        "settings.model": (run.settings.get("model"), run.model.get("name")),
    }
    own = {name: one for name, (one, other) in facts.items() if None not in (one, other)}
    found.same(name, "data, model, settings", own, {name: facts[name][1] for name in own})


def _check_plan(name: str, plan: Plan, found: Findings) -> None:
    """Compare the other numbers of a plan with those that follow from its calibration."""
    c = plan.calibration
    least = c.sampling.least_error(c.mechanism.workload, c.participation, c.epsilon, c.delta)
    if plan.lower_bound is not None:
        found.same(
            name,
            "plan: lower bound of the error",
            plan.lower_bound,
            least,
            f"{least:.6g}",
            ROUNDING,
        )
    chosen = plan.chosen
    if chosen is not None:
        stated = (chosen.name, chosen.noise_multiplier, chosen.error, chosen.kind, chosen.scheme)
        own = (c.mechanism.name, c.noise_multiplier, c.error, c.kind, plan.scheme)
        found.same(name, "plan: the chosen alternative", list(stated), list(own), rel=ROUNDING)
        errors = [each.error for each in plan.alternatives if each.error is not None]
        if errors != sorted(errors) or choice(plan.alternatives) != plan.choice:
            found.differs(
                name,
                "plan: alternatives",
                "must be sorted by error, with the cheapest within 0.1 % of the least one chosen",
            )
        else:
            found.holds(name, "plan: alternatives", f"{len(plan.alternatives)}, in order")


def _check_statement(name: str, run: Run, found: Findings) -> None:
    """Compute every field of the statement again, and δ at every ε that the run states."""
    stated = run.statement
    problem = found.attempt(
        name, "ε of the steps released can be computed", lambda: spending.problem(run)
    )
    if problem is None:
        return
    again = _stated_again(run)
    own, other = stated.to_dict(), again.to_dict()
    made, here = own.pop("versions"), other.pop("versions")
    sensitivity = f"sensitivity {rounded_up(again.sensitivity, 6)}, " * again.by_sensitivity
    detail = (
        f"{sensitivity}noise {rounded_up(again.noise_multiplier, 6)}, "
        f"δ {rounded_up(again.delta, 3)}"
    )
    found.same(name, "statement: every field", own, other, detail, ROUNDING)
    if problem:
        found.differs(name, "statement and records: ε", problem)
    else:
        taken = f"after {stated.steps_taken} of {run.plan.num_steps} steps"
        found.holds(
            name, "statement and records: ε", f"{rounded_up(stated.epsilon)} {taken}, proven"
        )
    elsewhere = {k: v for k, v in made.items() if here.get(k, v) != v}
    if elsewhere:
        words = ", ".join(f"{k} {v} (here {here[k]})" for k, v in elsewhere.items())
        found.unchecked(name, "the same software", f"the run had {words}")


def _stated_again(run: Run) -> Statement:
    """The statement that follows from the plan and the steps of a run, with the stated ε."""
    plan, stated = run.plan, run.statement
    again = Statement.of(
        plan,
        clip_norm=stated.clip_norm,
        steps_taken=stated.steps_taken,
        epsilon=stated.epsilon,
        noise_source=STOCK if stated.num_parameters is None else None,
        key_fingerprint=stated.key_fingerprint,
        run_id=stated.run_id,
        publishes=stated.publishes,
        num_parameters=stated.num_parameters,
        exact_release=stated.exact_release,
    )
    return again.as_bound() if spending.states_bound(run) else again


def _check_text(path: Path, runs: Sequence[Run], found: Findings) -> None:
    if not path.exists():
        found.unchecked(path.name, "text of the statement", "not here")
    elif not runs:
        found.unchecked(path.name, "text of the statement", _NO_RUN)
    else:
        text = path.read_bytes().decode(errors="replace")
        texts = [run.statement.to_text() for run in runs]
        if text in texts:
            found.holds(path.name, "text of the statement in the run file")
            return
        lines = zip(text.splitlines(), texts[0].splitlines(), strict=False)
        other = next(
            (f"{a.strip()!r}, expected {b.strip()!r}" for a, b in lines if a != b),
            "more or fewer lines, or other ends of lines",
        )
        found.differs(path.name, "text of the statement in the run file", other)


def _check_page(path: Path, runs: Sequence[Run], found: Findings) -> None:
    """Compute the page of the report from the runs again, and compare."""
    if not path.exists():
        found.unchecked(path.name, "page of the runs", "not here")
        return
    try:
        from corrnoise.report import page
    except ModuleNotFoundError as missing:
        found.unchecked(path.name, "page of the runs", str(missing))
        return
    carried = found.attempt(
        path.name, "the plan that the page carries", lambda: (page.read(path), page.labels(path))
    )
    if carried is None:
        return
    if not runs:
        found.unchecked(path.name, "every number of the page", _NO_RUN)
        return
    plan, labels = carried
    ordered = _in_order(labels, runs)
    if ordered[0].plan != plan:
        stated, expected = plan.to_dict(), ordered[0].plan.to_dict()
        found.same(path.name, "the plan of the run file", stated, expected)
        return
    found.holds(path.name, "the plan of the run file", "to the last digit")
    made, here = ordered[0].statement.versions, versions()
    changed = [k for k in ("corrnoise", "numpy", "scipy") if made.get(k) not in (None, here.get(k))]
    if changed:
        words = ", ".join(f"{k} {made[k]}" for k in changed)
        found.unchecked(path.name, "every number of the page", f"it was made by {words}")
        return
    own, again = path.read_text(encoding="utf-8"), str(page.html(runs=ordered))
    if own == again:
        found.holds(path.name, "every number of the page, computed again")
        return
    at = next((i for i, (a, b) in enumerate(zip(own, again, strict=False)) if a != b), len(again))
    words = f"character {at}: {own[at - 20 : at + 30]!r}, expected {again[at - 20 : at + 30]!r}"
    found.differs(path.name, "every number of the page, computed again", words)


def _in_order(labels: Sequence[str], runs: Sequence[Run]) -> list[Run]:
    """The runs in the order in which a page names them; runs that it does not name are last."""
    places = {label: place for place, label in enumerate(labels)}
    return sorted(runs, key=lambda run: places.get(run.label, len(places)))
