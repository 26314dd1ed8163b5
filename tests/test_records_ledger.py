from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrnoise.records.ledger import Ledger, read_entries

HEADER = {"run_id": "a", "key_fingerprint": "f", "max_grad_norm": 1.0}


def filled(path, steps):
    ledger = Ledger(HEADER, path)
    for step in range(steps):
        ledger.record(step, f"{step:04x}")
    ledger.close()


def test_a_reopened_ledger_knows_every_step(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 5)
    ledger = Ledger({**HEADER, "run_id": "b"}, path)
    assert ledger.num_released == 5
    assert ledger.header["run_id"] == "a"  # a resumed run keeps its name
    for step in range(5):
        ledger.record(step, f"{step:04x}")
    ledger.record(5, "0005")
    entries, size = read_entries(path)
    assert [entry["step"] for entry in entries[1:]] == list(range(6))
    assert size == path.stat().st_size


def test_a_step_cannot_be_released_with_another_gradient(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 5)
    ledger = Ledger(HEADER, path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="step 3 was released before with another gradient"):
        ledger.record(3, "ffff")
    with pytest.raises(ValueError, match="step must be 5"):
        ledger.record(6, "0006")
    assert path.read_bytes() == before


@given(cut=st.integers(1, 60))
def test_a_torn_last_line_was_never_released(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("torn") / "ledger"
    filled(path, 3)
    whole = path.read_bytes()
    entries = whole.split(b"\n")
    last = len(entries[-2]) + 1
    os.truncate(path, len(whole) - min(cut, last))
    ledger = Ledger(HEADER, path)
    assert ledger.num_released == 2
    ledger.record(2, "0002")
    ledger.close()
    assert path.read_bytes() == whole


def test_a_torn_header_is_a_new_ledger(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 0)
    os.truncate(path, 20)
    assert Ledger(HEADER, path).num_released == 0
    assert read_entries(path)[0][0]["key_fingerprint"] == "f"


def test_damage_elsewhere_is_refused(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 4)
    data = bytearray(path.read_bytes())
    data[data.index(b"0001")] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"line 3 of .* is damaged"):
        Ledger(HEADER, path)


def test_a_missing_step_is_refused(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(ValueError, match="has 2 in place of step 1"):
        Ledger(HEADER, path)


def test_another_run_is_refused_and_the_difference_is_named(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 2)
    with pytest.raises(ValueError, match=r"max_grad_norm \(was 1.0, is 2.0\)"):
        Ledger({**HEADER, "max_grad_norm": 2.0}, path)
    Ledger(HEADER, path).close()  # the refusal left the file alone, and unlocked


def test_two_processes_cannot_continue_one_run(tmp_path):
    path = tmp_path / "ledger"
    first = Ledger(HEADER, path)
    with pytest.raises(ValueError, match="is in use"):
        Ledger(HEADER, path)
    first.close()
    Ledger(HEADER, path).close()


def test_a_ledger_that_came_to_be_before_the_lock_is_read(tmp_path, monkeypatch):
    """Another process wrote and closed it between the look at the path and the lock."""
    path = tmp_path / "ledger"
    filled(path, 5)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    ledger = Ledger(HEADER, path)
    assert ledger.num_released == 5
    with pytest.raises(ValueError, match="step 0 was released before with another gradient"):
        ledger.record(0, "ffff")


def test_a_failed_write_releases_nothing(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    ledger = Ledger(HEADER, path)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        ledger.record(0, "0000")
    monkeypatch.undo()
    assert ledger.num_released == 0
    with pytest.raises(ValueError, match="must be open"):
        ledger.record(0, "0000")


def test_a_ledger_without_steps_binds_nobody(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 0)
    ledger = Ledger({**HEADER, "key_fingerprint": "other"}, path)
    ledger.record(0, "0000")
    ledger.close()
    assert read_entries(path)[0][0]["key_fingerprint"] == "other"
