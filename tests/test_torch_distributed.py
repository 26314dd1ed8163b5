"""Real processes on gloo: every rank makes its own slice of one noise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import trained, with_adamw
from training import model, weights

from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.records.ledger import read_entries
from corrnoise.torch import PrivacyEngine


def ended(script, *arguments):
    """Run a script of several ranks to its end."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def run(kind, world, folder, mechanism):
    ended("ranks.py", kind, world, folder, mechanism)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


SHARDED = """
import os, torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import private
from corrnoise.torch import PrivacyEngine
torch.distributed.init_process_group("gloo", rank=0, world_size=1)
for layer in (nn.PReLU(), nn.LayerNorm(9)):
    net = fully_shard(nn.Sequential(nn.Linear(12, 9), layer, nn.Linear(9, 2)),
                      mesh=init_device_mesh("cpu", (1,)))
    try:
        private(PrivacyEngine(), net=net, grad_sample_mode="one_pass")
        print("taken")
    except ValueError as refused:
        print(refused)
torch.distributed.destroy_process_group()
"""


def test_layers_that_run_again_cannot_be_sharded(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    path = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, **where, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "must have a handler, got none for '1' (PReLU)" in first
    assert second == "taken"


@pytest.mark.parametrize(
    ("kind", "world", "mechanism"),
    [
        ("ddp", 2, "bisr"),
        ("ddp", 4, "blt"),
        ("fsdp-ghost", 2, "bsr"),
        ("ddp-own", 2, "bisr"),
        ("ddp-own", 4, "blt"),
        ("accelerate-own", 2, "bisr"),
        ("fsdp-own", 2, "bsr"),
        ("fsdp-own", 4, "bisr"),
        ("fsdp-own-adamw", 2, "bisr"),
    ],
)
def test_many_processes_train_as_one_does(tmp_path, kind, world, mechanism):
    found = run(kind, world, tmp_path, mechanism)
    key = Key.load(tmp_path / "key")
    engine, net = PrivacyEngine(key=key), model()
    trained(engine, net, "single", mechanism, **(with_adamw(net) if "adamw" in kind else {}))
    single = weights(net)
    size = single.numel()
    for rank in found:
        # The gradients of 10 examples are summed in another order: a few units of float32. Adam
        # divides by what is left of differences, which enlarges them; pooling the second moments
        # of a rank alone would err by 0.02 and more.
        atol = 5e-4 if "adamw" in kind else 2e-6
        assert torch.allclose(rank["weights"], single, rtol=0, atol=atol)
        assert rank["epsilon"] == pytest.approx(engine.get_epsilon(engine.plan.delta), abs=0)
        assert rank["fingerprint"] == key.fingerprint

    # The slices are disjoint, cover everything, and are the unsharded noise bit for bit.
    covered = np.zeros(size, int)
    joined = np.full(size, np.nan, np.float32)
    for rank in found:
        for offset, part in rank["noise"]:
            covered[offset : offset + part.numel()] += 1
            joined[offset : offset + part.numel()] = part.numpy()
    assert (covered == 1).all()
    noise = CorrelatedNoise(engine.plan.mechanism, key)
    if noise.scheme.kind == "recursion":
        noise.seek(5)
    whole = [np.zeros(size, np.float32)]
    noise.add_(whole, 5, 1.0)
    assert (joined == whole[0]).all()

    # Each rank has its own ledger; none of them missed a step.
    for rank in range(world):
        name = "ledger" if rank == 0 else f"ledger.rank{rank}"
        assert len(read_entries(tmp_path / name)) == 21


def pair(folder, *cases):
    """What each of two ranks was refused with in the last case, or the steps that it has taken."""
    ended("pair.py", folder, *cases)
    return [(folder / f"{cases[-1]}.{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize(("case", "field"), [("order", "data"), ("clip", "max_grad_norm")])
def test_ranks_that_would_begin_different_runs_are_refused(tmp_path, case, field):
    for text in pair(tmp_path, case):
        assert f"rank 1 differs from rank 0 in {field}; give every process" in text
    assert not (tmp_path / "key").exists()
    assert not (tmp_path / "ledger").exists()


def test_what_one_rank_is_refused_with_all_are_told(tmp_path):
    first, second = pair(tmp_path, "damaged")
    assert "has other contents" in second
    assert first == f"rank 1 could not begin: {second}"


def test_ranks_at_different_steps_are_refused(tmp_path):
    """Else old noise of one rank would meet new gradients of the other."""
    for text in pair(tmp_path, "saved", "loaded by one"):
        assert "all 2 processes must take the same step, got steps 0 to 5" in text
    for rank in ("ledger", "ledger.rank1"):
        assert len(read_entries(tmp_path / rank)) == 9
    assert pair(tmp_path, "loaded") == ["10", "10"]


@pytest.mark.parametrize(
    "cases", [("saved with a state", "loaded with a state"), ("published", "continued")]
)
def test_one_rank_saves_and_all_load(tmp_path, cases):
    assert pair(tmp_path, *cases) == ["10", "10"]
