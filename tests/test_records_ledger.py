from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corrnoise.records.ledger import Ledger, _code_of, _line, read_entries

HEADER = {"run_id": "a", "key_fingerprint": "f", "max_grad_norm": 1.0}


KEY = b"of the codes"


def filled(path, steps, key=b""):
    ledger = Ledger(HEADER, path, key)
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
    entries = read_entries(path)
    assert [entry["step"] for entry in entries[1:]] == list(range(6))
    assert len(path.read_bytes().splitlines()) == 7


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


@given(cut=st.integers(2, 80))
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
    assert read_entries(path)[0]["key_fingerprint"] == "f"


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
    with pytest.raises(ValueError, match=r"line 3 of .* was changed"):
        Ledger(HEADER, path)


def test_steps_out_of_order_are_refused_even_with_right_codes(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 2)
    header, first, second = read_entries(path)
    found, code = b"", ""
    for entry in (header, second, first):
        line = _line(entry, code, b"")
        found, code = found + line, _code_of(line)
    path.write_bytes(found)
    with pytest.raises(ValueError, match="has 1 in place of step 0"):
        Ledger(HEADER, path)


@pytest.mark.parametrize("where", ["header", "middle", "last"])
def test_every_flipped_bit_is_refused(tmp_path, where):
    """Of a line that is not torn: also of the last one, and of its end."""
    path = tmp_path / "ledger"
    filled(path, 3, KEY)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    number = {"header": 0, "middle": 2, "last": 3}[where]
    start = sum(map(len, lines[:number]))
    for place in range(start, start + len(lines[number])):
        for bit in (0, 3, 7):
            data = bytearray(whole)
            data[place] ^= 1 << bit
            path.write_bytes(data)
            with pytest.raises(ValueError):  # noqa: PT011
                Ledger(HEADER, path, KEY)
            assert path.read_bytes() == bytes(data)  # left alone
    path.write_bytes(whole)
    assert Ledger(HEADER, path, KEY).num_released == 3


def test_the_codes_need_the_key(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 2, KEY)
    with pytest.raises(ValueError, match="belongs to another key"):
        Ledger(HEADER, path, b"another")


def test_two_ledgers_cannot_be_spliced(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    filled(one, 4, KEY)
    ledger = Ledger({**HEADER, "run_id": "b"}, two, KEY)
    for step in range(4):
        ledger.record(step, f"{step + 7:04x}")
    ledger.close()
    mixed = (
        one.read_bytes().splitlines(keepends=True)[:3]
        + two.read_bytes().splitlines(keepends=True)[3:]
    )
    one.write_bytes(b"".join(mixed))
    with pytest.raises(ValueError, match="line 4"):
        Ledger(HEADER, one, KEY)


@pytest.mark.parametrize(
    "contents", [b"corrnoise-key-v1 " + b"ab" * 32 + b"\n", b"\0", b"notes\n", b"a,b\n1,2\n", b"{}"]
)
def test_a_file_that_is_no_ledger_is_never_overwritten(tmp_path, contents):
    path = tmp_path / "file"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match="ledger must be"):
        Ledger(HEADER, path)
    assert path.read_bytes() == contents


def test_a_new_ledger_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        filled(tmp_path / "ledger", 1)
    finally:
        os.umask(before)
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o600


def test_a_fork_neither_records_nor_keeps_the_lock(tmp_path):
    """A data loader's worker outlives a trainer that was killed; the run can still go on."""
    path = tmp_path / "ledger"
    code = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_records_ledger import HEADER
        from corrnoise.records import Ledger
        ledger = Ledger(HEADER, {str(path)!r})
        ledger.record(0, "0000")
        if os.fork() == 0:
            try:
                ledger.record(1, "0001")
            except ValueError:
                print("refused", flush=True)
            time.sleep(60)
        time.sleep(60)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert trainer.stdout.readline() == "refused\n"
        with pytest.raises(ValueError, match="is in use"):
            Ledger(HEADER, path)
        trainer.kill()
        trainer.wait()
        assert Ledger(HEADER, path).num_released == 1
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.stdout.close()


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
    assert read_entries(path)[0]["key_fingerprint"] == "other"


def test_an_entry_that_lacks_only_its_end_counts(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 3)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    assert Ledger(HEADER, path).num_released == 3
    assert path.read_bytes() == whole


PUBLISHING = {**HEADER, "publishes": "checkpoints"}


def test_steps_after_the_last_publication_may_be_repeated(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(PUBLISHING, path, KEY)
    for step in range(5):
        ledger.record(step, f"{step:04x}")
        if step == 2:
            ledger.publish()
            ledger.publish()  # once is enough
    assert ledger.num_released == 5  # they may still leave this process
    ledger.close()
    again = Ledger(PUBLISHING, path, KEY)
    assert again.num_released == 3
    with pytest.raises(ValueError, match="step 2 was released before with another gradient"):
        again.record(2, "ffff")
    again.record(3, "ffff")
    again.publish()
    again.close()
    third = Ledger(PUBLISHING, path, KEY)
    assert third.num_released == 4
    with pytest.raises(ValueError, match="step 3 was released before with another gradient"):
        third.record(3, "0003")
    assert [next(iter(entry)) for entry in read_entries(path)[1:]] == [
        *("step", "step", "step", "published", "step", "step", "resumed", "step", "published"),
    ]


def test_a_publication_cannot_be_taken_back(tmp_path):
    path = tmp_path / "ledger"
    ledger = Ledger(PUBLISHING, path, KEY)
    for step in range(3):
        ledger.record(step, f"{step:04x}")
    ledger.publish()
    ledger.close()
    whole = path.read_bytes()
    for bit in range(8):  # of the end of the last line
        data = bytearray(whole)
        data[-1] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(ValueError):  # noqa: PT011
            Ledger(PUBLISHING, path, KEY)
    os.truncate(path, len(whole) - 1)
    path.write_bytes(whole[:-1])
    assert Ledger(PUBLISHING, path, KEY).num_released == 3


def test_every_step_counts_where_steps_are_published(tmp_path):
    path = tmp_path / "ledger"
    filled(path, 3, KEY)
    ledger = Ledger(HEADER, path, KEY)
    ledger.publish()
    assert ledger.num_released == 3
    assert len(read_entries(path)) == 4


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_ledger_goes_on_after_an_interrupted_write(tmp_path, monkeypatch, when):
    """Ctrl-C while an entry is forced to the disk, and the user goes on in the same process."""
    path, sync = tmp_path / "ledger", os.fsync
    ledger = Ledger(HEADER, path, KEY)
    ledger.record(0, "0000")

    def interrupted(handle):
        if when == "after":
            sync(handle)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.record(1, "0001")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"must be open.*new engine"):
        ledger.record(1, "0001")
    again = Ledger(HEADER, path, KEY)
    assert again.num_released == 2
    for step in range(1, 4):
        again.record(step, f"{step:04x}")
    again.close()
    assert Ledger(HEADER, path, KEY).num_released == 4


def test_a_torn_line_after_lost_steps_was_never_released(tmp_path):
    """Where checkpoints are published, no step may be left whose digest has a known length."""
    path = tmp_path / "ledger"
    for _ in range(2):
        ledger = Ledger(PUBLISHING, path, KEY)
        ledger.record(0, "0123456789abcdef")
        ledger.close()
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(2, last):
        path.write_bytes(whole[:-cut])
        ledger = Ledger(PUBLISHING, path, KEY)
        assert ledger.num_released == 0
        ledger.record(0, "f" * 16)
        ledger.close()


def test_the_json_of_a_plan_is_shown_only_where_nothing_else_differs(tmp_path):
    path = tmp_path / "ledger"
    planned = {**HEADER, "plan": '{"epsilon": 4}', "noise_multiplier": 9.5}
    first = Ledger(planned, path)
    first.record(0, "00")
    first.close()
    with pytest.raises(ValueError, match=r"differs in noise_multiplier \(was 9.5, is 9.0\); res"):
        Ledger({**planned, "plan": '{"epsilon": 5}', "noise_multiplier": 9.0}, path)
    with pytest.raises(ValueError, match=r"differs in plan \(was '{\"epsilon\": 4}'"):
        Ledger({**planned, "plan": '{"epsilon": 5}'}, path)


def test_only_what_differs_in_a_header_is_shown(tmp_path):
    path = tmp_path / "ledger"
    long = "x" * 200
    settings = {"learning_rate": 0.123456789012345678, "model": "mlp", "seed": 0, "also": long}
    first = Ledger({**HEADER, "settings": settings}, path)
    first.record(0, "00")
    first.close()
    again = {**HEADER, "settings": {**settings, "seed": 3, "also": long + "y"}}
    with pytest.raises(ValueError, match="belong to this run") as caught:
        Ledger(again, path)
    said = str(caught.value)
    assert "differs in settings.seed (was 0, is 3); settings.also (was …" in said
    assert "xy'" in said
    assert "learning_rate" not in said
    assert len(said) < 500
    with pytest.raises(ValueError, match=r"settings.also \(was '.*…, is missing\)"):
        Ledger({**HEADER, "settings": {k: v for k, v in settings.items() if k != "also"}}, path)
    with pytest.raises(ValueError, match=r"differs in settings.new \(was missing, is None\);"):
        Ledger({**HEADER, "settings": {**settings, "new": None}}, path)
