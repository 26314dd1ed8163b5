"""Real processes, killed with SIGKILL at random moments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import model, private, train, weights

from corrnoise.noise import Key
from corrnoise.records.ledger import read_entries
from corrnoise.torch import PrivacyEngine


@pytest.mark.parametrize("mechanism", ["bisr", "blt"])
def test_a_run_killed_again_and_again_equals_one_that_was_not(tmp_path, mechanism):
    folder = tmp_path / "run"
    kills = 50 if mechanism == "bisr" else 10
    script = Path(__file__).with_name("killable.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, script, folder, "300", "7", str(kills), mechanism],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["killed"] == kills

    # Every weight that an observer saw, also of steps that were repeated, is the same each time.
    seen: dict[int, set[float]] = {}
    for line in (folder / "released").read_text().splitlines():
        if line.endswith("]"):
            step, value = json.loads(line)
            seen.setdefault(step, set()).add(value)
    assert sorted(seen) == list(range(1, 301))
    assert all(len(values) == 1 for values in seen.values())

    net = model(dropout=0.1)
    torch.manual_seed(3)
    engine = PrivacyEngine(key=Key.load(folder / "noise.key"))
    wrapped, optimizer, batches = private(engine, net=net, epochs=50, mechanism=mechanism)
    train(wrapped, optimizer, batches, steps=300)
    assert torch.equal(torch.load(folder / "weights.pt"), weights(net))
    entries = read_entries(folder / "run.ledger")
    assert [entry["step"] for entry in entries[1:]] == list(range(300))
