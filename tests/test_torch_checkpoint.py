from __future__ import annotations

import io
import resource
import stat
import warnings
from contextlib import contextmanager, nullcontext

import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import KEY, dataset, loader, model, private, train, weights

from corrnoise import _files
from corrnoise.records.ledger import read_entries
from corrnoise.torch import PrivacyEngine, checkpoint


def run(folder, *, steps, resume=False, save_at=(), seed=3, dropout=0.2, **options):
    """A run with its key and ledger in ``folder``; returns (weights, engine)."""
    engine = PrivacyEngine(key=folder / "noise.key", ledger=folder / "run.ledger")
    net = model(dropout=dropout)
    torch.manual_seed(seed)
    wrapped, optimizer, batches = private(engine, net=net, **options)
    done = 0
    if resume:
        engine.load_checkpoint(path=folder / "model.pt", module=wrapped, optimizer=optimizer)
        done = engine.steps_taken

    def after(count):
        if done + count in save_at:
            engine.save_checkpoint(path=folder / "model.pt", module=wrapped, optimizer=optimizer)

    if steps > done:
        train(wrapped, optimizer, batches, steps=steps - done, after=after)
    engine.close()
    return weights(net), engine


@pytest.mark.parametrize("mechanism", ["dp_sgd", "bisr", "bsr", "blt", "dense"])
@pytest.mark.parametrize("sampling", ["fixed", "balls-in-bins"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, mechanism, sampling):
    folder = tmp_path / "run"
    folder.mkdir()
    options = {"mechanism": mechanism, "sampling": sampling}
    run(folder, steps=11, save_at=(4, 8), **options)  # stopped 3 steps after a checkpoint
    resumed, engine = run(folder, steps=18, resume=True, **options)
    assert engine.steps_taken == 18
    # An uninterrupted run with the same key, from an engine without files.
    net = model(dropout=0.2)
    torch.manual_seed(3)
    wrapped, optimizer, batches = private(PrivacyEngine(key=engine.key), net=net, **options)
    train(wrapped, optimizer, batches, steps=18)
    assert torch.equal(resumed, weights(net))
    entries = read_entries(folder / "run.ledger")
    assert [entry["step"] for entry in entries[1:]] == list(range(18))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_the_middle_of_an_epoch_with_workers(tmp_path, workers):
    data = {"data_loader": loader(num_workers=workers, shuffle=True)}
    run(tmp_path, steps=9, save_at=(9,), **data)
    data = {"data_loader": loader(num_workers=workers, shuffle=True)}
    resumed, engine = run(tmp_path, steps=18, resume=True, **data)
    net = model(dropout=0.2)
    torch.manual_seed(3)
    wrapped, optimizer, batches = private(
        PrivacyEngine(key=engine.key), net=net, data_loader=loader(shuffle=True)
    )
    train(wrapped, optimizer, batches, steps=18)
    assert torch.equal(resumed, weights(net))


def test_the_key_lies_apart_with_mode_0600_and_not_in_the_checkpoint(tmp_path):
    _, engine = run(tmp_path, steps=2, save_at=(2,))
    assert stat.S_IMODE((tmp_path / "noise.key").stat().st_mode) == 0o600
    for name in ("model.pt", "run.ledger"):
        data = (tmp_path / name).read_bytes()
        assert engine.key.reveal() not in data
        assert engine.key.reveal().hex().encode() not in data


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_grad_norm": 1.5}, r"max_grad_norm \(was 1.0, is 1.5\)"),
        ({"data_loader": loader(60, 12)}, r"batch_size \(was 10, is 12\)"),
        ({"data_loader": loader(58, 10)}, r"num_examples \(was 60, is 58\)"),
        ({"mechanism": "bsr"}, r"mechanism \(was 'bisr"),
        ({"num_bands": 3}, "num_bands=4.*num_bands=3"),
        ({"noise_multiplier": 1.1}, r"noise_multiplier \(was 1.0, is 1.1\)"),
        ({"epochs": 4}, r"num_steps \(was 18, is 24\)"),
        ({"sampling": "balls-in-bins"}, r"sampling \(was 'fixed'"),
        ({"data_loader": DataLoader(dataset(seed=9), batch_size=10)}, r"data \(was"),
        ({"data_loader": loader(shuffle=True)}, r"shuffled \(was False"),
    ],
)
def test_a_changed_run_is_refused_on_resume(tmp_path, changed, message):
    run(tmp_path, steps=3, save_at=(3,))
    before = (tmp_path / "run.ledger").read_bytes()
    with pytest.raises(ValueError, match=message):
        run(tmp_path, steps=5, resume=True, **changed)
    assert (tmp_path / "run.ledger").read_bytes() == before
    run(tmp_path, steps=5, resume=True)  # the run itself still goes on


def test_another_gradient_under_the_same_noise_is_refused(tmp_path):
    """Steps 3 to 5 were released after the checkpoint; a resume must repeat them exactly."""
    run(tmp_path, steps=6, save_at=(3,))
    data = torch.load(tmp_path / "model.pt", weights_only=True)
    data["module_state_dict"]["0.bias"] += 1e-3
    checkpoint.save(data, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"step 3 was released before with another gradient"):
        run(tmp_path, steps=6, resume=True)


def test_starting_over_with_the_same_key_is_refused_unless_it_repeats_the_run(tmp_path):
    first, _ = run(tmp_path, steps=6)
    again, _ = run(tmp_path, steps=8)  # from the beginning, exactly: harmless
    assert not torch.equal(first, again)
    with pytest.raises(ValueError, match="step 0 was released before"):
        run(tmp_path, steps=6, dropout=0.5)


def test_a_key_belongs_to_one_run(tmp_path):
    run(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"no ledger was given; a key belongs to one run"):
        private(PrivacyEngine(key=tmp_path / "noise.key"))
    with pytest.raises(ValueError, match=r"other does not; a key belongs to one run"):
        private(PrivacyEngine(key=tmp_path / "noise.key", ledger=tmp_path / "other"))
    with pytest.raises(ValueError, match=r"new.key does not exist; restore it"):
        private(PrivacyEngine(key=tmp_path / "new.key", ledger=tmp_path / "run.ledger"))


def test_a_checkpoint_without_its_ledger_is_refused(tmp_path):
    _, engine = run(tmp_path, steps=4, save_at=(4,))
    other = PrivacyEngine(key=engine.key)
    net, optimizer, _ = private(other, net=model(dropout=0.2))
    with pytest.raises(ValueError, match=r"run_id|ledger must know all 4 steps"):
        other.load_checkpoint(path=tmp_path / "model.pt", module=net, optimizer=optimizer)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "missing"])
def test_a_damaged_checkpoint_is_refused_and_the_previous_one_is_used(tmp_path, damage):
    whole, _ = run(tmp_path, steps=9, save_at=(4, 8))
    path = tmp_path / "model.pt"
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        data[len(data) // 3] ^= 0xFF
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    with pytest.warns(UserWarning, match="the checkpoint before it is used"):
        resumed, _ = run(tmp_path, steps=9, resume=True)
    assert torch.equal(whole, resumed)  # steps 4 to 8 were repeated exactly
    checkpoint.previous(path).write_bytes(b"")
    path.write_bytes(data[:1000])
    with pytest.raises(ValueError, match=r"must be a whole checkpoint"):
        run(tmp_path, steps=9, resume=True)


def test_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "x.pt"
    checkpoint.save({"a": torch.arange(50.0)}, path)
    data = path.read_bytes()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x10
        path.write_bytes(broken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="damaged"):
                checkpoint.load(path)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "x.pt"
    checkpoint.save({"a": 1}, path)
    with pytest.raises(Exception, match=r"pickle|Key"):
        checkpoint.save({"a": KEY}, path)
    assert checkpoint.load(path) == {"a": 1}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.pt"]


@contextmanager
def limited(size):
    """No file grows beyond this size: a write fails half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 5000, 100_000, 400_000, 801_000])
def test_a_full_disk_is_named_in_one_line_and_leaves_the_old_checkpoint(tmp_path, size):
    """torch's own error for a write that fails has several lines and does not say why."""
    path = tmp_path / "x.pt"
    checkpoint.save({"a": 1}, path)
    data = {"a": torch.zeros(100_000), "b": torch.ones(100_000)}
    with limited(size), pytest.raises(OSError, match=r"File too large: .*x\.pt") as caught:
        checkpoint.save(data, path)
    assert "\n" not in str(caught.value)
    assert checkpoint.load(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]
    checkpoint.save(data, path)
    assert checkpoint.load(path)["b"].sum() == 100_000


def test_an_interrupted_save_is_an_interrupt(tmp_path, monkeypatch):
    class Interrupted(io.BytesIO):
        def write(self, data):
            if len(data) > 1000:
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr(_files, "replacing", lambda *_, **__: nullcontext(Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save({"a": torch.zeros(1000)}, tmp_path / "x.pt")


def test_file_objects_work_as_in_opacus():
    engine, net = PrivacyEngine(key=KEY), model()
    wrapped, optimizer, batches = private(engine, net=net)
    train(wrapped, optimizer, batches, steps=2)
    file = io.BytesIO()
    engine.save_checkpoint(
        path=file, module=wrapped, optimizer=optimizer, checkpoint_dict={"epoch": 7}
    )
    train(wrapped, optimizer, batches, steps=2)
    after = weights(net)
    file.seek(0)
    found = engine.load_checkpoint(path=file, module=wrapped, optimizer=optimizer)
    assert found["epoch"] == 7
    assert engine.steps_taken == 2
    train(wrapped, optimizer, batches, steps=2)
    assert torch.equal(after, weights(net))


def test_a_stock_engine_does_not_continue_our_run_nor_we_its(tmp_path):
    engine, net = PrivacyEngine(key=KEY), model()
    wrapped, optimizer, _ = private(engine, net=net)
    engine.save_checkpoint(path=tmp_path / "ours.pt", module=wrapped, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = opacus.PrivacyEngine()
    with pytest.raises(ValueError, match="corrnoise"):
        stock.load_checkpoint(path=tmp_path / "ours.pt", module=wrapped, optimizer=optimizer)
    stock.save_checkpoint(path=tmp_path / "theirs.pt", module=wrapped, optimizer=optimizer)
    with pytest.raises(ValueError, match="was not saved by this engine"):
        engine.load_checkpoint(path=tmp_path / "theirs.pt", module=wrapped, optimizer=optimizer)


def test_schedulers_are_refused_in_checkpoints(tmp_path):
    engine = PrivacyEngine(key=KEY)
    wrapped, optimizer, _ = private(engine)
    with pytest.raises(ValueError, match="schedulers must be left out"):
        engine.save_checkpoint(
            path=tmp_path / "x", module=wrapped, optimizer=optimizer, noise_scheduler=object()
        )


def test_the_optimizer_belongs_to_the_checkpoint(tmp_path):
    engine = PrivacyEngine(key=KEY)
    wrapped, optimizer, _ = private(engine)
    engine.save_checkpoint(path=tmp_path / "x", module=wrapped, optimizer=optimizer)
    with pytest.raises(ValueError, match="momentum is part of the run"):
        engine.load_checkpoint(path=tmp_path / "x", module=wrapped)


def test_random_augmentation_needs_no_fingerprint(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, index):
            x, y = dataset()[index]
            return x + torch.randn(12), y

    data = {"data_loader": DataLoader(Noisy(), batch_size=10)}
    run(tmp_path, steps=3, save_at=(3,), **data)
    run(tmp_path, steps=6, resume=True, **data)


def test_nothing_is_changed_by_a_refused_checkpoint(tmp_path):
    run(tmp_path, steps=3, save_at=(3,))
    other = PrivacyEngine(key=KEY)
    net = model()
    wrapped, optimizer, _ = private(other, net=net)
    before = weights(net)
    with pytest.raises(ValueError, match="must be loaded with the key of its run"):
        other.load_checkpoint(path=tmp_path / "model.pt", module=wrapped, optimizer=optimizer)
    assert torch.equal(before, weights(net))
    assert other.steps_taken == 0


def test_evaluation_mode_is_left_to_the_user(tmp_path):
    engine = PrivacyEngine(key=KEY)
    wrapped, optimizer, batches = private(engine)
    train(wrapped, optimizer, batches, steps=1)
    wrapped.eval()
    with torch.no_grad():
        assert nn.CrossEntropyLoss()(wrapped(dataset()[:5][0]), dataset()[:5][1]) > 0


@pytest.mark.parametrize("publishes", ["steps", "checkpoints"])
def test_lost_steps_may_differ_where_checkpoints_alone_are_published(tmp_path, publishes):
    """Other rounding after a crash, here another scale of the loss by one part in a million."""

    def attempt(steps, scale, *, resume=False):
        engine = PrivacyEngine(
            key=tmp_path / "noise.key", ledger=tmp_path / "run.ledger", publishes=publishes
        )
        net = model()
        wrapped, optimizer, batches = private(engine, net=net)
        if resume:
            engine.load_checkpoint(path=tmp_path / "c", module=wrapped, optimizer=optimizer)

        def after(_):
            if engine.steps_taken == 4:
                engine.save_checkpoint(path=tmp_path / "c", module=wrapped, optimizer=optimizer)

        def loss(output, target):
            return scale * torch.nn.functional.cross_entropy(output, target)

        try:
            train(
                wrapped,
                optimizer,
                batches,
                steps=steps - engine.steps_taken,
                criterion=loss,
                after=after,
            )
        finally:
            engine.close()
        return engine

    attempt(9, 1.0)
    if publishes == "steps":
        with pytest.raises(ValueError, match="step 4 was released before with another gradient"):
            attempt(18, 1.000001, resume=True)
        return
    engine = attempt(18, 1.000001, resume=True)
    assert engine.steps_released == 18
    text = engine.statement().to_text()
    assert "checkpoints alone" in text
    # What was published is bound as ever: the first four steps cannot differ.
    with pytest.raises(ValueError, match="step 0 was released before with another gradient"):
        attempt(18, 1.000001)


def test_a_generator_of_torch_resumes_where_it_was(tmp_path):
    def engine():
        generator = torch.Generator().manual_seed(11)
        made = PrivacyEngine(key=tmp_path / "noise.key", ledger=tmp_path / "run.ledger")
        net = model()
        return made, private(
            made, net=net, mechanism="dp_sgd", sampling="fixed", noise_generator=generator
        )

    first, (net, optimizer, batches) = engine()
    train(net, optimizer, batches, steps=4)
    first.save_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    train(net, optimizer, batches, steps=2)
    expected = weights(net)
    first.close()
    second, (net, optimizer, batches) = engine()
    second.load_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    train(net, optimizer, batches, steps=2)
    assert torch.equal(weights(net), expected)


def test_double_precision_is_refused_before_anything_is_recorded(tmp_path):
    net = model().double()
    with pytest.raises(ValueError, match="float64"):
        private(PrivacyEngine(key=tmp_path / "noise.key", ledger=tmp_path / "run.ledger"), net=net)
    assert not (tmp_path / "run.ledger").exists()
    assert not (tmp_path / "noise.key").exists()
