"""Other people's loops: Accelerate and Lightning give the weights of a loop of one's own."""

from __future__ import annotations

import contextlib
import pickle

import pytest
import torch
from torch import nn
from training import KEY, loader, model, private, train, weights

from corrnoise.torch import AdamW, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
CRITERION = nn.CrossEntropyLoss()


def plain(steps=18):
    net = model()
    engine = PrivacyEngine(key=KEY)
    made = private(engine, net=net, optimizer=AdamW(net.parameters(), lr=0.05))
    train(*made, steps=steps)
    return weights(net)


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("largest", [None, 4])
def test_accelerate(accelerator, workers, largest):
    net, optimizer = model(), None
    optimizer = AdamW(net.parameters(), lr=0.05)
    net, optimizer = accelerator.prepare(net, optimizer)
    engine = PrivacyEngine(key=KEY)
    made = private(
        engine, net=net, optimizer=optimizer, data_loader=loader(num_workers=workers),
        max_physical_batch_size=largest,
    )  # fmt: skip
    assert made[1] is optimizer
    batches = accelerator.prepare(made[2])
    assert batches is made[2]
    assert batches.device == torch.device("cpu")
    for _ in range(3):
        for x, y in batches:
            accelerator.backward(CRITERION(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert engine.steps_taken == 18
    assert torch.allclose(weights(net), plain(), atol=1e-6)


def test_accelerate_may_prepare_everything_at_once(accelerator):
    """As its users do; the loader that it makes has a batch sampler and no batch size."""
    net = model()
    made = accelerator.prepare(net, AdamW(net.parameters(), lr=0.05), loader())
    assert made[2].batch_size is None
    engine = PrivacyEngine(key=KEY)
    made = private(engine, net=made[0], optimizer=made[1], data_loader=made[2])
    train(*made, steps=18)
    assert torch.allclose(weights(net), plain(), atol=1e-6)


def test_accelerate_that_accumulates_is_refused(accelerator):
    net = model()
    net, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=0.05))
    accelerator.gradient_state.plugin_kwargs["num_steps"] = 2
    engine = PrivacyEngine(key=KEY)
    _, optimizer, batches = private(engine, net=net, optimizer=optimizer)

    def epoch():
        for x, y in accelerator.prepare(batches):
            with accelerator.accumulate(net):
                accelerator.backward(CRITERION(net(x), y))
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(ValueError, match="step 0 must be taken on its own batch"):
        epoch()
    assert engine.steps_taken == 0


def test_what_accelerate_wraps_must_fit(accelerator):
    net = model()
    net, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=0.05))
    with pytest.raises(ValueError, match="grad_sample_mode must be 'one_pass'"):
        private(PrivacyEngine(key=KEY), net=net, optimizer=optimizer, grad_sample_mode="hooks")
    optimizer.scaler = object()
    with pytest.raises(ValueError, match="mixed_precision must be 'no' or 'bf16'"):
        private(PrivacyEngine(key=KEY), net=net, optimizer=optimizer)


def test_a_closure_is_called_before_the_noise():
    net = model()
    optimizer = AdamW(net.parameters(), lr=0.05)
    engine = PrivacyEngine(key=KEY)
    _, _, batches = private(engine, net=net, optimizer=optimizer)
    for number in range(3):
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = CRITERION(net(x), y)
                loss.backward()
                return loss

            loss = optimizer.step(closure) if number else optimizer.step(closure=closure)
            assert float(loss.detach()) > 0
    assert torch.equal(weights(net), plain())


def lightning_module(engine):
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.resumed = None
            self.layers = model(dropout=0.1)

        def training_step(self, batch, _):
            return CRITERION(self.layers(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = AdamW(self.layers.parameters(), lr=0.05)
            made = private(engine, net=self.layers, optimizer=optimizer)
            self.batches = made[2]
            if self.resumed is not None:
                engine.load_state_dict(self.resumed)
            return optimizer

        def train_dataloader(self):
            return self.batches

        def on_save_checkpoint(self, checkpoint):
            checkpoint["corrnoise"] = engine.state_dict()

        def on_load_checkpoint(self, checkpoint):
            self.resumed = checkpoint["corrnoise"]

    return Net()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_and_its_resume(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer, callbacks

    def run(name, steps, resumed=None, **options):
        engine = PrivacyEngine(key=KEY, ledger=tmp_path / name)
        torch.manual_seed(8)
        net = lightning_module(engine)
        trainer = Trainer(
            max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        torch.manual_seed(9)
        trainer.fit(net, ckpt_path=resumed, weights_only=True)
        engine.close()
        assert engine.steps_taken == steps == trainer.global_step
        return weights(net.layers)

    whole = run("whole", 18, enable_checkpointing=False)
    keep = callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8)
    run("parts", 11, callbacks=[keep])
    found = run("parts", 18, resumed=tmp_path / "step=8.ckpt", enable_checkpointing=False)
    assert torch.equal(found, whole)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_takes_the_steps_of_a_loop_of_ones_own(monkeypatch):
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer

    engine = PrivacyEngine(key=KEY)
    net = lightning_module(engine)
    net.layers = model()
    Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, gradient_clip_val=1e-3,
    ).fit(net)  # fmt: skip
    assert torch.equal(weights(net.layers), plain())


@contextlib.contextmanager
def two_processes():
    """The first of two processes, as torch sees it; the other one does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_on_several_devices_is_refused(monkeypatch):
    pytest.importorskip("lightning")
    from lightning.pytorch import Trainer

    # As torchrun and Lightning's own launcher leave it, so that no process is launched.
    for name, value in {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    engine = PrivacyEngine(key=KEY)
    with two_processes(), pytest.raises(ValueError, match=r"a run on 2 processes.*devices=1"):
        Trainer(
            devices=2, strategy="ddp", max_epochs=3, accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        ).fit(lightning_module(engine))  # fmt: skip


def test_a_model_that_is_wrapped_after_make_private_is_refused():
    engine, net = PrivacyEngine(key=KEY), model()
    made = private(engine, net=net)
    before = weights(net)
    with two_processes(), pytest.raises(ValueError, match="a run on 2 processes must be given"):
        train(*made, steps=1)
    assert engine.steps_taken == engine.steps_released == 0
    assert torch.equal(weights(net), before)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_copies_on_several_gpus_are_refused():
    net = nn.DataParallel(model())
    net.device_ids = [0, 1]
    with pytest.raises(ValueError, match="one process must have one GPU, got 2 in DataParallel"):
        private(PrivacyEngine(key=KEY), net=net)


@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_of_losses_is_refused_and_one_that_is_switched_off_is_not(unscale):
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine)
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(iter(batches))
    scaler.scale(nn.functional.cross_entropy(net(x), y)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match=r"must come without a GradScaler.*bfloat16"):
        scaler.step(optimizer)
    assert engine.steps_released == 0
    off = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in batches:
        optimizer.zero_grad()
        off.scale(nn.functional.cross_entropy(net(x), y)).backward()
        off.step(optimizer)
        off.update()
    assert engine.steps_released == 6


class Twice(torch.optim.SGD):
    """Steps of half the length, two of them, by ``super``."""

    def step(self, closure=None):
        super().step()
        return super().step()


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_a_subclass_may_call_the_step_of_its_base(mode):
    """Torch calls the hooks of both."""
    found = []
    for kind, rate in ((Twice, 0.05), (torch.optim.SGD, 0.1)):
        net, engine = model(), PrivacyEngine(key=KEY)
        optimizer = kind(net.parameters(), lr=rate)
        train(*private(engine, net=net, optimizer=optimizer, grad_sample_mode=mode), steps=18)
        assert engine.steps_taken == 18
        found.append(weights(net))
    assert torch.allclose(*found, rtol=0, atol=1e-5)


class Interrupted(torch.optim.SGD):
    def step(self, closure=None):
        if self.interrupts:
            raise KeyboardInterrupt
        return super().step()


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_an_interrupted_step_allows_no_other(mode):
    net, engine = model(), PrivacyEngine(key=KEY)
    inner = Interrupted(net.parameters(), lr=0.1)
    inner.interrupts = True
    net, optimizer, batches = private(engine, net=net, optimizer=inner, grad_sample_mode=mode)
    with pytest.raises(KeyboardInterrupt):
        train(net, optimizer, batches, steps=1)
    assert engine.steps_taken == 1
    before, inner.interrupts = weights(net), False
    for step in (inner.step, optimizer.step):
        with pytest.raises(ValueError, match=r"optimizer.step\(\)|Gradients haven't been cleared"):
            step()
    assert torch.equal(weights(net), before)
    train(net, optimizer, batches, steps=2)
    assert engine.steps_taken == 3


class _Unused(nn.Module):
    """With a layer that nobody calls, as torch's attention has one whose weights it uses itself."""

    def __init__(self):
        super().__init__()
        self.called = model()
        self.other = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        return self.called(x)


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
@pytest.mark.parametrize("steps", [0, 2])
def test_after_a_run_models_with_layers_that_nobody_calls_are_pickled(mode, steps):
    engine, net = PrivacyEngine(key=KEY), _Unused()
    run = private(engine, net=net, grad_sample_mode=mode)
    if steps:
        train(*run, steps=steps)
    engine.close()
    assert weights(pickle.loads(pickle.dumps(net))).equal(weights(net))
