"""What a step draws: dropout depends on key and step, and what is saved not on the examples."""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, dataset, loader, model, private, train, weights

from corrnoise.noise import Key
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.draws import StepDraws, undisturbed

STEPS = 12  # two epochs
OTHER = Key.from_bytes(bytes(range(1, 33)))


class Greedy(nn.Module):
    """Dropout that draws first as many numbers as an example's second feature says."""

    def forward(self, x):
        for count in x[:, 1].abs().long().tolist():
            torch.rand(count)
            np.random.rand(count)  # noqa: NPY002
            random.getrandbits(32 * count + 1)
        return nn.functional.dropout(x, 0.5, self.training)


def run(*, data=None, seed=0, key=KEY, net=None, lr=0.0, steps=STEPS, **options):
    """The released gradient of every step, and the generators after it."""
    net = nn.Sequential(Greedy(), model()) if net is None else net
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    data = dataset() if data is None else data
    torch.manual_seed(seed)
    net, optimizer, batches = private(
        PrivacyEngine(key=key),
        net=net,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=10, **options),
    )
    grads, states = [], []

    def after():
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002
        states.append((torch.get_rng_state(), repr(numpy), random.getstate()))

    while len(grads) < steps:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            after()
    return grads, states, net


def longer():
    """The dataset with one example that draws more numbers than before, and its step."""
    x, y = (tensor.clone() for tensor in dataset().tensors)
    x[17, 1] = 40.0
    return TensorDataset(x, y)


def same(first, second):
    return first[0].equal(second[0]) and first[1:] == second[1:]


def test_an_example_changes_neither_other_steps_nor_what_could_be_saved_after_any():
    """With weights that stay and the same noise, only its own steps show it."""
    before, states, _ = run()
    after, others, _ = run(data=longer())
    different = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not a.equal(b)]
    assert different == [1, 7]  # fixed batches of 10: example 17 is in the second of each epoch
    assert all(map(same, states, others))
    assert len({bytes(state[0].numpy()) for state in states}) == STEPS


def test_draws_come_from_the_key_and_not_from_the_seed():
    released, states, _ = run(seed=0)
    again, others, _ = run(seed=1)
    assert all(map(torch.equal, released, again))
    assert not any(map(same, states, others))  # outside steps the user's seed decides
    moved, _, _ = run(key=OTHER)
    noise = [
        run(key=key, net=model(dropout=0.0))[0] for key in (KEY, OTHER)
    ]  # the same masks would leave the differences of noise alone
    assert not torch.allclose(released[0] - moved[0], noise[0][0] - noise[1][0])


def test_every_step_draws_anew():
    masks = []

    class Watched(nn.Module):
        def forward(self, x):
            if torch.is_grad_enabled():  # and nobody only looks at the model
                masks.append(torch.rand(5000) < 0.5)
            return x

    run(net=nn.Sequential(Watched(), model()), steps=6)
    assert len(masks) == 6
    agree = [float((a == b).float().mean()) for a, b in itertools.pairwise(masks)]
    # 5,000 fair coins each: outside of 0.4 to 0.6 with probability below 1e-40.
    assert all(0.4 < each < 0.6 for each in agree)


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 4}])
def test_workers_that_run_ahead_change_nothing(options):
    expected, _, _ = run(net=model(dropout=0.5), lr=0.1)
    found, _, _ = run(net=model(dropout=0.5), lr=0.1, **options)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("largest", [None, 4])
def test_a_loop_that_was_left_draws_the_same_again(largest):
    def trained(leave):
        net = model(dropout=0.5)
        wrapped, optimizer, batches = private(
            PrivacyEngine(key=KEY),
            net=net,
            data_loader=loader(),
            grad_sample_mode="one_pass",
            max_physical_batch_size=largest,
        )
        train(wrapped, optimizer, batches, steps=5 if largest is None else 15)
        if leave:  # in the middle of a step
            for x, y in batches:
                nn.functional.cross_entropy(wrapped(x), y).backward()
                break
            torch.rand(100)
        train(wrapped, optimizer, batches, steps=4 if largest is None else 12)
        return weights(net)

    assert torch.equal(trained(leave=False), trained(leave=True))


def test_checkpoints_have_no_generators(tmp_path):
    engine = PrivacyEngine(key=tmp_path / "key", ledger=tmp_path / "ledger")
    wrapped, optimizer, batches = private(engine, net=model(dropout=0.1))
    train(wrapped, optimizer, batches, steps=2)
    assert set(engine.state_dict()) == {
        "header", "step", "rank", "noise", "noise_generator", "inherited",
    }  # fmt: skip
    engine.close()


def test_each_process_draws_its_own():
    found = set()
    for key, rank, step in ((b"a", 0, 0), (b"b", 0, 0), (b"a", 1, 0), (b"a", 0, 1)):
        draws = StepDraws(key, rank)
        draws.begin(step)
        found.add((float(torch.rand(())), float(np.random.rand()), random.random()))  # noqa: NPY002
        draws.begin(step)  # a later piece
        found.add((float(torch.rand(())), float(np.random.rand()), random.random()))  # noqa: NPY002
    assert len({torch_drew for torch_drew, _, _ in found}) == 8
    assert len({numpy_drew for _, numpy_drew, _ in found}) == 8
    assert len({python_drew for _, _, python_drew in found}) == 8


def test_what_happens_once_in_a_process_moves_no_generator():
    def draw():
        return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002

    draws = StepDraws(b"key", 0)
    draws.begin(3)
    expected = draw()
    draws.restart()
    draws.begin(3)
    with undisturbed():
        draw()
    assert draw() == expected


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA is not available")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_captured_step_draws_from_the_key_anew_and_the_same_when_resumed(device, tmp_path):
    """On a GPU it is a graph, which takes its numbers from the generator's state at replay."""

    def begin(name, seed, lr):
        net = model(dropout=0.5).to(device)
        torch.manual_seed(seed)
        key = OTHER if name == "other" else KEY
        engine = PrivacyEngine(key=key, ledger=tmp_path / name)
        _, optimizer, batches = private(
            engine,
            net=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=lr),
            data_loader=loader(batch_size=60),
            grad_sample_mode="one_pass",
            epochs=STEPS,
        )
        step = engine.step_function(lambda x, y: nn.functional.cross_entropy(net(x), y))
        return engine, net, optimizer, batches, step

    def go(batches, step, steps):
        losses = []
        while len(losses) < steps:
            losses += [float(step(x.to(device), y.to(device))) for x, y in batches]
        return losses

    def whole(name, seed=0, lr=0.1):
        engine, net, _, batches, step = begin(name, seed, lr)
        losses = go(batches, step, STEPS)
        engine.close()
        return losses, weights(net)

    losses, expected = whole("first")
    again, found = whole("second", seed=1)
    assert again == losses
    assert found.equal(expected)
    engine, net, optimizer, batches, step = begin("third", 0, 0.1)
    head = go(batches, step, 5)
    engine.save_checkpoint(path=tmp_path / "checkpoint", module=net, optimizer=optimizer)
    engine.close()
    engine, net, optimizer, batches, step = begin("third", 2, 0.1)
    engine.load_checkpoint(path=tmp_path / "checkpoint", module=net, optimizer=optimizer)
    assert head + go(batches, step, STEPS - 5) == losses
    assert weights(net).equal(expected)
    engine.close()
    # With weights that stay, the same 60 examples: only dropout changes the loss of a step.
    still, _ = whole("fourth", lr=0.0)
    assert len(set(still)) == STEPS
    other, _ = whole("other", lr=0.0)
    assert not set(still) & set(other)


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_a_batch_that_is_taken_once_more_draws_the_same(monkeypatch, mode):
    """After Ctrl-C or a refusal in a step: not from the seed that everyone may know."""

    def taken(*, interrupted):
        net, engine = model(dropout=0.5), PrivacyEngine(key=KEY)
        net, optimizer, batches = private(engine, net=net, grad_sample_mode=mode)
        record, left = engine._setup.step.ledger.record, [KeyboardInterrupt] * interrupted

        def interrupts(step, digest):
            if left:
                raise left.pop()
            record(step, digest)

        monkeypatch.setattr(engine._setup.step.ledger, "record", interrupts)
        for x, y in batches:
            for _ in range(1 + len(left)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                with contextlib.suppress(KeyboardInterrupt):
                    optimizer.step()
        assert engine.steps_taken == 6
        return weights(net)

    assert torch.equal(taken(interrupted=True), taken(interrupted=False))
