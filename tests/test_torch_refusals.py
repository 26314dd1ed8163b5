"""Everything that the plan does not cover is refused, with the reason and the remedy."""

from __future__ import annotations

import copy
import gc
import re
import warnings

import pytest
import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from training import KEY, dataset, loader, model, private, train, weights

import corrnoise as cn
from corrnoise.noise import Key
from corrnoise.torch import PrivacyEngine
from corrnoise.torch.plans import Request


def started(**options):
    engine = PrivacyEngine(key=KEY)
    return (engine, *private(engine, **options))


def one_step(net, optimizer, batch, criterion=None):
    x, y = batch
    optimizer.zero_grad()
    (criterion or nn.CrossEntropyLoss())(net(x), y).backward()
    optimizer.step()


class Stream(IterableDataset):
    def __iter__(self):
        yield from dataset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": None}, "epochs must be given"),
        ({"noise_multiplier": None}, "noise_multiplier must be given"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"mechanism": "sgd"}, "mechanism must be one of"),
        ({"sampling": "shuffled"}, "sampling must be one of"),
        ({"mechanism": "bisr", "sampling": "poisson"}, "correlates the noise"),
        ({"mechanism": "bisr", "sampling": "cyclic-poisson"}, "bands, more than min_sep"),
        ({"clipping": "adaptive"}, "changes the sensitivity"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a finite number above 0, got 0"),
        ({"max_grad_norm": -1.0, "grad_sample_mode": "hooks"}, "max_grad_norm must be a finite"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a finite"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm must be a finite"),
        ({"max_grad_norm": [1.0, 1.0]}, "max_grad_norm must be a list, of a clip norm for each"),
        ({"max_grad_norm": 1.0, "clipping": "per_layer"}, "must be a list, of a clip norm for"),
        (
            {"max_grad_norm": [1.0, 0.0, 1.0, 1.0], "clipping": "per_layer"},
            "max_grad_norm must be a finite number above 0, got 0",
        ),
        ({"data_loader": dataset()}, "must be a torch.utils.data.DataLoader, got a TensorDataset"),
        ({"data_loader": DataLoader(dataset(), batch_size=None)}, "got batch_size=None"),
        (
            {"data_loader": loader(sampler=SubsetRandomSampler(range(40)))},
            "got SubsetRandomSampler.*pass a torch.utils.data.Subset as dataset",
        ),
        ({"optimizer": []}, "optimizer must be a torch.optim.Optimizer, got a list"),
        ({"grad_sample_mode": "hook"}, "grad_sample_mode must be one of"),
        ({"noise_generator": torch.Generator()}, "noise_generator must be left out"),
        ({"data_loader": DataLoader(TensorDataset(torch.zeros(0, 3)))}, "must not be empty"),
        ({"data_loader": loader(5, 10, drop_last=True)}, "must not be empty"),
        ({"data_loader": DataLoader(Stream(), batch_size=10)}, "IterableDataset"),
        (
            {"data_loader": loader(sampler=WeightedRandomSampler([1.0] * 60, 60))},
            "got WeightedRandomSampler",
        ),
        (
            {"data_loader": loader(sampler=RandomSampler(dataset(), num_samples=9))},
            "every example once an epoch",
        ),
        ({"mechanism": cn.mechanisms.bisr(cn.workloads.prefix_sum(17), num_bands=4)}, "18 steps"),
    ],
)
def test_make_private_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        started(**options)


def test_the_loader_of_one_run_serves_another_as_the_one_that_the_user_made():
    first, *_, batches = started()
    second, net, optimizer, again = started(data_loader=batches)
    assert again is not batches
    assert len(again) == len(batches)
    train(net, optimizer, again, steps=2)
    assert (first.steps_taken, second.steps_taken) == (0, 2)


def test_an_engine_is_one_run():
    engine, *_ = started()
    with pytest.raises(ValueError, match="once for each engine"):
        private(engine)


def test_batch_norm_is_refused_with_the_remedy():
    net = nn.Sequential(nn.Linear(12, 9), nn.BatchNorm1d(9), nn.Linear(9, 2))
    with pytest.raises(UnsupportedModuleError, match="BatchNorm"):
        started(net=net)
    engine = PrivacyEngine()
    assert not engine.is_compatible(module=net)
    with pytest.raises(UnsupportedModuleError):
        engine.validate(module=net)
    assert engine.is_compatible(module=PrivacyEngine.get_compatible_module(net))


def test_a_model_with_nothing_to_train_is_refused():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for param in net.parameters():
        param.requires_grad_(False)
    with pytest.raises(ValueError, match="parameters to train"):
        started(net=net, optimizer=optimizer)


def test_every_parameter_that_is_trained_must_be_in_the_optimizer():
    net = model()
    first, last = net[0], net[-1]
    some = torch.optim.SGD(first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=f"got none of '{len(net) - 1}.weight'"):
        started(net=net, optimizer=some)
    last.requires_grad_(False)
    started(net=net, optimizer=some)
    with pytest.raises(ValueError, match="parameters of the module alone, got one of shape"):
        started(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize("mode", ["one_pass", "hooks", "functorch", "ew"])
def test_parameters_of_a_run_are_changed_by_its_optimizer_alone(mode):
    net = model()
    engine, wrapped, optimizer, batches = started(net=net, grad_sample_mode=mode)
    other = torch.optim.SGD(net[-1].parameters(), lr=0.5)
    elsewhere = nn.Linear(2, 2)
    apart = torch.optim.SGD(elsewhere.parameters(), lr=0.5)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        before = weights(net)
        with pytest.raises(ValueError, match="changed by the optimizer that make_private"):
            other.step()
        assert weights(net).equal(before)
        elsewhere(torch.ones(1, 2)).sum().backward()
        apart.step()
        optimizer.step()
        break
    assert engine.steps_taken == 1
    # An optimizer keeps the groups that it is given: those of another are no sign of being inside.
    switched = torch.optim.Adam(optimizer.param_groups)
    wrapped.zero_grad()
    nn.functional.cross_entropy(wrapped(x), y).backward()
    before = weights(net)
    with pytest.raises(ValueError, match="changed by the optimizer that make_private"):
        switched.step()
    assert weights(net).equal(before)
    engine.close()
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    other.step()
    assert not weights(net).equal(before)


@pytest.mark.parametrize("mode", ["one_pass", "hooks", "functorch"])
def test_after_the_run_a_model_can_be_trained_further_and_pickled(mode, tmp_path):
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"net": net, "grad_sample_mode": mode}
    engine, wrapped, optimizer, batches = started(**options, optimizer=inner)
    train(wrapped, optimizer, batches, steps=2)
    engine.close()
    for each in (optimizer, inner):
        with pytest.raises(ValueError, match="taken before engine"):
            each.step()
        with pytest.raises(ValueError, match=r"a new one for each run.*ε of both runs"):
            started(**options, optimizer=each)
    torch.save(net, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    assert weights(again).equal(weights(net))
    x, y = dataset()[:10]
    further, before = torch.optim.SGD(net.parameters(), lr=0.1), weights(net)
    one_step(net, further, (x, y))
    assert not weights(net).equal(before)
    second, wrapped, optimizer, batches = started(**options)
    train(wrapped, optimizer, batches, steps=2)
    assert second.steps_taken == 2
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    with pytest.raises(ValueError, match="changed by the optimizer that make_private"):
        inner.step()  # which is of the first run


def test_a_frozen_part_of_a_private_model_stays_as_it_is():
    net = model()
    net[-1].requires_grad_(False)
    _, wrapped, _, batches = started(net=net)
    net[-1].requires_grad_(True)
    other = torch.optim.SGD(net[-1].parameters(), lr=0.1)
    x, y = next(iter(batches))
    nn.functional.cross_entropy(wrapped(x), y).backward()
    with pytest.raises(ValueError, match="changed by the optimizer that make_private"):
        other.step()


def test_a_model_whose_run_is_gone_is_free():
    net = model()

    def stage():
        _, wrapped, optimizer, batches = started(net=net, grad_sample_mode="hooks")
        train(wrapped, optimizer, batches, steps=1)
        wrapped.remove_hooks()

    stage()
    gc.collect()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_a_later_run_takes_the_parameters_over():
    net = model()
    first, _, optimizer, batches = started(net=net)
    train(net, optimizer, batches, steps=2)
    second, _, later, batches = started(net=net)
    train(net, later, batches, steps=2)
    first.close()  # which is not the owner any more
    with pytest.raises(ValueError, match="changed by the optimizer that make_private"):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    second.close()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_an_optimizer_may_wrap_another():
    class Lookahead(torch.optim.Optimizer):
        """Goes half of the way that another optimizer goes."""

        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            params = [param for group in self.param_groups for param in group["params"]]
            before = [param.detach().clone() for param in params]
            self.inner.step()
            with torch.no_grad():
                torch._foreach_lerp_(params, before, 0.5)

    found = []
    for half in (False, True):
        net = model()
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        before = weights(net)
        outer = Lookahead(inner) if half else inner
        _, _, optimizer, batches = started(net=net, optimizer=outer)
        train(net, optimizer, batches, steps=1)
        found.append(weights(net) - before)
    assert torch.allclose(found[1], 0.5 * found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_a_step_that_was_interrupted_lets_no_other_optimizer_in(mode):
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyboardInterrupt

    net = model()
    inner = Interrupted(net.parameters(), lr=0.1)
    _, wrapped, optimizer, batches = started(net=net, optimizer=inner, grad_sample_mode=mode)
    with pytest.raises(KeyboardInterrupt):
        train(wrapped, optimizer, batches, steps=1)
    x, y = next(iter(batches))  # the loop begins again
    optimizer.zero_grad()
    nn.functional.cross_entropy(wrapped(x), y).backward()
    before = weights(net)
    with pytest.raises(ValueError, match="changed by the optimizer that make_private"):
        torch.optim.SGD(inner.param_groups).step()
    assert weights(net).equal(before)


def test_the_optimizer_of_a_wrapper_had_a_run_too():
    net = model()
    inside = torch.optim.SGD(net.parameters(), lr=0.1)
    _, _, optimizer, _ = started(net=net, optimizer=inside, grad_sample_mode="hooks")
    for again in (inside, optimizer):
        with pytest.raises(ValueError, match=r"a new one for each run.*ε of both runs"):
            started(net=net, optimizer=again, grad_sample_mode="hooks")


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_run_on_the_weights_of_an_earlier_one_warns(mode, closed):
    def begin(net, key):
        engine = PrivacyEngine(key=key)
        return engine, *private(engine, net=net, grad_sample_mode=mode)

    net, first, second = model(), Key.generate(), Key.generate()
    start = net.state_dict()
    start = {name: value.clone() for name, value in start.items()}
    begin(net, first)[0].close()
    engine, made, optimizer, batches = begin(net, second)  # the first took no step
    train(made, optimizer, batches, steps=2)
    if closed:
        engine.close()
    elif mode == "hooks":
        with pytest.raises(ValueError, match=r"call close\(\) of the engine before"):
            begin(net, first)
        engine.close()
    del optimizer, made
    with pytest.warns(UserWarning, match="the weights of an earlier run of this process") as told:
        begin(net, first)[0].close()
    assert told[0].filename.endswith("training.py")  # where make_private was called
    begin(net, second)[0].close()  # the same run once more
    net.load_state_dict(start)
    begin(net, first)


def test_frozen_parameters_of_inference_mode_have_no_version():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.frozen = nn.Linear(12, 12).requires_grad_(False)
            self.head = nn.Linear(12, 2)

        def forward(self, x):
            with torch.no_grad():
                found = self.frozen(x)
            return self.head(found)

    engine, *run = started(net=Features())
    train(*run, steps=2)
    assert engine.steps_taken == 2


@pytest.mark.parametrize("mode", ["one_pass", "hooks", "functorch", "ew"])
def test_a_run_that_could_not_begin_leaves_model_and_optimizer(mode, tmp_path):
    def trained(ledgers):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for ledger in ledgers:
            engine = PrivacyEngine(key=KEY, ledger=ledger)
            options = {"net": net, "optimizer": optimizer, "grad_sample_mode": mode}
            try:
                run = private(engine, **options)
            except FileNotFoundError:
                continue
            train(*run, steps=2)
            engine.close()
        return weights(net)

    assert trained([tmp_path / "none" / "ledger", None]).equal(trained([None]))


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.layer(x.unflatten(1, (2, 6))).mean(1))


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused(mode, kind):
    net = model()
    handle = getattr(net[0].weight, kind)(lambda _: None)
    with pytest.raises(ValueError, match=r"no hook of its own, got one on '0\.weight'"):
        started(net=net, grad_sample_mode=mode)
    handle.remove()
    started(net=net, grad_sample_mode=mode)


def test_attention_that_draws_is_refused_before_anything_is_priced():
    with pytest.raises(ValueError, match=r"got 0.1 in 'layer.self_attn'; .*get_compatible_module"):
        started(net=Texts(), plan="looked at later")
    started(net=Texts().eval())
    net = PrivacyEngine.get_compatible_module(Texts())
    engine, net, optimizer, batches = started(net=net)
    train(net, optimizer, batches, steps=2)
    assert engine.steps_taken == 2


def test_questions_before_make_private_are_refused():
    for ask in (lambda e: e.plan, lambda e: e.get_epsilon(1e-5), lambda e: e.state_dict()):
        with pytest.raises(ValueError, match="make_private must come first"):
            ask(PrivacyEngine())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_examples": 61}, "the plan's 61 examples"),
        ({"batch_size": 12}, "the plan's 5 batches in an epoch, got 6; use batch_size=12"),
    ],
)
def test_a_plan_for_other_data_is_refused(change, message):
    asked = {"num_examples": 60, "batch_size": 10, "epochs": 3, **change}
    plan = cn.plan(**asked, epsilon=4, delta=1e-3, sampling="fixed", mechanisms=["bisr"])
    with pytest.raises(ValueError, match=message):
        started(plan=plan)


def test_a_plan_before_rounding_to_float32_is_refused():
    part = cn.Participation(18, 6, 3)
    raw = cn.mechanisms.blt(cn.workloads.prefix_sum(18), part, num_buffers=2)
    for mechanism in (raw, cn.noise.CorrelatedNoise(raw).mechanism):
        found = cn.calibrate(mechanism, part, epsilon=4, delta=1e-3)
        plan = cn.Plan(num_examples=60, batch_size=10, calibration=found)
        if mechanism is raw:
            with pytest.raises(ValueError, match="rounded to float32"):
                started(plan=plan)
        else:
            started(plan=plan)


def test_a_plan_comes_alone():
    plan = cn.plan(
        num_examples=60, batch_size=10, epochs=3, epsilon=4, delta=1e-3, sampling="fixed"
    )
    with pytest.raises(ValueError, match="plan must come without"):
        started(plan=plan, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="epochs must be the plan's"):
        started(plan=plan, epochs=4)


def test_more_steps_than_planned_are_refused():
    engine, net, optimizer, batches = started()
    train(net, optimizer, batches, steps=18)
    before = weights(net)
    for batch in (dataset()[:10], next(iter(batches))):
        with pytest.raises(ValueError, match=r"18 steps, and all of them were taken.*weaken"):
            one_step(net, optimizer, batch)
    assert torch.equal(before, weights(net))
    assert engine.steps_taken == 18


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("noise_multiplier", 0.5, "drop the noise scheduler"),
        ("max_grad_norm", 2.0, "drop the clip scheduler"),
        ("expected_batch_size", 20, "must not depend on the batch"),
        ("loss_reduction", "sum", "divisor"),
    ],
)
def test_a_schedule_is_refused_before_anything_is_released(name, value, message):
    engine, net, optimizer, batches = started()
    train(net, optimizer, batches, steps=2)
    before, batch = weights(net), next(iter(batches))
    setattr(optimizer, name, value)
    with pytest.raises(ValueError, match=message):
        one_step(net, optimizer, batch)
    assert engine.steps_taken == 2
    assert torch.equal(before, weights(net))


def test_clip_norms_of_layers_cannot_change():
    clips = [0.2, 0.3, 0.4, 0.1]
    _, net, optimizer, batches = started(max_grad_norm=clips, clipping="per_layer")
    train(net, optimizer, batches, steps=1)
    batch = next(iter(batches))
    optimizer.max_grad_norms[0] = 5.0
    with pytest.raises(ValueError, match="one clip norm for each layer"):
        one_step(net, optimizer, batch)


def test_real_schedulers_of_opacus_are_refused():
    from opacus.schedulers import ExponentialGradClip, ExponentialNoise

    for kind in (ExponentialNoise, ExponentialGradClip):
        _, net, optimizer, batches = started()
        scheduler = kind(optimizer, gamma=0.5)
        scheduler.step()
        with pytest.raises(ValueError, match="scheduler"):
            one_step(net, optimizer, next(iter(batches)))


def test_parameters_added_or_frozen_after_the_start_are_refused():
    for change in ("add", "freeze"):
        engine, net, optimizer, batches = started(grad_sample_mode="hooks")
        train(net, optimizer, batches, steps=1)
        batch = next(iter(batches))
        x, y = batch
        optimizer.zero_grad()
        nn.CrossEntropyLoss()(net(x), y).backward()
        if change == "add":
            extra = nn.Parameter(torch.zeros(3))
            extra.grad_sample, extra.summed_grad = torch.zeros(10, 3), None
            optimizer.original_optimizer.add_param_group({"params": [extra]})
        else:
            next(iter(net.parameters())).requires_grad_(False)
        with pytest.raises(ValueError, match="must keep the 4 parameters"):
            optimizer.step()
        assert engine.steps_taken == 1


def test_data_from_another_loader_is_refused():
    engine, net, optimizer, _ = started()
    with pytest.raises(ValueError, match="no batch was loaded; iterate over"):
        one_step(net, optimizer, dataset()[:10])
    assert engine.steps_taken == 0


def test_two_steps_on_one_batch_are_refused():
    engine, net, optimizer, batches = started()
    batch = next(iter(batches))
    one_step(net, optimizer, batch)
    with pytest.raises(ValueError, match="step 1 must be taken on its own batch"):
        one_step(net, optimizer, batch)
    assert engine.steps_taken == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_skipped_batch_is_refused(workers):
    engine, net, optimizer, batches = started(data_loader=loader(num_workers=workers))
    found = iter(batches)
    one_step(net, optimizer, next(found))
    next(found)
    with pytest.raises(ValueError, match="also for an empty one"):
        one_step(net, optimizer, next(found))
    assert engine.steps_taken == 1


def test_two_batches_in_one_step_are_refused():
    engine, net, optimizer, batches = started(grad_sample_mode="hooks")
    found = iter(batches)
    optimizer.zero_grad()
    x, y = next(found)
    nn.CrossEntropyLoss()(net(x), y).backward()
    x, y = next(found)
    with pytest.raises(ValueError, match=r"[Aa]ccumul|twice"):
        nn.CrossEntropyLoss()(net(x), y).backward()
    assert engine.steps_taken == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sums_that_are_not_finite_are_refused_and_the_step_can_be_repeated(bad):
    options = {"mechanism": "bsr", "grad_sample_mode": "ghost"}
    engine, net, optimizer, criterion, batches = started(**options)
    train(net, optimizer, batches, steps=3, criterion=criterion)
    before = weights(net)
    x, y = next(iter(batches))
    broken = x.clone()
    broken[0, 0] = bad
    message = r"gradients must be finite.*nothing was released.*grad_sample_mode='hooks' counts it"
    with pytest.raises(ValueError, match=message):
        one_step(net, optimizer, (broken, y), criterion)
    assert torch.equal(before, weights(net))
    assert (engine.steps_taken, engine._setup.step.ledger.num_released) == (3, 3)
    one_step(net, optimizer, (x, y), criterion)  # the same step, mended

    _, other_net, other_optimizer, criterion, other_batches = started(**options)
    train(other_net, other_optimizer, other_batches, steps=4, criterion=criterion)
    assert torch.equal(weights(net), weights(other_net))


def test_a_missing_zero_grad_is_refused():
    engine, net, optimizer, batches = started(grad_sample_mode="hooks")
    found = iter(batches)
    x, y = next(found)
    nn.CrossEntropyLoss()(net(x), y).backward()
    optimizer.step()
    x, y = next(found)
    with pytest.raises(ValueError, match=r"[Gg]rad"):
        nn.CrossEntropyLoss()(net(x), y).backward()
    assert engine.steps_taken == 1


def test_opacus_accountants_are_announced_as_unused():
    with pytest.warns(UserWarning, match="the plan's own analysis"):
        PrivacyEngine(accountant="rdp")


MODES = ("one_pass", "hooks", "hooks alone", "functorch")


def first_steps(net, mode, *, steps, **options):
    name, _, alone = mode.partition(" ")
    wrapped, optimizer, batches = private(
        PrivacyEngine(key=KEY), net=net, grad_sample_mode=name, wrap_model=not alone, **options
    )
    train(net if alone else wrapped, optimizer, batches, steps=steps)


@pytest.mark.parametrize("mode", MODES)
def test_float64_data_is_refused_in_words_unless_the_model_converts_it(mode):
    class Converting(nn.Sequential):
        def forward(self, x):
            return super().forward(x.float())

    x, y = dataset().tensors
    batches = DataLoader(TensorDataset(x.double(), y), batch_size=10)
    with pytest.raises(ValueError, match=r"layer '0' must have the type .*float32, got .*float64;"):
        first_steps(model(), mode, steps=1, data_loader=batches)
    first_steps(Converting(*model()), mode, steps=2, data_loader=batches)


@pytest.mark.parametrize("used", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_takes_no_part_in_a_step(mode, used):
    """Its norms of an earlier batch must not count for the examples of this one."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.sometimes = model(), nn.Linear(12, 2)
            self.batches = 0

        def forward(self, x):
            if torch.is_grad_enabled():
                self.batches += 1
            out = self.always(x)
            return out + self.sometimes(x) if self.batches <= used else out

    if mode == "one_pass":
        first_steps(Sometimes(), mode, steps=used + 1)
        return
    with pytest.raises(ValueError, match=r"must take part in the loss, got none of 'sometimes\."):
        first_steps(Sometimes(), mode, steps=used + 1)


HASTY = {
    "mode": ({"grad_sample_mode": "one-pass"}, "grad_sample_mode must be"),
    "clip": ({"max_grad_norm": -1.0}, "max_grad_norm must be"),
    "norm": ({"net": nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 2))}, "got BatchNorm"),
    "frozen": ({"net": nn.Linear(12, 2).requires_grad_(False)}, "must have parameters to train"),
    "double": ({"net": nn.Linear(12, 2).double()}, "trained parameters must be float32"),
    "words": ({"net": nn.Embedding(5, 2, scale_grad_by_freq=True)}, "scale_grad_by_freq"),
}


@pytest.mark.parametrize("case", HASTY)
def test_what_no_plan_could_change_is_refused_before_anything_is_priced(case, monkeypatch):
    def price(self, *_):
        raise AssertionError("priced")

    monkeypatch.setattr(Request, "with_noise", price)
    options, words = HASTY[case]
    with pytest.raises((ValueError, UnsupportedModuleError), match=words):
        private(PrivacyEngine(), **options)
    with pytest.raises(AssertionError, match="priced"):
        private(PrivacyEngine())


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_of_a_frozen_parameter_is_not_applied(mode, late):
    """One that was there before the run, or that comes while the parameter is thawed."""
    net = model()
    first, *_ = layers = [part for part in net if isinstance(part, nn.Linear)]
    nn.functional.cross_entropy(net(dataset().tensors[0]), dataset().tensors[1]).backward()
    first.requires_grad_(False)
    for layer in layers[1:] if not late else layers:
        layer.zero_grad()
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine, net=net, grad_sample_mode=mode)
    before = [param.detach().clone() for param in first.parameters()]
    x, y = next(iter(batches))
    first.requires_grad_(late)
    nn.functional.cross_entropy(net(x), y).backward()
    first.requires_grad_(False)
    with pytest.raises(ValueError, match="a frozen parameter must have no gradient"):
        optimizer.step()
    assert engine.steps_released == 0
    assert all(map(torch.equal, before, first.parameters()))
    first.zero_grad()
    train(net, optimizer, batches, steps=2)
    assert engine.steps_released == 2
    assert all(map(torch.equal, before, first.parameters()))


def test_a_copy_of_model_and_optimizer_is_not_trained():
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine)
    train(net, optimizer, batches, steps=1)
    copied, _ = copy.deepcopy((net, optimizer))
    x, y = dataset().tensors
    with pytest.raises(ValueError, match="got a copy of it"):
        nn.functional.cross_entropy(copied(x), y).backward()
    assert copied.eval()(x).requires_grad  # it may be looked at
    with torch.no_grad():
        copied.train()(x)
    train(net, optimizer, batches, steps=2)
    assert engine.steps_released == 3
    engine.close()
    nn.functional.cross_entropy(copied(x), y).backward()  # as the model itself


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_the_model_of_a_run_is_not_pickled_but_copied(mode, tmp_path):
    net = model()
    engine, *_ = started(net=net, grad_sample_mode=mode)
    with pytest.raises(TypeError, match=r"save model\.state_dict"):
        torch.save(net, tmp_path / "net.pt")
    assert weights(copy.deepcopy(net)).equal(weights(net))
    assert engine.steps_taken == 0


def test_a_distributed_sampler_is_refused_with_what_to_do():
    data = dataset()
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=r"no DistributedSampler.*the whole dataset.*shuffle=True"):
        started(data_loader=DataLoader(data, batch_size=10, sampler=sampler))


def test_a_budget_for_make_private_names_the_other_method():
    with pytest.raises(TypeError, match="use make_private_with_epsilon for a budget"):
        PrivacyEngine().make_private(
            module=model(),
            optimizer=None,
            data_loader=None,
            max_grad_norm=1.0,
            target_epsilon=3.0,
        )


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (
            torch.optim.RMSprop,
            {"lr": 0.01},
            r"RMSprop divides.*corrnoise.torch.Adam, which knows",
        ),
        (torch.optim.Adagrad, {"lr": 0.01}, r"Adagrad divides.*mechanism='dp_sgd'"),
        (torch.optim.Adam, {"lr": 0.01}, r"Adam divides.*has the same arguments and knows"),
        (torch.optim.SGD, {"lr": 0.01}, None),
    ],
)
def test_optimizers_that_divide_by_second_moments_warn(kind, options, words):
    for mechanism in ("bisr", "dp_sgd"):
        net = model()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            started(net=net, optimizer=kind(net.parameters(), **options), mechanism=mechanism)
        told = [str(each.message) for each in found if "second moment" in str(each.message)]
        assert len(told) == (words is not None and mechanism == "bisr")
        assert not told or re.search(words, told[0])


def test_a_delta_above_one_over_the_number_of_examples_is_announced():
    with pytest.warns(UserWarning, match="target_delta=0.05 is not below 1/60, one over"):
        started(target_epsilon=3.0, target_delta=0.05, epochs=3, mechanism="dp_sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started(target_epsilon=3.0, target_delta=0.01, epochs=3, mechanism="dp_sgd")


@pytest.mark.parametrize("mode", ["one_pass", "hooks"])
def test_a_warning_of_the_loop_is_shown_once(mode, monkeypatch):
    """Leaving ``catch_warnings`` would have Python forget what it has said."""
    net, shown = Root(), []
    *made, batches = started(net=net, grad_sample_mode=mode)[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", lambda text, *_: shown.append(str(text)))
        for _, pair in zip(range(5), batches, strict=False):
            warnings.warn("of the loop", stacklevel=1)
            one_step(*made, pair)
    assert shown.count("of the loop") <= 2  # once more after the model was looked at


class Root(nn.Module):
    """A parameter in a module of one's own: it runs again for each example."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12, 2))

    def forward(self, x):
        return x @ self.weight
