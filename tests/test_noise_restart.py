"""A run killed at random moments and resumed adds the same noise as one that was not."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLS, STEPS = 20, 200

WORKER = """
import hashlib, json, os, pickle, sys, time
import numpy as np
import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key

folder, steps, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
key = Key.load(os.path.join(folder, "..", "run.key"))
workload = cn.workloads.prefix_sum(steps)
series = cn.mechanisms.bsr(workload, num_bands=5).noising
series *= cn.mechanisms.bisr(workload, num_bands=3).noising
poles = cn.mechanisms.ToeplitzMechanism("poles", workload, series)
noises = [
    CorrelatedNoise(cn.mechanisms.bisr(workload, num_bands=4), key),
    CorrelatedNoise(cn.mechanisms.bisr(workload, num_bands=4), key, memory=1),
    CorrelatedNoise(cn.mechanisms.bisr(workload, num_bands=4), key, memory=2),
    CorrelatedNoise(poles, key, stream=1),
]
checkpoint = os.path.join(folder, "checkpoint")
step, weights, digests = 0, np.zeros((len(noises), 2000), np.float32), []
if os.path.exists(checkpoint):
    with open(checkpoint, "rb") as file:
        step, weights, digests, states = pickle.load(file)
    for noise, state in zip(noises, states):
        noise.load_state_dict(state)
print("ready", flush=True)
while step < steps:
    grads = [np.full(2000, 0.25, np.float32) for _ in noises]
    for noise, grad in zip(noises, grads):
        noise.add_([grad], step, 1.5)
    weights -= 0.1 * np.stack(grads)
    digests.append(hashlib.sha256(np.stack(grads).tobytes()).hexdigest())
    step += 1
    state = (step, weights, digests, [noise.state_dict() for noise in noises])
    with open(checkpoint + ".new", "wb") as file:
        pickle.dump(state, file)
    os.replace(checkpoint + ".new", checkpoint)
    time.sleep(pause)
with open(os.path.join(folder, "result.json"), "w") as file:
    json.dump([digests, hashlib.sha256(weights.tobytes()).hexdigest()], file)
"""


def _start(folder: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(folder), str(STEPS), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _finish(folder: Path, pause: float) -> object:
    with _start(folder, pause) as worker:
        assert worker.wait(timeout=60) == 0
    return json.loads((folder / "result.json").read_text())


def test_twenty_kills_change_nothing(tmp_path) -> None:
    from corrnoise.noise import Key

    Key.generate().save(tmp_path / "run.key")
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    expected = _finish(calm, 0.0)
    moments = random.Random(20)
    for _ in range(KILLS):
        with _start(killed, 0.01) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            time.sleep(moments.uniform(0.0, 0.1))
            worker.send_signal(signal.SIGKILL)
            assert worker.wait(timeout=60) == -signal.SIGKILL
    assert (killed / "checkpoint").exists()
    assert not (killed / "result.json").exists()
    assert _finish(killed, 0.0) == expected
