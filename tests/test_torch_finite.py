"""An example whose gradient is not finite counts as zero, or the step is refused."""

from __future__ import annotations

import math

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, dataset, model, private, weights

from corrnoise.torch import PrivacyEngine, finite, opacus

NAN, INF = math.nan, math.inf
BAD = {3: NAN, 17: INF}  # the example, and what its first feature is
MODES = {
    "hooks": {"grad_sample_mode": "hooks"},
    "hooks alone": {"grad_sample_mode": "hooks", "wrap_model": False},
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "per layer": {
        "grad_sample_mode": "hooks",
        "clipping": "per_layer",
        "max_grad_norm": [0.5] * 4,
    },
    "hooks in bfloat16": {"grad_sample_mode": "hooks", "kind": torch.bfloat16},
    "hooks in float16": {"grad_sample_mode": "hooks", "kind": torch.float16},
    "hooks, pieces": {"grad_sample_mode": "hooks", "pieces": 3},
}


def examples(bad, kind=torch.float32):
    """60 examples and weights of their losses; two are broken, or else have the weight 0."""
    x, y = dataset().tensors
    x, weight = x.clone(), torch.ones(60)
    for row, number in BAD.items():
        if bad:
            x[row, 0] = number
        else:
            weight[row] = 0.0
    return TensorDataset(x.to(kind), y, weight.to(kind))


def run(data, *, steps=6, kind=torch.float32, pieces=None, net=None, **options):
    """The sums that were about to be released, step by step, the weights after them, the engine."""
    engine = PrivacyEngine(key=KEY)
    net = model().to(kind) if net is None else net
    alone = not options.get("wrap_model", True)
    made = private(engine, net=net, data_loader=DataLoader(data, batch_size=10), **options)
    trained, optimizer, batches = (net if alone else made[0]), made[1], made[-1]
    step, found = engine._setup.step, []
    record = step.ledger.record

    def seeing(number, digest):
        found.append(torch.cat([g.detach().reshape(-1) for g in step.sums.gradients()]).clone())
        record(number, digest)

    step.ledger.record = seeing

    def loop(batches):
        for x, y, weight in batches:
            optimizer.zero_grad()
            each = nn.functional.cross_entropy(trained(x), y, reduction="none")
            (each * weight).mean().backward()
            optimizer.step()
            if engine.steps_taken == steps:
                break

    while engine.steps_taken < steps:
        if pieces:
            with BatchMemoryManager(
                data_loader=batches, max_physical_batch_size=pieces, optimizer=optimizer
            ) as parts:
                loop(parts)
        else:
            loop(batches)
    return found, weights(net), engine


# On a GPU nothing looks at values before it clears.
@pytest.mark.parametrize(
    ("mode", "on_gpu"),
    [(mode, on_gpu) for mode in MODES for on_gpu in (False, True)],
)
def test_bad_examples_count_as_zero_bit_for_bit_and_one_warning_says_so(mode, on_gpu, monkeypatch):
    if on_gpu:
        monkeypatch.setattr(opacus, "looks_free", lambda _: False)
    options = {**MODES[mode], "steps": 12}
    kind = options.get("kind", torch.float32)
    wanted, after, _ = run(examples(False, kind), **options)
    with pytest.warns(UserWarning, match="count as zero") as told:
        found, weights_found, engine = run(examples(True, kind), **options)
    assert all(map(torch.equal, wanted, found))
    assert float(wanted[0].norm()) > 0.1
    assert torch.equal(after, weights_found)
    ours = [str(each.message) for each in told if "count as zero" in str(each.message)]
    assert len(ours) == 1
    assert ours[0].startswith("1 of the 10 examples of step 0 have gradients that are not finite")
    assert "lower the learning rate or the clip norm" in ours[0]
    assert engine.steps_taken == 12
    assert int(engine._setup.step.sums.left_out) == 0  # of the last batch, which has none


@pytest.mark.filterwarnings("ignore:.*count as zero:UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_neighbours_differ_by_the_clip_norm_at_most(mode):
    options = {**MODES[mode], "steps": 1}
    kind = options.get("kind", torch.float32)
    data = examples(True, kind)
    x, y, weight = data.tensors
    found, _, engine = run(data, **options)
    clip = engine._setup.step.sums.clip_norm
    for other in (50.0 * torch.ones(12), torch.full((12,), -INF), torch.zeros(12), x[4]):
        changed = x.clone()
        changed[3] = other.to(kind)
        beside, *_ = run(TensorDataset(changed, y, weight), **options)
        assert float((found[0] - beside[0]).double().norm()) <= clip * (1.0 + 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_has_diverged_gives_noise_alone(mode):
    options = {**MODES[mode], "steps": 2}
    kind = options.get("kind", torch.float32)
    net = model().to(kind)
    with torch.no_grad():
        net[0].bias[0] = NAN
    with pytest.warns(UserWarning, match="10 of the 10 examples of step 0"):
        found, *_ = run(TensorDataset(*examples(True, kind).tensors), net=net, **options)
    assert all(float(each.abs().max()) == 0.0 for each in found)


def test_clipping_in_one_pass_refuses():
    with pytest.raises(ValueError, match="gradients must be finite, got NaN or infinity in para"):
        run(examples(True), grad_sample_mode="one_pass")


def test_a_stand_in_for_an_empty_batch_is_no_example():
    class Roots(nn.Module):
        """NaN for numbers below 2, as a row that stands in for an empty batch has."""

        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, x):
            return self.inner((x - 2.0).sqrt())

    x, y = dataset(12).tensors
    data = TensorDataset(x.abs() + 2.0, y, torch.ones(12))
    engine, sizes = PrivacyEngine(key=KEY), []
    net, optimizer, batches = private(
        engine,
        net=Roots(),
        data_loader=DataLoader(data, batch_size=1),
        grad_sample_mode="hooks",
        rand_on_empty=True,
        sampling="balls-in-bins",
        epochs=1,
    )
    for x, y, _ in batches:  # warnings are errors
        sizes.append(len(engine._setup.step._sampler.share(engine.steps_taken)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    assert 0 in sizes
    assert torch.isfinite(weights(net)).all()


@pytest.mark.filterwarnings("ignore:.*count as zero:UserWarning")
def test_a_checkpoint_repeats_steps_with_bad_examples(tmp_path):
    engine = PrivacyEngine(key=tmp_path / "key", ledger=tmp_path / "ledger")
    net, optimizer, batches = private(
        engine,
        data_loader=DataLoader(examples(True), batch_size=10),
        grad_sample_mode="hooks",
    )

    def loop(steps):
        while engine.steps_taken < steps:
            for x, y, _ in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
                if engine.steps_taken == steps:
                    break

    engine.save_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    loop(6)
    expected = weights(net)
    engine.load_checkpoint(path=tmp_path / "c", module=net, optimizer=optimizer)
    assert engine.steps_taken == 0
    loop(6)  # the ledger compares the digests of all six
    assert torch.equal(expected, weights(net))


def test_several_fixed_batches_in_one_step():
    options = {"grad_sample_mode": "hooks", "mechanism": "dp_sgd"}

    def joined(bad):
        engine = PrivacyEngine(key=KEY)
        net, optimizer, batches = private(
            engine, data_loader=DataLoader(examples(bad), batch_size=10), **options
        )
        for number, (x, y, weight) in enumerate(batches):
            each = nn.functional.cross_entropy(net(x), y, reduction="none")
            (each * weight).mean().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return weights(net)

    wanted = joined(False)
    with pytest.warns(UserWarning, match="2 of the 20 examples of step 1"):
        assert torch.equal(wanted, joined(True))


def test_sums_whose_norm_overflows_are_finite_still():
    data = TensorDataset(torch.full((60, 12), 3e18), torch.ones(60).long(), torch.ones(60))
    net = nn.Linear(12, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    options = {"net": net, "max_grad_norm": 1e20, "noise_multiplier": 1e-3, "steps": 1}
    (found,), after, _ = run(data, grad_sample_mode="hooks", **options)
    assert not found.norm().isfinite()
    assert 7e19 < found.double().norm() < 8e19
    assert after.isfinite().all()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_finite_rows_are_told_from_others(kind):
    grads = [torch.ones(5, 3, 2).to(kind), torch.ones(5).to(kind), torch.ones(5, 0).to(kind)]
    grads[0][1, 2, 1], grads[1][2], grads[0][3, 0, 0] = NAN, -INF, INF
    assert finite.finite_rows(grads).tolist() == [True, False, False, False, True]
    assert finite.finite_rows([g[:0] for g in grads]).shape == (0,)


def test_gradients_that_share_memory_are_copied():
    shared = torch.full((1, 2), NAN).expand(3, 2)
    found = finite.clear_(shared, torch.tensor([True, False, True]))
    assert found[0].tolist() == found[2].tolist() == [0.0, 0.0]
    assert found[1].isnan().all()
    assert shared.isnan().all()
