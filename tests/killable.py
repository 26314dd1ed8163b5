"""A training process that may be killed at any moment: ``killable.py FOLDER STEPS SEED KILLS``.

It imports once, then forks one process after the other; each trains until it is done or killed.
A fork dies of SIGKILL as any process does, without the seconds that importing torch takes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from training import model, private, train, weights

from corrnoise.records.ledger import read_entries
from corrnoise.torch import PrivacyEngine

STEPS_PER_EPOCH = 6


def attempt(folder: Path, steps: int, mechanism: str) -> None:
    """Train from the last checkpoint, or from the start, to the end."""
    engine = PrivacyEngine(key=folder / "noise.key", ledger=folder / "run.ledger")
    net = model(dropout=0.1)
    torch.manual_seed(3)
    wrapped, optimizer, batches = private(
        engine, net=net, epochs=steps // STEPS_PER_EPOCH, mechanism=mechanism
    )
    path = folder / "model.pt"
    if path.exists():
        engine.load_checkpoint(path=path, module=wrapped, optimizer=optimizer)
    done = engine.steps_taken
    released = folder / "released"

    def after(count: int) -> None:
        # What an observer saw: the weights after each step.
        with released.open("a") as file:
            file.write(json.dumps([done + count, float(weights(net).double().sum())]) + "\n")
        if (done + count) % 7 == 0:
            engine.save_checkpoint(path=path, module=wrapped, optimizer=optimizer)

    if done < steps:
        train(wrapped, optimizer, batches, steps=steps - done, after=after)
    torch.save(weights(net), folder / "weights.pt")


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    dice, kills, mechanism = random.Random(int(sys.argv[3])), int(sys.argv[4]), sys.argv[5]
    folder.mkdir(exist_ok=True)
    killed, known, longest = 0, 0, 0.4
    while True:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            try:
                attempt(folder, steps, mechanism)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        if killed < kills:
            time.sleep(dice.uniform(0.0, longest))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                sys.exit("a resume failed")
            if killed < kills:
                sys.exit(f"the run ended after {killed} kills; make it longer")
            break
        killed += 1
        # The ledger never forgets: every step that an observer saw is in it.
        now = 0
        if (folder / "run.ledger").exists():
            now = len(read_entries(folder / "run.ledger")) - 1
        seen = 0
        if (folder / "released").exists():
            lines = (folder / "released").read_text().splitlines()
            seen = max((json.loads(line)[0] for line in lines if line.endswith("]")), default=0)
        if now < max(known, seen):
            sys.exit(f"the ledger lost steps: {now} < {known} or {seen}")
        known = max(known, now)
    print(json.dumps({"killed": killed, "released": known}))


if __name__ == "__main__":
    main()
