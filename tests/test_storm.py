"""A bounded storm: ``benchmarks/storm.py`` with as many events as it takes to reach every file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
WRITERS = {"ledger", "key", "mark of use", "checkpoint", "plan", "run", "statement", "report"}
FILES = {
    *("run.key", "run.ledger", "model.pt", "model.pt.previous", "plan.json", "out.key", "ledger"),
    *("checkpoint.pt", "checkpoint.pt.previous", "run.json", "statement.txt", "report.html"),
}
COUNTS = {
    "kill": len(WRITERS),
    "begin": 2,
    "full": len(WRITERS),
    "small": 1,
    "limit": 2,
    "interrupt": 3,
    "damage": len(FILES),
    "plan": 3,
    "two": 3,
    "fork": 3,
}

# Then two storms over code that was broken on purpose, which they must notice.
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import storm
folder, *counts = sys.argv[2:]
storm.main(["--seed", "7", "--folder", folder, "--json", folder + "/result", *counts])

from corrnoise import _files
from corrnoise.records import Ledger
whole = Ledger.record
Ledger.record = lambda *_: None
assert storm.main(["--seed", "7", "--folder", folder, "limit=1"]) == 1
Ledger.record, _files.lock = whole, lambda file: None
assert storm.main(["--seed", "1", "--folder", folder, "two=3"]) == 1
"""


def test_a_bounded_storm_over_every_file_releases_nothing_wrong(tmp_path):
    counts = [f"{kind}={count}" for kind, count in COUNTS.items()]
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(BENCHMARKS), str(tmp_path), *counts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^wrong: limit: .*\bledger (must be|has|knows)\b", done.stdout, re.MULTILINE)
    assert re.search(
        r"^wrong: two: .*ledger must be as this run wrote it", done.stdout, re.MULTILINE
    )
    result = json.loads((tmp_path / "result").read_text())
    rows = {row["kind"]: row for row in result["rows"]}
    assert sum(row["wrong"] for row in rows.values()) == 0, done.stdout
    if "small" not in rows:  # not every system lets users mount one
        assert "that kind is left out" in done.stdout
    assert rows.keys() | {"small"} == COUNTS.keys()
    for kind, row in rows.items():
        assert row["events"] == COUNTS[kind]
        if kind in ("kill", "begin", "full", "small", "limit", "interrupt"):
            assert row["resumed"] == COUNTS[kind]
    assert result["subjects"]["kill"].keys() == WRITERS
    assert result["subjects"]["full"].keys() == WRITERS
    assert result["subjects"]["damage"].keys() == {f"{name}, a bit flipped" for name in FILES}
    assert rows["damage"]["refused"] >= 2  # the ledgers, at least
    assert rows["damage"]["resumed"] >= 5  # checkpoints and the statement, at least
    assert rows["two"]["refused"] >= 1
    assert (rows["fork"]["refused"], rows["fork"]["resumed"]) == (2, 1)
    assert [place.name for place in tmp_path.iterdir()] == ["result"]  # nothing else is left


@pytest.fixture
def storm(monkeypatch):
    """The script, over events that are made up; it does not unshare anything of this process."""
    spec = importlib.util.spec_from_file_location("storm", BENCHMARKS / "storm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_small_disk", lambda folder: nullcontext())
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ends = []
    made = types.SimpleNamespace(
        kinds={"kill": None, "two": None}, make=lambda kind: ends.pop(0)(kind)
    )
    process = types.SimpleNamespace(end_all=lambda: ends.append("no process is left"))
    for name, value in {
        "storm_events": {"Events": lambda *_: made},
        "storm_process": {"Process": process},
        "storm_runs": {"warm_up": lambda: None},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**value))
    yield module, ends
    signal.signal(signal.SIGINT, handlers[0])
    signal.signal(signal.SIGTERM, handlers[1])


def ended(end):
    return lambda kind: types.SimpleNamespace(subject="a file", end=end, why="the reason")


def interrupted(times):
    def interrupt(kind):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        return ended("resumed")(kind)

    return interrupt


@pytest.mark.parametrize("times", [1, 2])
def test_a_storm_that_is_interrupted_prints_its_counts(storm, capsys, times):
    """After the event of the moment, or at once the second time."""
    module, ends = storm
    ends += [ended("resumed"), ended("refused"), interrupted(times)]
    if times == 2:
        ends.insert(2, ended("resumed"))
    assert module.main([]) == 0
    assert ends == ["no process is left"]
    out = capsys.readouterr().out
    assert "interrupted\n" in out
    assert f"| {module.KINDS['kill']} | 2 | 2 | 0 | 0 |\n" in out
    assert f"| {module.KINDS['two']} | 1 | 0 | 1 | 0 |\n" in out
    assert "| all | 3 | 2 | 1 | 0 |\n" in out


def test_a_storm_says_what_is_wrong(storm, capsys):
    module, ends = storm
    ends += [ended("resumed"), ended("resumed"), ended("wrong"), ended("refused")]
    assert module.main(["--rounds", "2"]) == 1
    out = capsys.readouterr().out
    assert "wrong: kill: a file: the reason\n" in out
    assert "| all | 4 | 2 | 1 | 1 |\n" in out
