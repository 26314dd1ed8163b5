"""The tiny training runs of the storm: a loop with the engine, and the command line."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from corrnoise.apps import datasets, training  # noqa: F401  # the second for forks alone
from corrnoise.apps.cli import main
from corrnoise.noise import CorrelatedNoise
from corrnoise.records import Run
from corrnoise.torch import PrivacyEngine
from storm_process import Outcome, Process, RefusedError, Tell, digest

STEPS, PER_EPOCH, BATCH = 12, 4, 6
TRAINED = 19  # examples that the command line does not hold out for tests


def examples() -> TensorDataset:
    """24 examples of two classes."""
    x = torch.randn(PER_EPOCH * BATCH, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


@dataclass(frozen=True)
class EngineRun:
    """A loop with ``PrivacyEngine`` that saves a checkpoint after every third step."""

    name: str
    mechanism: str = "bisr"
    memory: float = 0
    publishes: Any = "steps"

    secret = "run.key"
    ledger = "run.ledger"
    checkpoint = "model.pt"

    def prepare(self, folder: Path) -> None:
        """Nothing: the data is in memory."""

    def attempt(self, folder: Path, tell: Tell, *, patient: bool = False) -> None:
        """Train from the last checkpoint, or from the start, to the end.

        Args:
            folder: of the run.
            tell: called with what happens.
            patient: whether the user tries again, in the same process, after Ctrl-C and after a
                checkpoint that could not be written.
        """
        engine, net, optimizer, batches = self.begin(folder)
        path, gone_on = folder / self.checkpoint, not patient
        if path.exists():
            engine.load_checkpoint(path=path, module=net, optimizer=optimizer)
        while engine.steps_taken < STEPS:
            try:
                self.steps(engine, net, optimizer, batches, path)
            except (KeyboardInterrupt, OSError):
                if gone_on:
                    raise
                gone_on = True
        tell(final=digest(net.parameters()))
        engine.close()

    def begin(self, folder: Path) -> Any:
        """The engine, and what ``make_private`` returns."""
        engine = PrivacyEngine(
            key=folder / self.secret,
            ledger=folder / self.ledger,
            memory=self.memory,
            publishes=self.publishes,
        )
        torch.manual_seed(2)
        net = nn.Linear(4, 2)
        made = engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            data_loader=DataLoader(examples(), batch_size=BATCH),
            max_grad_norm=1.0,
            noise_multiplier=1.0,
            epochs=STEPS // PER_EPOCH,
            mechanism=self.mechanism,
            sampling="fixed",
        )
        return engine, *made

    def steps(
        self, engine: Any, net: Any, optimizer: Any, batches: Any, path: Path, until: int = STEPS
    ) -> None:
        """Train up to a step."""
        while engine.steps_taken < until:
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                if engine.steps_taken % 3 == 0:
                    engine.save_checkpoint(path=path, module=net, optimizer=optimizer)
                if engine.steps_taken == until:
                    break


@dataclass(frozen=True)
class CommandRun:
    """``corrnoise plan --save`` and ``corrnoise train --plan --out``."""

    name: str = "command line"
    publishes = "steps"

    secret = "out.key"
    ledger = "out/ledger"
    checkpoint = "out/checkpoint.pt"

    def prepare(self, folder: Path) -> None:
        """Write the data."""
        _data(folder)

    def attempt(self, folder: Path, tell: Tell, *, patient: bool = False) -> None:
        """Plan where there is no plan yet, and train."""
        plan, out = folder / "plan.json", folder / "out"
        if not plan.exists():
            self.plan(plan)
        self.train(folder)
        found = Run.from_json((out / "run.json").read_text())
        if (out / "statement.txt").read_text() != found.statement.to_text():
            raise AssertionError("the two statements differ")
        rest = found.to_dict()
        del rest["seconds"], rest["statement"]["run_id"]
        for record in rest["records"]:  # of all that was ever released: more after a step back
            del record["epsilon"]
        tell(final=hashlib.sha256(json.dumps(rest).encode()).hexdigest())

    def plan(self, path: Path) -> None:
        """The first command."""
        command(
            *("plan", "--num-examples", TRAINED, "--batch-size", BATCH, "--epochs", "3"),
            *("--epsilon", "8", "--delta", "1e-3", "--momentum", "0.9"),
            *("--mechanism", "bisr", "--sampling", "fixed", "--save", path),
        )

    def train(self, folder: Path) -> None:
        """The second command."""
        command(
            *("train", "--plan", folder / "plan.json", "--data", folder / "data.npz"),
            *("--model", "linear", "--learning-rate", "0.1", "--out", folder / "out"),
        )


def _data(folder: Path) -> Path:
    """The examples as a file."""
    x, y = examples().tensors
    np.savez(folder / "data.npz", x=x.numpy(), y=y.numpy())
    return folder / "data.npz"


def command(*words: object) -> None:
    """Run a command of corrnoise in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    lines = err.getvalue().splitlines()
    if len(lines) == 1 and lines[0].startswith("corrnoise: "):
        if status == 2:
            raise RefusedError(lines[0])
        if status == 130 and "interrupted" in lines[0]:
            raise KeyboardInterrupt
    if status != 0:
        raise AssertionError(f"exit status {status} with {err.getvalue()!r}")


RUNS = [
    EngineRun("regenerated noise"),
    EngineRun("stored noise", "bsr", memory=4),
    EngineRun("published checkpoints", publishes="checkpoints"),
    CommandRun(),
]


def warm_up() -> None:
    """Import and compile what an attempt needs, so that forks need not; no gradient is taken."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in RUNS:
            if isinstance(run, EngineRun):
                place = Path(folder) / run.name
                place.mkdir()
                engine, net, optimizer, _ = run.begin(place)
                engine.save_checkpoint(path=place / "x", module=net, optimizer=optimizer)
                engine.load_checkpoint(path=place / "x", module=net, optimizer=optimizer)
                CorrelatedNoise(engine.plan.mechanism, engine.key).row(0, 0, 4)
                engine.close()
        CommandRun().plan(Path(folder) / "plan.json")
        command("train", "--help")
        datasets.load(str(_data(Path(folder))))


@functools.cache
def undisturbed(run: Any, key: int) -> Outcome:
    """The same run without any event, in files of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run.prepare(Path(folder))
        found = Process(lambda tell: run.attempt(Path(folder), tell), key=key).wait()
    if found.end != "done" or [step for step, _ in found.released] != list(range(STEPS)):
        raise RuntimeError(f"the undisturbed run of {run.name} failed: {found.line}")
    return found
