"""``corrnoise verify``: a real run holds, and every edit of its files is found."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import shutil
from dataclasses import replace

import pages
import pytest
from training import loader, private
from training import train as few_steps

from corrnoise import evidence, planning, samplings
from corrnoise.apps import datasets, training
from corrnoise.apps.cli import main
from corrnoise.apps.cli.train import _write
from corrnoise.evidence import spending, verify
from corrnoise.planning import choosing
from corrnoise.records import read_entries
from corrnoise.torch import PrivacyEngine

EPSILONS, CHOICE, PAGE = (
    "statement and records: ε",
    "plan: alternatives",
    "every number of the page, computed again",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder and the key of a run of six steps of each of two epochs."""
    folder = tmp_path_factory.mktemp("verify") / "run"
    data = datasets.load("digits")
    plan = planning.plan(
        num_examples=len(data.train), batch_size=240, epochs=2, epsilon=8.0, delta=1e-4,
        momentum=0.9, sampling="fixed", mechanisms=["bisr", "dp_sgd"],
    )  # fmt: skip
    run = training.train(plan, data, label="bisr", folder=folder, model="linear")
    _write(folder, [run])
    return folder


def planned(sampling, mechanisms, epochs, momentum=0.9):
    """A plan for digits, with six steps in an epoch."""
    return planning.plan(
        num_examples=len(datasets.load("digits").train), batch_size=240, epochs=epochs,
        epsilon=8.0, delta=1e-4, momentum=momentum, sampling=sampling, mechanisms=mechanisms,
    )  # fmt: skip


def train(plan, folder, **options):
    return training.train(
        plan, datasets.load("digits"), label="run", folder=folder, model="linear", **options
    )


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """A folder of a run whose ε is certified by draws, and along the way bounded, and the run."""
    folder = tmp_path_factory.mktemp("certified") / "run"
    run = train(planned("balls-in-bins", ["bisr"], 3), folder)
    assert run.plan.calibration.kind == "certified"
    _write(folder, [run])
    return folder, run


def rewritten(folder, target, run):
    """The verdict on a copy of a folder whose run file, statement and page are those of ``run``."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.pt*"), dirs_exist_ok=True)
    _write(target, [run])
    return verify(target)


def with_record(run, index, epsilon):
    records = list(run.records)
    records[index] = replace(records[index], epsilon=epsilon)
    return replace(run, records=tuple(records))


def leaves(data, path=()):
    """The paths of all values in JSON that are no objects or lists, and of empty ones."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for name, value in items:
        if isinstance(value, (dict, list)) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return type(value)(value * 1.25 + 1)
    if isinstance(value, str):
        return value + "1"
    return 1.5 if value is None else None


def edited(data, path):
    found = copy.deepcopy(data)
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = changed(inner[path[-1]])
    return found


def signed(data):
    """A run file with a checksum that fits: the edit of someone who knows the format."""
    data.pop("sha256", None)
    return json.dumps({**data, "sha256": hashlib.sha256(json.dumps(data).encode()).hexdigest()})


def run_edits(folder):
    data = json.loads((folder / "run.json").read_text())
    for path in leaves(data):
        if path != ("sha256",):
            yield ".".join(map(str, path)), "run.json", signed(edited(data, path)) + "\n"
    yield "checksum", "run.json", json.dumps(edited(data, ("sha256",)))
    yield "no checksum", "run.json", json.dumps({k: v for k, v in data.items() if k != "sha256"})
    fewer = {**data, "records": data["records"][:-1]}
    yield "a record less", "run.json", signed(fewer)
    more = copy.deepcopy(data)
    more["plan"]["calibration"]["mechanism"]["noising"]["numerator"][0][1] *= 1.001
    yield "a coefficient", "run.json", signed(more)


def ledger_edits(folder):
    lines = (folder / "ledger").read_text().splitlines(keepends=True)
    header, code = json.loads(lines[0][:-34]), lines[0][-34:]
    for name in header:
        if name not in ("data", "parameters", "shuffled"):
            made = json.dumps(edited(header, (name,))) + code
            yield f"header {name}", "ledger", "".join([made, *lines[1:]])
    yield "first step dropped", "ledger", "".join([lines[0], *lines[2:]])
    yield "a step dropped", "ledger", "".join([*lines[:5], *lines[6:]])
    yield "last step dropped", "ledger", "".join(lines[:-1])
    yield "two steps swapped", "ledger", "".join([*lines[:3], lines[4], lines[3], *lines[5:]])
    yield "a step twice", "ledger", "".join([*lines[:5], lines[4], *lines[5:]])
    forged = json.dumps({"step": len(lines) - 1, "gradient": "0" * 16}) + " " + "0" * 32 + "\n"
    yield "a step more", "ledger", "".join([*lines, forged])
    yield "a torn end", "ledger", "".join(lines) + '{"step": 12'
    yield "no header", "ledger", "".join(lines[1:])


def keyed_edits(folder):
    """Edits of the ledger that nobody can see without the key."""
    lines = (folder / "ledger").read_text().splitlines(keepends=True)
    header, code = json.loads(lines[0][:-34]), lines[0][-34:]
    for name in ("data", "parameters", "shuffled"):
        yield name, "".join([json.dumps(edited(header, (name,))) + code, *lines[1:]])
    other = "1" if lines[3][-40] != "1" else "2"
    yield "a digest", "".join([*lines[:3], lines[3][:-40] + other + lines[3][-39:], *lines[4:]])
    other = "1" if lines[3][-5] != "1" else "2"
    yield "a code", "".join([*lines[:3], lines[3][:-5] + other + lines[3][-4:], *lines[4:]])


def page_edits(folder):
    """Every number that the report shows, a few of them at a time, and its versions."""
    page = (folder / "report.html").read_text()
    places = [m.start() for m in re.finditer(r"(?<=[>\s(])\d[\d.,]*(?=[\s<),])", page)]
    assert len(places) > 80
    for number, at in enumerate(places[::9]):
        digit = "8" if page[at] != "8" else "3"
        yield f"number {number} of the page", "report.html", page[:at] + digit + page[at + 1 :]
    text = (folder / "statement.txt").read_text()
    for number, line in enumerate(text.splitlines()):
        found = re.search(r"\d", line)
        if found:
            digit = "8" if found[0] != "8" else "3"
            wrong = line[: found.start()] + digit + line[found.end() :]
            yield f"statement line {number}", "statement.txt", text.replace(line, wrong)


def all_edits(folder):
    yield from run_edits(folder)
    yield from ledger_edits(folder)
    yield from page_edits(folder)


def test_a_real_run_holds_with_and_without_its_key(trained):
    without = verify(trained)
    assert without.holds, without.to_text()
    assert [f.check for f in without.findings if f.status == "unchecked"] == ["codes of the lines"]
    verdict = verify(trained, keys=[trained.with_name("run.key")])
    assert verdict.holds
    assert all(each.status == "holds" for each in verdict.findings)
    assert len(verdict.findings) > 15
    assert len(verdict.to_text().splitlines()) < 60  # one page


def test_every_edit_is_found(trained, tmp_path):
    """More than a hundred edits, none of which needs the key or leaves the checksum unfit."""
    edits = list(all_edits(trained))
    assert len(edits) > 150
    missed = []
    for name, file, text in edits:
        assert text != (trained / file).read_text(), name
        shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("*.pt*"))
        (tmp_path / "copy" / file).write_text(text)
        verdict = verify(tmp_path / "copy")
        if verdict.holds:
            missed.append(f"{file}: {name}")
        assert all("\n" not in each.detail for each in verdict.findings)
        shutil.rmtree(tmp_path / "copy")
    assert not missed


def test_damage_is_a_finding_and_no_traceback(trained, tmp_path):
    """Bytes flipped, cut off and put in, in every file; what a digest has is for the key."""
    dice = random.Random(7)
    shutil.copytree(trained, tmp_path / "copy", ignore=shutil.ignore_patterns("*.pt*"))
    for file in ("run.json", "ledger", "statement.txt", "report.html") * 10:
        whole = (trained / file).read_bytes()
        data, at = bytearray(whole), dice.randrange(len(whole))
        kind = dice.randrange(3)
        if kind == 0:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del data[at:]
        else:
            data[at:at] = b"7"
        (tmp_path / "copy" / file).write_bytes(bytes(data))
        verdict = verify(tmp_path / "copy", keys=[trained.with_name("run.key")])
        assert not verdict.holds, (file, kind, at)
        (tmp_path / "copy" / file).write_bytes(whole)


def test_odd_numbers_of_a_run_file_are_findings_and_no_traceback(trained, tmp_path):
    data = json.loads((trained / "run.json").read_text())
    for path in leaves(data):
        value = data
        for name in path:
            value = value[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        for odd in (0, -3, 10**9):
            found = copy.deepcopy(data)
            inner = found
            for name in path[:-1]:
                inner = inner[name]
            if "noising" in path or type(value)(odd) == value:
                continue
            inner[path[-1]] = type(value)(odd)
            (tmp_path / "run.json").write_text(signed(found))
            assert verify(tmp_path).to_text()


def test_edits_of_digests_and_codes_are_found_with_the_key_alone(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    for name, text in keyed_edits(trained):
        (tmp_path / "copy" / "ledger").write_text(text)
        assert verify(tmp_path / "copy").holds, name
        verdict = verify(tmp_path / "copy", keys=[trained.with_name("run.key")])
        assert [each.check for each in verdict.differences] == ["codes of the lines"], name


def test_the_command_answers_on_one_page_with_an_exit_code(trained, tmp_path, capsys):
    assert main(["verify", str(trained)]) == 0
    assert "all 20 checks hold" in capsys.readouterr().out
    shutil.copytree(trained, tmp_path / "copy")
    text = (trained / "statement.txt").read_text()
    (tmp_path / "copy" / "statement.txt").write_text(text.replace("(8,", "(2,"))
    assert main(["verify", str(tmp_path / "copy"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["holds"]
    assert main(["verify", str(tmp_path)]) == 2
    assert "folder must have a run file" in capsys.readouterr().err


def test_what_no_run_file_confirms_is_named_as_unseen(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "run.json").unlink()
    forged = (copy / "statement.txt").read_text().replace("(8,", "(2,")
    (copy / "statement.txt").write_text(forged)
    verdict = verify(copy)
    unseen = {each.file for each in verdict.findings if each.status == "unchecked"}
    assert unseen >= {"run.json", "statement.txt", "report.html"}
    first = verdict.to_text().splitlines()[0]
    assert first.endswith("; 4 could not be made (unseen).")


def test_other_ends_of_lines_are_named(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    text = (trained / "statement.txt").read_bytes().replace(b"\n", b"\r\n")
    (tmp_path / "copy" / "statement.txt").write_bytes(text)
    (failed,) = verify(tmp_path / "copy").differences
    assert failed.detail == "more or fewer lines, or other ends of lines"


def test_a_key_of_another_run_is_refused(trained, tmp_path):
    from corrnoise.noise import Key

    Key.generate().save(tmp_path / "other.key")
    verdict = verify(trained, keys=[tmp_path / "other.key"])
    assert [each.check for each in verdict.differences] == ["every key belongs to a ledger"]


def test_a_ledger_alone_is_priced(trained, tmp_path):
    """What an engine without ``corrnoise train`` leaves: the plan is in the header."""
    shutil.copy(trained / "ledger", tmp_path / "ledger")
    verdict = verify(tmp_path)
    assert verdict.holds, verdict.to_text()
    assert any(each.check == "plan: noise gives ε at δ" for each in verdict.findings)
    text = (trained / "ledger").read_text()
    (tmp_path / "ledger").write_text(text.replace('\\"epsilon\\": 8.0', '\\"epsilon\\": 7.0'))
    assert not verify(tmp_path).holds


def test_the_ledger_of_a_run_whose_loader_orders_the_examples_holds(tmp_path):
    """Fixed batches of a key that is lost with the process, in an order of the loader's own."""
    engine = PrivacyEngine(ledger=tmp_path / "ledger")
    net, optimizer, batches = private(engine, data_loader=loader(shuffle=True), sampling="fixed")
    few_steps(net, optimizer, batches, steps=2)
    engine.close()
    assert "order" in read_entries(tmp_path / "ledger")[0]
    verdict = verify(tmp_path)
    assert verdict.holds, verdict.to_text()


def test_the_checklist_is_answered_from_the_files(trained, tmp_path, capsys):
    (run,) = evidence.runs(trained)
    answers = evidence.checklist(run)
    assert len({each.subject for each in answers}) == len(answers) >= 15
    text = evidence.checklist_text(answers)
    for fact in (
        "ε = 8, δ = 0.0001",
        f"clipped to norm {run.settings['clip_norm']:g}",
        f"run {run.statement.run_id}",
        run.statement.key_fingerprint,
        f"{run.statement.steps_taken} of {run.plan.num_steps} steps",
        "They may be public",
    ):
        assert fact in " ".join(text.split()), fact
    assert "[ ] Bias" in text  # nobody but the owner can answer
    assert main(["verify", str(trained), "--checklist"]) == 0
    assert text in capsys.readouterr().out
    assert main(["verify", str(trained), "--checklist", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["checklists"][0]) == len(answers)
    # Files that do not hold answer nothing.
    shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "copy" / "statement.txt").write_text("")
    assert main(["verify", str(tmp_path / "copy"), "--checklist"]) == 1
    assert "Unit of privacy" not in capsys.readouterr().out


SAMPLINGS = {
    "fixed": "bisr",
    "balls-in-bins": "bisr",
    "poisson": "dp_sgd",
    "random-allocation": "dp_sgd",
    "cyclic-poisson": "dp_sgd",
    "best": "bisr",
}


def test_every_sampling_has_a_run_here():
    assert set(SAMPLINGS) == {*samplings.names(), samplings.BEST}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_run_of_every_sampling_holds(sampling, tmp_path):
    run = train(planned(sampling, [SAMPLINGS[sampling]], 2), tmp_path / "run")
    assert run.records[0].epsilon is not None
    _write(tmp_path / "run", [run])
    verdict = verify(tmp_path / "run", keys=[tmp_path / "run.key"])
    assert verdict.holds, verdict.to_text()
    lower = with_record(run, 0, 0.9 * run.plan.calibration.spent(run.records[0].step))
    verdict = rewritten(tmp_path / "run", tmp_path / "copy", lower)
    assert [each.check for each in verdict.differences] == [EPSILONS]


class InterruptedRunError(Exception):
    pass


def stopped(plan, folder, at, keep=None):
    """Train until some steps were taken, perhaps with a copy of an earlier checkpoint."""

    def show(taken, _):
        if taken == keep:
            shutil.copy(folder / "checkpoint.pt", folder.with_name("earlier.pt"))
        if taken == at:
            raise InterruptedRunError

    with pytest.raises(InterruptedRunError):
        train(plan, folder, progress=show)


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins"])
def test_a_run_that_was_resumed_holds(sampling, tmp_path):
    """Each process begins its own search for ε, so the records are not those of one process."""
    plan, folder = planned(sampling, ["bisr"], 4), tmp_path / "run"
    stopped(plan, folder, 6)
    stopped(plan, folder, 12)
    run = train(plan, folder)
    assert [record.step for record in run.records] == [6, 12, 18, 24]
    _write(folder, [run])
    verdict = verify(folder, keys=[tmp_path / "run.key"])
    assert verdict.holds, verdict.to_text()


def test_a_run_that_goes_on_from_an_older_checkpoint_holds(tmp_path):
    """Its records count every step that was released, also those beyond the checkpoint."""
    plan, folder = planned("fixed", ["bisr"], 4), tmp_path / "run"
    stopped(plan, folder, 18, keep=6)
    shutil.copy(tmp_path / "earlier.pt", folder / "checkpoint.pt")
    run = train(plan, folder)
    assert run.records[1].epsilon == run.records[2].epsilon > plan.calibration.spent(12)
    _write(folder, [run])
    verdict = verify(folder, keys=[tmp_path / "run.key"])
    assert verdict.holds, verdict.to_text()


def test_a_record_holds_from_the_least_epsilon_that_is_computed(certified, tmp_path):
    """Bounds of other searches and certificates hold; what is less does not, in any copy."""
    folder, run = certified
    c, step = run.plan.calibration, run.records[0].step
    bound = c.sampling.epsilon(c.mechanism, c.participation, c.noise_multiplier, c.delta, step)
    certificate = c.spent(step)
    assert certificate < 0.95 * bound
    for epsilon in (certificate, bound, 1.01 * bound, c.epsilon):
        verdict = rewritten(folder, tmp_path / "copy", with_record(run, 0, epsilon))
        assert verdict.holds, verdict.to_text()
    for epsilon in (0.0, -1.0, 0.5 * certificate, 0.9999 * certificate, 1.0001 * c.epsilon):
        problem = spending.problem(with_record(run, 0, epsilon))
        assert "ε of records[0] after 6 steps must be" in problem
    verdict = rewritten(folder, tmp_path / "copy", with_record(run, 0, 0.9999 * certificate))
    assert [each.check for each in verdict.differences] == [EPSILONS]


def test_epsilon_of_a_whole_run_is_the_plans(trained, certified, tmp_path):
    """Lowered in run file, statement and page alike, and also where other software is named."""
    (exact,) = evidence.runs(trained)
    for folder, run in ((trained, exact), certified):
        least = run.plan.epsilon * (1.0 - 1e-6)
        software = {**run.statement.versions, "numpy": "1.0"}
        statement = replace(run.statement, epsilon=least)
        for other in (statement, replace(statement, versions=software)):
            verdict = rewritten(folder, tmp_path / "copy", replace(run, statement=other))
            assert EPSILONS in [each.check for each in verdict.differences]
        assert spending.problem(with_record(run, -1, least))
        assert not spending.problem(run)


def test_the_statement_of_a_part_of_a_run_is_a_bound_or_a_certificate(certified, tmp_path):
    _, run = certified
    c, whole = run.plan.calibration, run.statement
    bound, certificate = run.records[0].epsilon, c.spent(6)
    part = replace(run, records=run.records[:1])
    claim = replace(whole, steps_taken=6, epsilon=bound)
    stated = replace(claim, kind="bound", failure_probability=0.0, epsilon_without_sampling=None)
    drawn = replace(claim, epsilon=certificate)

    def failed(statement):
        folder = tmp_path / "part"
        folder.mkdir(exist_ok=True)
        _write(folder, [replace(part, statement=statement)])
        return [each.check for each in verify(folder).differences]

    assert failed(stated) == failed(drawn) == []
    # A bound must hold without draws.
    assert failed(replace(stated, epsilon=certificate)) == [EPSILONS]
    assert failed(replace(drawn, epsilon=0.9999 * certificate)) == [EPSILONS]
    # The whole run is certified, and says so.
    assert "statement: every field" in failed(replace(stated, epsilon=c.epsilon))
    # Not even where it is called a bound at an ε that is the same but for rounding.
    almost = replace(stated, epsilon=c.epsilon * (1.0 - 1e-10), steps_taken=whole.steps_taken)
    for statement in (almost, replace(almost, steps_taken=17)):
        again = spending.problem(replace(run, statement=statement))
        assert again or "statement: every field" in failed(statement)


def test_the_exact_epsilon_of_a_part_of_a_run_is_neither_less_nor_more(trained):
    (run,) = evidence.runs(trained)
    exact = run.plan.calibration.spent(6)
    for factor in (0.9999, 1.0, 1.0001):
        statement = replace(run.statement, steps_taken=6, epsilon=factor * exact)
        problem = spending.problem(replace(run, statement=statement, records=()))
        assert ("ε of statement after 6 steps" in problem) == (factor != 1.0)


def test_a_plan_that_prefers_a_cheaper_mechanism_holds(tmp_path):
    """Errors within 0.1 % are equal for planner and verification alike."""
    plan, folder = planned("fixed", ["bisr"], 15, momentum=0.0), tmp_path / "run"
    least = min(a.error for a in plan.alternatives if not a.reason)
    assert least * (1.0 + 1e-6) < plan.error <= choosing.EQUAL * least
    run = train(plan, folder)
    _write(folder, [run])
    verdict = verify(folder)
    assert verdict.holds, verdict.to_text()
    # The alternatives in another order, and the one with the least error as if it were chosen.
    first, second, *rest = plan.alternatives
    for other in (
        replace(plan, alternatives=(second, first, *rest), choice=1 - plan.choice),
        replace(plan, choice=0),
    ):
        verdict = rewritten(folder, tmp_path / "copy", replace(run, plan=other))
        assert CHOICE in [each.check for each in verdict.differences]


def test_the_choice_is_the_cheapest_of_what_is_nearly_the_best():
    made = planned("fixed", ["bisr"], 2).chosen
    assert made is not None

    def among(*costs):
        """Of alternatives with an error, a time and perhaps other fields."""
        return choosing.choice(
            [replace(made, error=e, step_cost=t, **dict(more)) for e, t, *more in costs]
        )

    assert among((1.0, 3.0), (1.0009, 2.0), (1.0011, 1.0)) == 1
    assert among((1.0, 2.0), (1.0005, 2.0)) == 0
    assert among((0.5, 1.0, ("kind", "estimate")), (1.0, 3.0)) == 1
    assert among((0.5, 1.0, ("reason", "needs memory")), (1.0, 3.0)) == 1
    assert among((None, None, ("kind", None)), (1.0, None)) == 1
    assert among((1.0, 1.0, ("kind", "estimate"))) is among() is None


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder of ``corrnoise train --compare`` with three runs."""
    folder = tmp_path_factory.mktemp("compared") / "runs"
    command = "train --data digits --model linear --batch-size 240 --epochs 1 --epsilon 8"
    options = ["--mechanism", "bisr", "--sampling", "balls-in-bins", "--compare"]
    assert main([*command.split(), *options, "--out", str(folder)]) == 0
    return folder


def test_runs_that_were_compared_hold(compared):
    names = re.search(r'data-runs="([^"]*)"', (compared / "report.html").read_text())
    labels = json.loads(names[1].replace("&#34;", '"'))
    assert len(labels) == 3
    assert labels != sorted(labels)  # the order of the page is not that of the files
    keys = sorted(compared.parent.rglob("*.key"))
    assert len(keys) == 3
    verdict = verify(compared, keys=keys)
    assert verdict.holds, verdict.to_text()
    assert all(each.status == "holds" for each in verdict.findings)


def test_the_order_of_a_page_is_checked(compared, tmp_path):
    page = (compared / "report.html").read_text()
    names = re.search(r'data-runs="([^"]*)"', page)[1]
    first, *others = names[1:-1].split(", ")
    swapped = "[" + ", ".join([first, *others[::-1]]) + "]"
    shutil.copytree(compared, tmp_path / "copy", ignore=shutil.ignore_patterns("*.pt*"))
    for other in (swapped, "[]", "{}", "[1, 2, 3]", ""):
        (tmp_path / "copy" / "report.html").write_text(page.replace(names, other))
        verdict = verify(tmp_path / "copy")
        assert {each.file for each in verdict.differences} == {"report.html"}, other


def test_the_checklist_says_of_participation_and_delta_what_holds():
    plan = planning.plan(
        num_examples=120, batch_size=20, epochs=2, epsilon=4.0, delta=0.01, sampling="poisson",
        mechanisms=["dp_sgd"],
    )  # fmt: skip
    run = pages.run(plan, "DP-SGD", 0.9)
    answers = {each.subject: each for each in evidence.checklist(run)}
    unit = "One example, which takes part in each step with probability 1/6 (1/b), any number of"
    assert answers["Unit of privacy"].answer.startswith(unit)
    assert "sensitivity" not in answers["Sensitivity"].answer
    assert run.statement.accountant in answers["Sensitivity"].answer
    assert "NOT below 1/120" in answers["Parameters"].answer
    assert answers["Parameters"].open
    fixed = {each.subject: each for each in evidence.checklist(pages.run(pages.fixed(), "a", 0.9))}
    assert "at most 5 times (k), at least 23 steps (b) apart" in fixed["Unit of privacy"].answer
    assert "the sensitivity of C is" in fixed["Sensitivity"].answer
    assert not fixed["Parameters"].open
