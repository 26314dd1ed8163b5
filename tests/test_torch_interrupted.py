"""Whatever interrupts a loop: each example is in its step's sum once, or nothing is released."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, loader, model, private, weights

import corrnoise as cn
from corrnoise.noise import Key
from corrnoise.torch import PrivacyEngine, opacus

MODES = ("hooks", "ghost")
PHYSICAL = 3


def start(mode, **options):
    engine = PrivacyEngine(key=KEY, **options)
    made = private(engine, grad_sample_mode=mode, sampling="balls-in-bins")
    return engine, made[0], made[1], made[2] if mode == "ghost" else nn.CrossEntropyLoss(), made[-1]


class LeftError(Exception):
    """The loop is left here."""


def loop(run, steps, hit=lambda event, number: None):
    """The loop that every user of Opacus writes; ``hit`` may raise before or after any ``step``."""
    engine, net, optimizer, criterion, batches = run
    number = 0
    while engine.steps_taken < steps:
        with BatchMemoryManager(
            data_loader=batches, max_physical_batch_size=PHYSICAL, optimizer=optimizer
        ) as parts:
            for x, y in parts:
                loss = criterion(net(x), y)
                loss.backward()
                hit("before", number)
                optimizer.step()
                hit("after", number)
                optimizer.zero_grad()
                number += 1
                if engine.steps_taken == steps:
                    break


@pytest.fixture(scope="module", params=MODES)
def whole(request):
    run = start(request.param)
    loop(run, 12)
    return request.param, weights(run[1])


@pytest.mark.parametrize("event", ["before", "after"])
@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_a_loop_that_is_left_and_begun_again_gives_the_same_run(whole, event, every):
    mode, expected = whole
    run = start(mode)
    left = [0]

    def hit(now, number):
        # As often as this leaves any progress: a physical batch before the last of its step.
        if now == event and number == every and left[0] < 20:
            left[0] += 1
            raise LeftError

    while run[0].steps_taken < 12:
        with suppress(LeftError):
            loop(run, 12, hit)
    assert left[0] > 3
    assert all(torch.equal(a, b) for a, b in zip(expected, weights(run[1]), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_one_batch_passed_several_times_is_refused(mode):
    engine, net, optimizer, criterion, batches = start(mode)
    x, y = next(iter(batches))
    for _ in range(3):
        optimizer.signal_skip_step(do_skip=True)
        criterion(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.signal_skip_step(do_skip=False)
    criterion(net(x), y).backward()
    with pytest.raises(ValueError, match="each once"):
        optimizer.step()
    assert engine.steps_released == 0


def test_a_refused_step_can_be_repeated(whole):
    run = start(whole[0])
    engine, net, optimizer, criterion, batches = run
    loop(run, 3)
    before, optimizer.noise_multiplier = optimizer.noise_multiplier, 0.1
    with pytest.raises(ValueError, match="noise_multiplier must stay"):
        loop(run, 4)
    assert engine.steps_released == 3
    optimizer.noise_multiplier = before
    if whole[0] == "ghost":  # which can leave no example out of a sum
        with pytest.raises(ValueError, match="finite"):
            loop((engine, lambda x: net(x * float("nan")), optimizer, criterion, batches), 4)
        assert engine.steps_released == 3
    loop(run, 12)
    assert all(torch.equal(a, b) for a, b in zip(whole[1], weights(net), strict=True))


def test_a_loaded_checkpoint_begins_with_an_empty_sum(tmp_path, whole):
    mode, expected = whole
    run = start(mode)
    engine, net, optimizer, *_ = run
    loop(run, 4)
    engine.save_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)

    def hit(event, number):
        if event == "after" and number == 1:
            raise LeftError

    with pytest.raises(LeftError):
        loop(run, 12, hit)
    engine.load_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    loop(run, 12)
    assert all(torch.equal(a, b) for a, b in zip(expected, weights(net), strict=True))


def test_the_managed_loader_knows_its_length():
    _, net, optimizer, criterion, batches = start("hooks")
    for _ in range(3):
        with BatchMemoryManager(
            data_loader=batches, max_physical_batch_size=PHYSICAL, optimizer=optimizer
        ) as parts:
            announced = len(parts)
            count = 0
            for x, y in parts:
                criterion(net(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                count += 1
        assert announced == count > 6
    assert len(batches) == 6


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_logical_batches_that_are_skipped_in_the_last_epoch_are_refused(workers):
    """Fixed batches of one size: neither the tally nor a later epoch would notice."""

    def begun():
        engine = PrivacyEngine(key=KEY)
        data = loader(num_workers=workers, prefetch_factor=4 if workers else None)
        made = private(engine, data_loader=data)
        return engine, made[0], made[1], nn.CrossEntropyLoss(), made[2]

    run = begun()
    engine, net, optimizer, criterion, batches = run
    loop(run, 14)
    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=PHYSICAL, optimizer=optimizer
    ) as parts:
        for number, (x, y) in enumerate(parts):
            if number < 8:  # both have 10 examples, in four physical batches
                continue
            criterion(net(x), y).backward()
            if number < 11:
                optimizer.step()  # one physical batch of the wrong step: nothing is released
            else:
                with pytest.raises(ValueError, match="own batch, but the batch of step 16 was"):
                    optimizer.step()
                break
            optimizer.zero_grad()
    assert engine.steps_released == 14
    loop(run, 18)
    whole = begun()
    loop(whole, 18)
    assert torch.equal(weights(net), weights(whole[1]))


@pytest.mark.parametrize("persistent", [False, True])
def test_physical_batches_from_workers_are_those_without(persistent):
    found = []
    for workers in (0, 2):
        engine = PrivacyEngine(key=KEY)
        data = loader(num_workers=workers, persistent_workers=persistent and workers > 0)
        net, optimizer, batches = private(engine, data_loader=data, sampling="balls-in-bins")
        run = (engine, net, optimizer, nn.CrossEntropyLoss(), batches)
        loop(run, 3)  # left in the middle of an epoch, with batches in flight
        loop(run, 18)
        found.append(weights(net))
    assert torch.equal(*found)


@pytest.mark.parametrize("persistent", [False, True])
def test_two_loops_at_once_do_not_hide_a_skipped_batch(persistent):
    engine = PrivacyEngine(key=KEY)
    data = loader(num_workers=1, persistent_workers=persistent)
    net, optimizer, batches = private(engine, data_loader=data)

    def step(batch):
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(net(batch[0]), batch[1]).backward()
        optimizer.step()

    first = iter(batches)
    for _ in range(3):
        next(first)
    second = iter(batches)
    for _ in range(3):
        step(next(second))
    next(second)  # the batch of step 3
    batch = next(first)
    own = torch.equal(batch[0], data.dataset.tensors[0][30:40])
    assert own is not persistent
    if own:
        step(batch)
    else:
        with pytest.raises(ValueError, match="own batch, but the batch of step 4 was loaded"):
            step(batch)
    assert engine.steps_released == (4 if own else 3)


def test_a_loader_of_ones_own_whose_workers_run_ahead_is_refused():
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine, data_loader=loader(num_workers=1))
    own = DataLoader(batches.dataset, batch_sampler=batches.batch_sampler, num_workers=1)
    x, y = next(iter(own))
    nn.CrossEntropyLoss()(net(x), y).backward()
    with pytest.raises(ValueError, match="own batch"):
        optimizer.step()
    assert engine.steps_released == 0


def test_the_memory_manager_of_another_loader_is_opacus_own():
    plain = loader()
    _, optimizer, _ = private(PrivacyEngine(key=KEY))
    with BatchMemoryManager(
        data_loader=plain, max_physical_batch_size=PHYSICAL, optimizer=optimizer
    ) as parts:
        assert type(parts) is DataLoader
        assert parts.dataset is plain.dataset


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_a_sum_that_is_longer_than_clipping_allows_is_refused(mode):
    engine, net, optimizer, criterion, batches = start(mode)
    accumulate = optimizer.clip_and_accumulate

    def unclipped():
        accumulate()
        for param in net.parameters():
            param.summed_grad *= 1000.0

    optimizer.clip_and_accumulate = unclipped
    for x, y in batches:
        criterion(net(x), y).backward()
        with pytest.raises(ValueError, match="were not clipped"):
            optimizer.step()
        break
    assert engine.steps_released == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("at", range(8))
def test_a_piece_that_was_added_in_part_cannot_be_added_again(monkeypatch, error, at):
    """As by a loop that catches an error of memory and takes the same rows once more."""
    engine, net, optimizer, criterion, batches = start("hooks")
    clipped, calls = opacus.clipped_sum, iter(range(10**6))

    def fails_once(*given):
        if next(calls) == at:
            raise error
        return clipped(*given)

    monkeypatch.setattr(opacus, "clipped_sum", fails_once)

    def step(x, y):
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()

    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=PHYSICAL, optimizer=optimizer
    ) as parts:
        for x, y in parts:
            with suppress(ValueError):  # the step of the last piece, and those of later batches
                try:
                    step(x, y)
                except (KeyboardInterrupt, torch.OutOfMemoryError):
                    step(x, y)
    assert engine.steps_released == 0
    loop((engine, net, optimizer, criterion, batches), 2)


def test_a_plan_for_fewer_participations_than_the_batches_make_is_refused():
    m = cn.mechanisms.bisr(cn.workloads.sgd(18, momentum=0.9), num_bands=4).in_float32()
    found = cn.calibrate(m, cn.Participation(18, 6, 1), epsilon=2, delta=1e-3)
    plan = cn.Plan(num_examples=60, batch_size=10, calibration=found)
    with pytest.raises(ValueError, match="max_participations must be at least 3"):
        private(PrivacyEngine(key=KEY), plan=plan)


def test_the_statement_counts_what_was_ever_released(tmp_path):
    run = start("hooks")
    engine, net, optimizer, *_ = run
    loop(run, 4)
    engine.save_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    loop(run, 12)
    spent = engine.get_epsilon(1e-3)
    engine.load_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    assert (engine.steps_taken, engine.steps_released) == (4, 12)
    assert engine.get_epsilon(1e-3) == spent
    assert "12 of 18 released" in engine.statement().to_text()


def test_a_fork_cannot_continue_the_run():
    code = """
        import os, sys
        from test_torch_interrupted import loop, start
        run = start("hooks")
        loop(run, 2)
        child = os.fork()
        try:
            loop(run, 3)
        except ValueError as refused:
            os._exit(7 if "fork" in str(refused) and run[0].steps_released == 2 else 1)
        if child == 0:
            os._exit(2)  # the child must not get here
        _, status = os.waitpid(child, 0)
        sys.exit(0 if os.waitstatus_to_exitcode(status) == 7 and run[0].steps_taken == 3 else 1)
    """
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], cwd=folder, check=False
    )
    assert done.returncode == 0


def test_a_stand_in_for_an_empty_batch_contributes_nothing():
    """With ``rand_on_empty`` a batch that lost its only example is as if it had none."""
    data = TensorDataset(torch.randn(6, 12), torch.tensor([0, 1] * 3))
    engine = PrivacyEngine(key=Key.from_bytes(bytes(range(1, 33))))
    seen = []
    net, optimizer, batches = private(
        engine,
        data_loader=DataLoader(data, batch_size=1),
        sampling="balls-in-bins",
        grad_sample_mode="ew",
        rand_on_empty=True,
        mechanism="dp_sgd",
        noise_multiplier=1.0,
    )
    step = engine._setup.step
    record = step.ledger.record

    def seeing(number, digest):
        norms = [float(param.summed_grad.norm()) for param in net.parameters()]
        seen.append((len(step._sampler.share(number)), norms))
        record(number, digest)

    step.ledger.record = seeing
    for x, y in batches:
        assert len(x)
        nn.CrossEntropyLoss()(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    empty = [norms for size, norms in seen if size == 0]
    assert empty
    assert all(norm == 0.0 for norms in empty for norm in norms)
    assert all(max(norms) > 0.0 for size, norms in seen if size)


@pytest.mark.parametrize("then", ["go on", "close"])
def test_a_layer_that_is_interrupted_gets_its_parameters_back(monkeypatch, then):
    """Torch calls no hook after KeyboardInterrupt."""
    engine, net, optimizer, batches = start_one_pass()
    known = dict(net.named_parameters())
    pairs = iter(batches)
    step(net, optimizer, *next(pairs))
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "linear", interrupt)
        with pytest.raises(KeyboardInterrupt):
            net(next(pairs)[0])
    if then == "go on":
        for pair in batches:
            step(net, optimizer, *pair)
    engine.close()
    assert all(param is known[name] for name, param in net.named_parameters())
    assert all(isinstance(param, torch.nn.Parameter) for param in net.parameters())
    whole, other, optimizer, batches = start_one_pass()
    for pair in batches:
        step(other, optimizer, *pair)
    assert engine.steps_taken == (whole.steps_taken if then == "go on" else 1)
    if then == "go on":
        assert torch.equal(weights(net), weights(other))


def start_one_pass():
    engine, net = PrivacyEngine(key=KEY), model()
    _, optimizer, batches = private(engine, net=net, grad_sample_mode="one_pass")
    return engine, net, optimizer, batches


def step(net, optimizer, x, y):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_look_at_the_model_that_is_interrupted_does_not_end_the_run():
    """Ctrl-C may come just before the block that would go back to recording."""
    engine, net, optimizer, batches = start_one_pass()
    pair = next(iter(batches))
    engine._setup.step.sums.clipper.recorder.paused = True
    with pytest.raises(ValueError, match="it got a gradient outside of it"):
        step(net, optimizer, *pair)
    step(net, optimizer, *pair)
    for pair in batches:
        step(net, optimizer, *pair)
    whole, other, optimizer, batches = start_one_pass()
    for pair in batches:
        step(other, optimizer, *pair)
    assert engine.steps_taken == whole.steps_taken == 6
    assert torch.equal(weights(net), weights(other))


@pytest.mark.parametrize("mode", ["hooks", "one_pass"])
def test_a_piece_that_is_taken_again_does_not_stand_for_another(mode):
    """Batches of 9 in three pieces: the second one twice has as many examples as the last two."""
    engine, net = PrivacyEngine(key=KEY), model()
    data = loader(size=54, batch_size=9)
    net, optimizer, batches = private(engine, net=net, data_loader=data, grad_sample_mode=mode)
    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=PHYSICAL, optimizer=optimizer
    ) as parts:
        pairs = iter(parts)
        step(net, optimizer, *next(pairs))
        pair = next(pairs)
        step(net, optimizer, *pair)
        with pytest.raises(ValueError, match="every piece of a batch must be taken once"):
            step(net, optimizer, *pair)
    assert engine.steps_released == 0
    loop((engine, net, optimizer, nn.CrossEntropyLoss(), batches), 2)
    for pair in batches:
        step(net, optimizer, *pair)
    assert engine.steps_taken == 6


@pytest.mark.parametrize("mechanism", ["bisr", "blt"])
def test_a_step_that_is_interrupted_after_its_noise_can_be_taken_again(monkeypatch, mechanism):
    """Noise that keeps a state is past the step then."""
    found = []
    for left in ([KeyboardInterrupt], []):
        engine, net = PrivacyEngine(key=KEY), model()
        made = private(engine, net=net, mechanism=mechanism, grad_sample_mode="one_pass")
        _, optimizer, batches = made
        sums = engine._setup.step.sums

        def interrupted(*given, left=left, engine=engine, hand_over=sums.hand_over):
            if left and engine.steps_taken == 2:
                raise left.pop()
            hand_over(*given)

        monkeypatch.setattr(sums, "hand_over", interrupted)
        with suppress(KeyboardInterrupt):
            for pair in batches:
                step(net, optimizer, *pair)
        for pair in batches if engine.steps_taken < 6 else ():
            step(net, optimizer, *pair)
        assert engine.steps_taken == 6
        found.append(weights(net))
    assert torch.equal(*found)
