"""Hostile plans: JSON that claims too much, or that is no plan at all."""

from __future__ import annotations

import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn, optim
from torch.utils.data import DataLoader

import corrnoise as cn
from corrnoise.accounting import gaussian
from corrnoise.planning import Plan
from corrnoise.torch import PrivacyEngine
from storm_process import Process, Tell
from storm_runs import BATCH, TRAINED, CommandRun, examples

_CHANGES = ("a bit flipped", "cut", "a number scaled", "a value replaced", "a field dropped")
_VALUES = [
    *(0, 1, -1, 2, 17, 0.5, 1e-300, 1e300, 10**40, "", "x", None, True, False, [], {}, [1.0]),
    *(float("nan"), float("inf"), "exact", "bound", "certified", "fixed", "balls-in-bins"),
]


@functools.cache
def honest(sampling: str, num_examples: int) -> Plan:
    """A plan for the dataset of the storm, made by another process: here nothing is certified."""

    def make(tell: Tell) -> None:
        made = cn.plan(
            num_examples=num_examples, batch_size=BATCH, epochs=3, epsilon=4.0, delta=1e-3,
            momentum=0.9, sampling=sampling, mechanisms=["bisr", "dp_sgd"], samples=2000,
        )  # fmt: skip
        tell(plan=made.to_json())

    return Plan.from_json(Process(make).wait().heard["plan"])


def hostile(folder: Path, dice: random.Random) -> tuple[str, str, str]:
    """Give a changed plan to the engine or to the command line: the change, the end and why."""
    command = dice.random() < 0.3
    plan = honest(dice.choice(["fixed", "balls-in-bins"]), TRAINED if command else len(examples()))
    how = dice.choice(_CHANGES)
    path = folder / "plan.json"
    path.write_bytes(_changed(plan.to_json(), how, dice))
    found = Process(lambda tell: _trusting(command, path, plan)).wait()
    if found.end == "broken":
        return how, "wrong", found.line
    if found.end == "refused":
        made = [p.name for p in folder.rglob("*") if p.is_file()]
        if sorted(made) != ["data.npz", "plan.json"]:
            return how, "wrong", f"files were written: {made}"
        return how, "refused", found.line
    return how, "resumed", ""


def _trusting(command: bool, path: Path, before: Plan) -> None:
    """Train by a plan; what is accepted must be true."""
    if command:
        CommandRun().train(path.parent)
    else:
        _engine(path)
    plan = Plan.from_json(path.read_text(encoding="utf-8"))
    if not _true(plan, before):
        raise AssertionError(f"a plan that claims too much was accepted: {plan.calibration!r}")


def _engine(path: Path) -> None:
    """Begin a run by the plan."""
    plan, net = Plan.from_json(path.read_text(encoding="utf-8")), nn.Linear(4, 2)
    engine = PrivacyEngine(key=path.with_name("run.key"), ledger=path.with_name("run.ledger"))
    engine.make_private(
        module=net,
        optimizer=optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(examples(), batch_size=BATCH),
        max_grad_norm=1.0,
        plan=plan,
    )


def _true(plan: Plan, honest_plan: Plan) -> bool:
    """Whether a plan claims no more than its noise gives."""
    now, before = plan.calibration, honest_plan.calibration
    least = 1.0 - 1e-8
    new, old = now.mechanism.strategy_coef, before.mechanism.strategy_coef
    if (
        np.allclose(new, old, rtol=1e-8, atol=1e-8)
        and now.participation == before.participation
        and now.sampling == before.sampling
        and now.noise_multiplier >= before.noise_multiplier * least
        and now.epsilon >= before.epsilon * least
        and now.delta >= before.delta * least
        and now.failure_probability >= _failure_probability(honest_plan) * least
    ):
        return True
    sensitivity = now.mechanism.sensitivity(now.participation).value
    spent = gaussian.delta(now.epsilon, sensitivity / now.noise_multiplier)
    return spent <= now.delta * (1.0 + 1e-8)


def _failure_probability(plan: Plan) -> float:
    """That of the plan's certificates, which may be less than the planner was allowed."""
    if plan.calibration.estimate is None:
        return plan.calibration.failure_probability
    certified = sum(each.kind == "certified" for each in plan.alternatives)
    return plan.calibration.estimate.whole_failure_probability * max(certified, 1)


def _changed(text: str, how: str, dice: random.Random) -> bytes:
    if how == "a bit flipped":
        data = bytearray(text.encode())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return bytes(data)
    if how == "cut":
        return text.encode()[: dice.randrange(len(text))]
    fields = copy.deepcopy(json.loads(text))
    if how == "a number scaled":
        at, name = dice.choice([p for p in _places(fields) if isinstance(p[0][p[1]], (int, float))])
        at[name] = at[name] * dice.choice([0, -1, 0.5, 0.999, 1.001, 2, 1e-9, 1e9])
    else:
        at, name = dice.choice(_places(fields))
        if how == "a value replaced":
            at[name] = dice.choice(_VALUES)
        elif isinstance(at, dict):
            del at[name]
        else:
            at.pop(name)
    return json.dumps(fields).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON value: what holds it, and its name or index there."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in items:
        found.append((value, name))
        if isinstance(each, (dict, list)):
            found += _places(each)
    return found
