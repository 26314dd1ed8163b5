"""A key belongs to one run, and a ledger that was tampered with does not pass for a new one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from training import KEY, loader, model, private, train, weights

from corrnoise.noise import Key
from corrnoise.noise.generator.key import key_use
from corrnoise.records import keys
from corrnoise.torch import PrivacyEngine, setup
from corrnoise.torch.fingerprint import PositionHash


def begin(folder, steps=3, ledger="run.ledger", **options):
    engine = PrivacyEngine(key=folder / "run.key", ledger=folder / ledger)
    net, optimizer, batches = private(engine, **options)
    if steps:
        train(net, optimizer, batches, steps=steps)
    engine.close()
    return engine


@pytest.mark.parametrize("damage", ["emptied", "touched", "header", "garbage", "another"])
def test_a_damaged_ledger_with_a_used_key_is_refused(tmp_path, damage):
    engine = begin(tmp_path)
    assert key_use(tmp_path / "run.key").run_id == engine._setup.header["run_id"]
    assert key_use(tmp_path / "run.key").released
    ledger = tmp_path / "run.ledger"
    lines = ledger.read_bytes().splitlines(keepends=True)
    if damage == "emptied":
        os.truncate(ledger, 0)
    elif damage == "touched":
        ledger.unlink()
        ledger.touch()
    elif damage == "header":
        ledger.write_bytes(lines[0])
    elif damage == "garbage":
        ledger.write_bytes(b"garbage\n")
    else:
        (tmp_path / "other").mkdir()
        begin(tmp_path / "other")
        ledger.write_bytes((tmp_path / "other" / "run.ledger").read_bytes())
    before = ledger.read_bytes()
    with pytest.raises(ValueError, match="ledger must be"):
        begin(tmp_path)
    assert ledger.read_bytes() == before
    ledger.write_bytes(b"".join(lines))
    begin(tmp_path, steps=6)  # the run itself still goes on


def test_a_run_that_released_nothing_binds_nobody(tmp_path):
    begin(tmp_path, steps=0)
    assert not key_use(tmp_path / "run.key").released
    begin(tmp_path, steps=3, max_grad_norm=2.0)
    assert key_use(tmp_path / "run.key").released


@pytest.mark.parametrize("left", [0, 20])
def test_a_process_killed_while_it_begins_anew_does_not_end_the_run(tmp_path, left):
    """Nothing was released yet: the header is written again, over what the kill has left of it."""
    begin(tmp_path, steps=0)
    os.truncate(tmp_path / "run.ledger", left)
    begin(tmp_path, steps=3)
    os.truncate(tmp_path / "run.ledger", left)
    with pytest.raises(ValueError, match="ledger must be the one"):
        begin(tmp_path)


def test_a_key_file_that_names_no_run_is_refused_before_a_step(tmp_path):
    begin(tmp_path)
    key, ledger = tmp_path / "run.key", tmp_path / "run.ledger"
    os.truncate(key, key.read_bytes().index(b"\n") + 1)
    before = ledger.read_bytes()
    with pytest.raises(ValueError, match=r"names no run.*pass Key.load"):
        private(PrivacyEngine(key=key, ledger=ledger))
    assert ledger.read_bytes() == before
    engine = PrivacyEngine(key=Key.load(key), ledger=ledger)
    net, optimizer, batches = private(engine)
    train(net, optimizer, batches, steps=5)
    assert engine.steps_released == 5


def test_a_key_that_another_process_saved_at_the_same_moment_is_refused(tmp_path, monkeypatch):
    opened = setup._open_ledger

    def late(*args):
        book = opened(*args)
        KEY.save(tmp_path / "run.key", run_id="ab")
        return book

    monkeypatch.setattr(setup, "_open_ledger", late)
    with pytest.raises(ValueError, match="another process has begun a run"):
        begin(tmp_path)
    monkeypatch.undo()
    assert begin(tmp_path).key == KEY  # the ledger is free, and the key has its run


def test_a_key_object_serves_one_run():
    key = Key.generate()
    keys._RELEASED.clear()

    def engine(**options):
        net = model()
        return PrivacyEngine(key=key).make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            **options,
        )

    usual = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "epochs": 3, "sampling": "fixed"}
    engine(data_loader=loader(), **usual)  # nothing was released yet
    net, optimizer, batches = engine(data_loader=loader(), **usual)
    train(net, optimizer, batches, steps=1)
    with pytest.raises(ValueError, match="another run of this process has released steps"):
        engine(data_loader=loader(), **usual)


def test_a_ledger_path_that_is_a_key_file_is_left_alone(tmp_path):
    KEY.save(tmp_path / "precious")
    before = (tmp_path / "precious").read_bytes()
    with pytest.raises(ValueError, match="ledger must be"):
        private(PrivacyEngine(ledger=tmp_path / "precious"))
    assert (tmp_path / "precious").read_bytes() == before


_HASHER = PositionHash(KEY.subkey("positions"))


def digest(*tensors):
    return int(_HASHER(tensors))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 1000, (1 << 14) + 3, (1 << 14) * 3])
def test_the_hash_of_a_gradient_depends_on_places(kind, size):
    g = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(kind)
    assert digest(g) == digest(g.clone()) == digest(g.view(-1, 1))
    changed = [-g, g.flip(0), g.roll(1), torch.cat([g, g[:1]])]
    pair = g.clone()
    pair[0], pair[-1] = g[-1], g[0]
    changed.append(pair)
    for other in changed:
        assert digest(other) != digest(g)
    assert int(PositionHash(b"another")([g])) != digest(g)


def test_opposite_halves_do_not_collide():
    g = torch.randn(50)
    assert digest(torch.cat([g, -g])) != digest(torch.cat([-g, g]))
    assert digest(g, -g) != digest(-g, g)  # also where they are two parameters


INTERPRETED = """
import torch
from corrnoise.torch.fingerprint import _ROW, PositionHash, row_sums
from corrnoise.torch import hash_kernel

columns = PositionHash(b"key")._columns
for size in (1, 1000, _ROW, _ROW + 3, 3 * _ROW - 1):
    for kind in (torch.int32, torch.int16):
        most = torch.iinfo(kind).max
        bits = torch.randint(-most, most, (size,), dtype=kind)
        assert torch.equal(hash_kernel.row_sums(bits, columns), row_sums(bits, columns)), size
"""


def test_the_kernel_gives_the_same_sums():
    """By Triton's interpreter, on the CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    code = ["-W", "ignore", "-c", INTERPRETED]
    subprocess.run([sys.executable, *code], check=True, env=environment)


def test_one_key_serves_one_run_however_early_both_began(tmp_path):
    """As in a notebook that makes all of its runs first."""
    keys._RELEASED.clear()
    key, runs = Key.generate(), []
    for name in ("one", "other"):
        engine = PrivacyEngine(key=key, ledger=tmp_path / name)
        runs.append((engine, *private(engine)))
    train(*runs[0][1:], steps=2)
    before = weights(runs[1][1])
    with pytest.raises(ValueError, match="key must be of one run"):
        train(*runs[1][1:], steps=1)
    train(*runs[0][1:], steps=1)
    assert [run[0].steps_released for run in runs] == [3, 0]
    assert torch.equal(weights(runs[1][1]), before)


GO_ON = """
import sys
from pathlib import Path
from test_torch_keys import begin
try:
    begin(Path(sys.argv[1]), ledger=sys.argv[2], steps=int(sys.argv[3]))
    print("taken")
except ValueError as refused:
    print(refused)
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of torch's threads
def test_two_processes_cannot_go_on_with_copies_of_one_ledger(tmp_path):
    """Each would know nothing of the steps that the other releases with the same noise."""

    def elsewhere(ledger):
        code = [sys.executable, "-W", "ignore", "-c", GO_ON, tmp_path, ledger, "4"]
        folder = os.path.dirname(__file__)
        return subprocess.run(code, cwd=folder, check=True, capture_output=True, text=True).stdout

    begin(tmp_path, steps=2)
    (tmp_path / "copy").write_bytes((tmp_path / "run.ledger").read_bytes())
    engine = PrivacyEngine(key=tmp_path / "run.key", ledger=tmp_path / "run.ledger")
    run = private(engine)
    child = os.fork()  # as a worker of a data loader: it must not keep the lock
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert "key must be in use by one process only" in elsewhere("copy")
        train(*run, steps=3)
        engine.close()
        assert elsewhere("run.ledger") == "taken\n"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
