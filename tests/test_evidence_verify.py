"""``corrnoise verify``: a real run holds, and every edit of its files is found."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import shutil

import pytest

from corrnoise import evidence, planning
from corrnoise.apps import datasets, training
from corrnoise.apps.cli import main
from corrnoise.apps.cli.train import _write
from corrnoise.evidence import verify


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
