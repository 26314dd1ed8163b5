"""Two runs on neighbouring datasets differ in the one contribution, and in nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, private

import corrnoise as cn
from corrnoise.torch import PrivacyEngine

N, LONE, CLIP, STEPS = 60, 23, 1.0, 18
SAMPLINGS = {
    "fixed": {"mechanism": "bisr"},
    "balls-in-bins": {"mechanism": "bisr"},
    "poisson": {"mechanism": "dp_sgd"},
    "random-allocation": {"mechanism": "dp_sgd"},
    "cyclic-poisson": {"mechanism": "bsr", "num_bands": 3},
}


def run(sampling, empty, mode="hooks"):
    """Everything that a run does, with example ``LONE`` or with an empty one in its place.

    The model is linear without bias, so that an input of zeros has a gradient of zeros; the
    learning rate is 0, so that the other examples have the same gradients in both runs.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 12, generator=generator)
    y = torch.randint(0, 2, (N,), generator=generator)
    if empty:
        x[LONE] = 0.0
    net = nn.Linear(12, 2, bias=False)
    nn.init.constant_(net.weight, 0.25)
    engine = PrivacyEngine(key=KEY, data_fingerprint="the same name")
    made = private(
        engine,
        net=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=10),
        sampling=sampling,
        max_grad_norm=CLIP,
        grad_sample_mode=mode,
        **SAMPLINGS[sampling],
    )
    wrapped, optimizer, batches = made
    step = engine._setup.step
    sums, released = [], []
    record = step.ledger.record

    def seeing(number, digest):
        sums.append(step.sums.gradients()[0].clone())
        record(number, digest)

    step.ledger.record = seeing
    while engine.steps_taken < STEPS:
        for a, b in batches:
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(wrapped(a), b).backward()
            optimizer.step()
            released.append(net.weight.grad.clone())
    indices = [step._sampler.batches.indices(i).tolist() for i in range(STEPS)]
    header = {name: v for name, v in engine._setup.header.items() if name != "run_id"}
    return {
        "batches": indices,
        "header": header,
        "divisor": engine.plan.divisor,
        "pinned": step.sums._pinned,
        "statement": engine.statement().rows()[:-2],
        "sums": sums,
        "released": released,
    }


@pytest.mark.parametrize("mode", ["hooks", "one_pass"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_only_the_one_contribution_differs(sampling, mode):
    ours, theirs = run(sampling, empty=False, mode=mode), run(sampling, empty=True, mode=mode)
    for name in ("batches", "header", "divisor", "pinned", "statement"):
        assert ours[name] == theirs[name], name
    assert len(ours["sums"]) == len(theirs["sums"]) == STEPS
    takes_part = [LONE in batch for batch in ours["batches"]]
    assert 0 < sum(takes_part) < STEPS
    for step, there in enumerate(takes_part):
        gap = ours["sums"][step] - theirs["sums"][step]
        if there:
            assert 0.0 < gap.norm() <= CLIP * (1 + 1e-5)
        else:
            assert torch.equal(ours["sums"][step], theirs["sums"][step])
            assert torch.equal(ours["released"][step], theirs["released"][step])


@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins"])
def test_an_example_takes_part_as_often_as_the_plan_counts(sampling):
    found = run(sampling, empty=False)
    steps = [i for i, batch in enumerate(found["batches"]) if LONE in batch]
    assert len(steps) == 3
    assert all(later - step >= 6 for step, later in pairwise(steps))


def test_random_allocation_uses_an_example_once_in_each_epoch():
    found = run("random-allocation", empty=False)
    steps = [i for i, batch in enumerate(found["batches"]) if LONE in batch]
    assert [step // 6 for step in steps] == [0, 1, 2]


def test_the_relation_is_named_everywhere():
    plan = cn.plan(
        num_examples=60, batch_size=10, epochs=3, epsilon=4, delta=1e-3, sampling="fixed"
    )
    name = plan.calibration.neighbours
    assert "empty one" in name
    assert "public" in name
    statement = cn.records.Statement.of(plan)
    assert name in statement.to_text()
    assert name in plan.summary
    assert plan.to_dict()["calibration"]["neighbours"] == statement.to_dict()["neighbours"] == name
    assert name in cn.records.Statement.from_dict(statement.to_dict()).to_text()
