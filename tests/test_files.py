"""Files are whole or not there, private where they must be, and locked by one process alone."""

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import time

import portalocker
import pytest

from corrnoise import _files
from corrnoise.records import Ledger

KILLS = 20
SIZE = 300_000


def only(folder, *names):
    """Nothing but these files is in the folder: no temporary one was left."""
    assert sorted(place.name for place in folder.iterdir()) == sorted(names)


@pytest.fixture
def no_umask():
    old = os.umask(0)
    yield
    os.umask(old)


# Replacing.


@pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_file(tmp_path, exception):
    path, previous = tmp_path / "file", tmp_path / "previous"
    path.write_bytes(b"old")

    def fail():
        with _files.replacing(path, previous=previous) as file:
            file.write(b"half of the ne")
            file.flush()
            raise exception

    with pytest.raises(exception):
        fail()
    assert path.read_bytes() == b"old"
    only(tmp_path, "file")


def test_a_block_that_raises_leaves_no_file_where_there_was_none(tmp_path):
    with pytest.raises(ValueError, match="stop"), _files.replacing(tmp_path / "file"):
        raise ValueError("stop")
    only(tmp_path)


def test_the_file_is_replaced_when_the_block_ends_and_not_before(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with _files.replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    only(tmp_path, "file")


def test_the_previous_file_is_kept(tmp_path):
    path, previous = tmp_path / "file", tmp_path / "file.previous"
    for number in range(4):
        with _files.replacing(path, previous=previous) as file:
            file.write(b"%d" % number)
        assert path.read_bytes() == b"%d" % number
        if number == 0:
            only(tmp_path, "file")
        else:
            assert previous.read_bytes() == b"%d" % (number - 1)
            only(tmp_path, "file", "file.previous")


def test_the_previous_file_may_be_the_same_one(tmp_path):
    """As after a kill between the two renames."""
    path, previous = tmp_path / "file", tmp_path / "file.previous"
    path.write_bytes(b"old")
    os.link(path, previous)
    with _files.replacing(path, previous=previous) as file:
        file.write(b"new")
    assert (path.read_bytes(), previous.read_bytes()) == (b"new", b"old")
    only(tmp_path, "file", "file.previous")


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="files without a name are Linux's")
def test_a_kill_inside_the_block_leaves_no_half_of_a_file(tmp_path):
    """The file that is being written has no name yet."""
    (tmp_path / "file").write_bytes(b"old")
    with _files.replacing(tmp_path / "file") as file:
        file.write(b"half of the ne")
        file.flush()
        only(tmp_path, "file")


def test_without_files_that_have_no_name_a_temporary_one_is_used(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    _files.create(tmp_path / "secret", b"secret")
    for number in range(2):
        with _files.replacing(tmp_path / "file", previous=tmp_path / "previous") as file:
            file.write(b"%d" % number)
            assert len(list(tmp_path.iterdir())) == 2 + number
    assert (tmp_path / "file").read_bytes() == b"1"
    assert (tmp_path / "previous").read_bytes() == b"0"
    only(tmp_path, "secret", "file", "previous")


@pytest.mark.parametrize("make", [_files.write, _files.create])
def test_a_full_disk_is_reported_with_the_file(tmp_path, monkeypatch, make):
    def fail(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*name'") as caught:
        make(tmp_path / "name", b"data")
    assert caught.value.filename == str(tmp_path / "name")
    with (tmp_path / "name").open("a+b") as file, pytest.raises(OSError, match=r"device: '.*name'"):
        _files.append(file, b"data")
    with pytest.raises(OSError, match=r"device: '.*name'"):
        _files.extend(tmp_path / "name", b"data")


def test_a_failed_replacement_leaves_both_files(tmp_path, monkeypatch):
    path, previous = tmp_path / "file", tmp_path / "previous"
    path.write_bytes(b"old")
    previous.write_bytes(b"older")

    def fail(handle):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="full"), _files.replacing(path, previous=previous) as file:
        file.write(b"new")
    assert (path.read_bytes(), previous.read_bytes()) == (b"old", b"older")
    only(tmp_path, "file", "previous")


def test_contents_and_folder_are_forced_to_the_disk_in_this_order(tmp_path, monkeypatch):
    path, synced, real = tmp_path / "file", [], os.fsync

    def recorded(handle):
        is_folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        synced.append(("folder" if is_folder else "file", path.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    for make in (_files.write, _files.create):
        synced.clear()
        make(path, b"data")
        # The file before it has its name, the folder after.
        assert synced == [("file", False), ("folder", True)]
        path.unlink()


def test_text_is_utf_8(tmp_path):
    _files.write(tmp_path / "file", "ε = 3\n")
    assert (tmp_path / "file").read_bytes() == "ε = 3\n".encode()
    _files.write(str(tmp_path / "file"), b"\xff")
    assert (tmp_path / "file").read_bytes() == b"\xff"


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0, 0o666)])
def test_a_written_file_has_the_mode_of_the_umask(tmp_path, umask, mode):
    old = os.umask(umask)
    try:
        _files.write(tmp_path / "file", b"data")
        with _files.replacing(tmp_path / "secret", mode=0o600):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


# Creating.


@pytest.mark.usefixtures("no_umask")
def test_a_created_file_is_its_owners_alone_and_is_never_replaced(tmp_path):
    path = tmp_path / "file"
    _files.create(path, b"secret")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        _files.create(path, b"other")
    assert path.read_bytes() == b"secret"
    only(tmp_path, "file")


@pytest.mark.usefixtures("no_umask")
def test_a_created_file_is_nobody_elses_at_any_moment(tmp_path, monkeypatch):
    modes = []
    real = os.fsync

    def recorded(handle):
        modes.extend(stat.S_IMODE(place.stat().st_mode) for place in tmp_path.iterdir())
        real(handle)

    monkeypatch.setattr(os, "fsync", recorded)
    _files.create(tmp_path / "file", b"secret")
    assert modes
    assert set(modes) == {0o600}


def test_create_does_not_follow_a_link(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(FileExistsError):
        _files.create(link, b"secret")
    assert not target.exists()


# Killed at random moments.

WRITER = f"""
import sys
from corrnoise import _files

print("ready", flush=True)
number = 0
while True:
    number += 1
    with _files.replacing(sys.argv[1], previous=sys.argv[2]) as file:
        file.write(b"%08d" % number)
        file.flush()
        file.write(b"%08d" % number * ({SIZE} // 8 - 1))
    _files.write(sys.argv[3], b"%08d" % number * ({SIZE} // 8))
"""


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path):
    places = [tmp_path / name for name in ("file", "previous", "written")]
    moments, numbers = random.Random(7), []
    for _ in range(KILLS):
        command = [sys.executable, "-c", WRITER, *map(str, places)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0.0, 0.08))
            writer.send_signal(signal.SIGKILL)
            assert writer.wait(timeout=60) == -signal.SIGKILL
        for place in places:
            if place.exists():
                data = place.read_bytes()
                assert len(data) == SIZE
                assert data == data[:8] * (SIZE // 8)
                numbers.append(int(data[:8]))
    assert all(place.exists() for place in places)
    assert max(numbers) > 1  # some were killed among many writes


# Locks.

HOLDER = """
import sys
from corrnoise import _files

file = open(sys.argv[1], "a+b")
try:
    _files.lock(file)
except BlockingIOError:
    sys.exit(3)
print("locked", flush=True)
sys.stdin.readline()
"""


def holder(path):
    command = [sys.executable, "-c", HOLDER, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_lock_is_held_by_one_process_and_ends_with_it(tmp_path):
    path = tmp_path / "file"
    with holder(path) as first:
        assert first.stdout.readline() == "locked\n"
        with path.open("a+b") as mine, pytest.raises(BlockingIOError):
            _files.lock(mine)
        with pytest.raises(ValueError, match="ledger must be open in one process only"):
            Ledger({"run_id": "a"}, path)
        with holder(path) as second:
            assert second.wait(timeout=60) == 3
        first.send_signal(signal.SIGKILL)
        assert first.wait(timeout=60) == -signal.SIGKILL
    with path.open("a+b") as mine:
        _files.lock(mine)
        with holder(path) as third:
            assert third.wait(timeout=60) == 3
    with holder(path) as fourth:  # closing the file gave the lock back
        assert fourth.stdout.readline() == "locked\n"
        fourth.communicate("\n", timeout=60)
        assert fourth.returncode == 0


def test_a_file_system_without_locks_is_refused_by_the_ledger(tmp_path, monkeypatch):
    def fail(file, flags):
        raise portalocker.LockException(
            portalocker.LockException.LOCK_FAILED, os.strerror(errno.ENOLCK), fh=file
        )

    monkeypatch.setattr(portalocker, "lock", fail)
    path = tmp_path / "ledger"
    with path.open("a+b") as file, pytest.raises(OSError, match="No locks available") as caught:
        _files.lock(file)
    assert not isinstance(caught.value, BlockingIOError)
    with pytest.raises(ValueError, match="ledger must be in a folder whose file system") as caught:
        Ledger({"run_id": "a"}, path)
    message = str(caught.value)
    assert "No locks available" in message
    assert "choose another folder" in message
    assert "\n" not in message
    monkeypatch.undo()
    Ledger({"run_id": "a"}, path).close()  # the refusal left the file closed
