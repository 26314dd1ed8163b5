"""Adam and AdamW that know the noise: exact moments, torch's own step without noise, resume."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from training import KEY, model, private, train, weights

import corrnoise as cn
from corrnoise.algebra import toeplitz
from corrnoise.torch import Adam, AdamW, PrivacyEngine, workload_of
from corrnoise.torch.adam import _Known
from corrnoise.torch.gradient_noise import GradientNoise

N, BETA1, BETA2, SCALE = 40, 0.8, 0.95, 0.3
WORKLOAD = cn.workloads.sgd(N, momentum=BETA1)
PART = cn.Participation(N, 10, 4)
MECHANISMS = [
    cn.mechanisms.bisr(WORKLOAD, num_bands=4),
    cn.mechanisms.blt(WORKLOAD, PART, num_buffers=2),
    cn.mechanisms.dense(WORKLOAD, PART),
    cn.mechanisms.dp_sgd(WORKLOAD),
]


def ema(beta):
    """Row t: the weights of the bias-corrected mean after step t."""
    rows = np.tril((1 - beta) * beta ** (np.arange(N)[:, None] - np.arange(N)[None, :] * 1.0))
    return rows / (1 - beta ** np.arange(1.0, N + 1))[:, None]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
def test_moments_of_the_noise_are_those_of_dense_matrices(mechanism):
    noise = GradientNoise(mechanism, SCALE)
    covariance = SCALE**2 * mechanism.noising_matrix(N) @ mechanism.noising_matrix(N).T
    assert np.allclose(noise.variances, np.diag(covariance), rtol=1e-10)
    assert np.allclose(noise.second_moment(BETA2), ema(BETA2) @ np.diag(covariance), rtol=1e-10)
    # of a sum of squares of normals: twice the sum of the squared covariances
    spread = np.sqrt(2 * np.einsum("ti,ij,tj->t", ema(BETA2), covariance**2, ema(BETA2)))
    found = noise.deviations(BETA2)
    assert (found >= spread * (1 - 1e-9)).all()
    assert (found <= 4 * spread).all()
    whole = toeplitz.matrix(WORKLOAD.coef)
    ours = np.einsum("ti,ij,tj->", whole, covariance, whole)
    assert noise.independent(BETA1) == pytest.approx((ours / (whole**2).sum()) ** 0.5)


def test_the_noise_of_a_step_is_many_times_what_moves_the_weights():
    part = cn.Participation(196, 49, 4)
    whole = cn.workloads.sgd(196, momentum=0.9)
    noise = GradientNoise(cn.mechanisms.band_inv_mf(whole, part, num_bands=16), SCALE)
    ratio = noise.second_moment(0.999)[-1] ** 0.5 / noise.independent(0.9)
    page = (Path(__file__).parents[1] / "docs" / "adam.md").read_text("utf-8")
    assert f"{ratio:.0f} times for Band-Inv-MF with 16 bands over 4\nepochs of 49 steps" in page


def test_independent_noise_stands_for_itself():
    noise = GradientNoise(cn.mechanisms.dp_sgd(WORKLOAD), SCALE)
    assert noise.independent(BETA1) == pytest.approx(SCALE)
    assert noise.second_moment(BETA2) == pytest.approx(np.full(N, SCALE**2))


def run(make, steps=8, noise=None):
    torch.manual_seed(4)
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    optimizer = make(params)
    if noise is not None:
        optimizer.know_noise(noise)
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = torch.randn_like(param) if index == 0 or step != 2 else None
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in params]), optimizer


@pytest.mark.parametrize("pair", [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)])
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.3}, {"maximize": True, "betas": (0.5, 0.9), "eps": 1e-3}]
)
def test_without_noise_it_is_torchs(pair, options):
    ours, theirs = (run(lambda p, k=kind: k(p, lr=0.1, **options)) for kind in pair)
    assert torch.allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-6)
    # Each reads the other's state.
    theirs[1].load_state_dict(ours[1].state_dict())
    ours[1].load_state_dict(theirs[1].state_dict())


def test_noise_that_vanishes_leaves_adam():
    noise = GradientNoise(MECHANISMS[0], 1e-12)
    assert torch.allclose(
        run(lambda p: Adam(p, lr=0.1), noise=noise)[0],
        run(lambda p: torch.optim.Adam(p, lr=0.1))[0],
        rtol=1e-5,
        atol=1e-6,
    )


def test_noise_that_dominates_makes_one_denominator_for_all():
    """Gradients far below the noise: SGD with momentum at the rate lr/e, e of independent noise."""
    noise = GradientNoise(MECHANISMS[0], 1e3)
    start, _ = run(lambda p: Adam(p, lr=1.0, betas=(0.0, 0.9)), steps=0)
    moved, optimizer = run(lambda p: Adam(p, lr=1.0, betas=(0.0, 0.9)), steps=1, noise=noise)
    grads = torch.cat([p.grad.reshape(-1) for p in optimizer.param_groups[0]["params"]])
    assert torch.allclose((start - moved) * noise.independent(0.0), grads, rtol=1e-2, atol=1e-2)


def moved(gradients, mechanism, count, *, scale=1.0, seed=0):
    """How far each step of Adam at rate 1 moves the coordinates of one tensor, and the noise."""
    noise = GradientNoise(mechanism, scale)
    rows = scale * mechanism.noising_matrix(count)
    drawn = torch.from_numpy(
        rows @ np.random.default_rng(seed).normal(size=(count, *gradients.shape))
    )
    param = nn.Parameter(torch.zeros(gradients.shape))
    optimizer = Adam([param], lr=1.0, betas=(BETA1, 0.999), eps=0.0)
    optimizer.know_noise(noise)
    steps, before = [], param.detach().clone()
    for step in range(count):
        param.grad = (gradients + drawn[step]).float()
        optimizer.step()
        steps.append(before - param.detach())
        before = param.detach().clone()
    return torch.stack(steps), noise


LONG = cn.mechanisms.band_inv_mf(
    cn.workloads.sgd(200, momentum=BETA1), cn.Participation(200, 50, 4), num_bands=8
)


@pytest.mark.parametrize("times", [0.2, 1.0, 4.0, 8.0, 30.0])
def test_a_tensor_takes_steps_of_the_learning_rate_at_most(times):
    """Equal gradients of some times e in 768 coordinates: lost in the noise of one of them."""
    e = GradientNoise(LONG, 1.0).independent(BETA1)
    assert GradientNoise(LONG, 1.0).second_moment(0.999)[-1] > 25 * e**2
    steps, _ = moved(torch.full((768,), times * e, dtype=torch.float64), LONG, 200)
    mean = float(steps[100:].mean())
    exact = times / (1.0 + times**2) ** 0.5
    # What is below the threshold is left out: half as much again at most, where it is the most.
    assert 0.9 * exact <= mean <= min(1.1 * times, 1.5 * exact)


def test_noise_alone_divides_by_the_same_number_everywhere():
    """Tensors of noise alone exceed three standard deviations of their mean at most as often.

    One tensor does with probability 0.0014 where its mean is normal, so 4 of 100 with 2e-6.
    """
    unequal = 0
    for seed in range(100):
        steps, noise = moved(torch.zeros(64, dtype=torch.float64), LONG, 60, seed=seed)
        rows = LONG.noising_matrix(60)
        drawn = rows @ np.random.default_rng(seed).normal(size=(60, 64))
        weights = (1 - BETA1) * BETA1 ** np.arange(59.0, -1.0, -1.0) / (1 - BETA1**60)
        expected = weights @ drawn / noise.independent(BETA1)
        same = np.isclose(steps[-1].numpy(), expected, rtol=1e-3, atol=1e-5)
        unequal += same.mean() < 0.9
    assert unequal <= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(size=st.integers(1, 300), count=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_what_is_taken_and_put_is_the_formula(dtype, size, count, seed):
    noise = GradientNoise(LONG, 0.7)
    mean, sure = noise.second_moment(0.999), 3.0 * noise.deviations(0.999)
    known = _Known(mean, sure, 0.01)
    values = np.random.default_rng(seed).exponential(mean[-1], size)
    tensor = torch.from_numpy(values).to(dtype)
    values = tensor.double().numpy().copy()
    known.replace_noise([tensor], count)
    n, d = mean[count - 1], sure[count - 1]
    pooled = max(0.0, np.minimum(values, n + d).mean() - n - d / size**0.5)
    expected = 0.01 + np.maximum(pooled, values - n - d)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # of the sum over the tensor
    rounding = (4 * torch.finfo(dtype).eps + size * sums) * (values.max() + n + d)
    assert np.allclose(tensor.double().numpy(), expected, rtol=0.0, atol=rounding)


class Silent(nn.Module):
    """Its gradients are zero, so that what the optimizer sees is the noise."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 2000)

    def forward(self, x):
        return self.layer(x)[:, :2] * 0.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_reduction": "sum"},
        {"grad_sample_mode": "hooks"},
        {"mechanism": "band_mf", "num_bands": 3},
        {"max_grad_norm": 0.3, "noise_multiplier": 7.0},
    ],
)
def test_the_engine_says_what_noise_it_adds(options):
    """26,000 coordinates: the variance is within 5 % but for a probability of 1e-7 at each step."""
    net = Silent()
    optimizer = AdamW(net.parameters(), lr=0.0)
    engine = PrivacyEngine(key=KEY)
    net_, optimizer_, batches = private(engine, net=net, optimizer=optimizer, **options)
    noise = optimizer._noise
    reduce = options.get("loss_reduction", "mean")
    for step, (x, y) in enumerate(batches):
        optimizer_.zero_grad()
        nn.functional.cross_entropy(net_(x), y, reduction=reduce).backward()
        optimizer_.step()
        grads = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
        assert float(grads.var()) == pytest.approx(noise.variances[step], rel=0.05)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_stock_adam_warns_where_noise_is_correlated(kind):
    def begin(**options):
        net = model()
        optimizer = getattr(torch.optim, kind)(net.parameters())
        private(PrivacyEngine(key=KEY), net=net, optimizer=optimizer, **options)

    with pytest.warns(UserWarning, match=rf"use corrnoise\.torch\.{kind},") as found:
        begin()
    assert sum("use corrnoise" in str(each.message) for each in found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(mechanism="dp_sgd")


def test_the_planner_is_told_the_first_beta_and_the_decoupled_decay():
    weight = [nn.Parameter(torch.zeros(1))]
    for ours, theirs in ((Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)):
        options = {"lr": 0.1, "betas": (0.8, 0.99), "weight_decay": 0.1}
        a, b = (workload_of(kind(weight, **options), N) for kind in (ours, theirs))
        assert (a.momentum, a.decay) == (b.momentum, b.decay)
    net = model()
    engine = PrivacyEngine(key=KEY)
    private(engine, net=net, optimizer=AdamW(net.parameters(), lr=0.1, betas=(0.7, 0.9)))
    workload = engine.plan.mechanism.workload
    assert (workload.momentum, workload.decay) == (0.7, pytest.approx(0.999))


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
def test_what_has_no_private_step_is_refused(kind, name):
    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=f"{name} must be False"):
        kind([weight], **{name: True})
    with pytest.raises(ValueError, match=f"{name} must be False"):
        kind([{"params": [weight], name: True}])


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_resumed_run_is_bit_equal(tmp_path, kind):
    def start(name):
        net = model()
        engine = PrivacyEngine(key=KEY, ledger=tmp_path / name)
        optimizer = kind(net.parameters(), lr=0.05, weight_decay=0.1)
        return engine, *private(engine, net=net, optimizer=optimizer)

    engine, net, optimizer, batches = start("whole")
    train(net, optimizer, batches, steps=14)
    wanted = weights(net)
    engine.close()
    engine, net, optimizer, batches = start("parts")
    train(net, optimizer, batches, steps=9)
    engine.save_checkpoint(path=tmp_path / "model.pt", module=net, optimizer=optimizer)
    engine.close()
    engine, net, optimizer, batches = start("parts")
    engine.load_checkpoint(path=tmp_path / "model.pt", module=net, optimizer=optimizer)
    train(net, optimizer, batches, steps=5)
    assert torch.equal(weights(net), wanted)
    assert optimizer._noise is not None
    engine.close()


def test_the_page_shows_the_table_that_the_script_wrote(monkeypatch):
    pytest.importorskip("sklearn")
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root / "benchmarks")
    spec = importlib.util.spec_from_file_location("adam", root / "benchmarks" / "adam_digits.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    sys.modules.pop("digits", None)
    result = json.loads((root / "benchmarks" / "adam-digits.json").read_text())
    page = (root / "docs" / "adam.md").read_text(encoding="utf-8")
    assert script.table(result) in page
    ours, plain = (f"{noise:.2g}" for noise in result["step_noise"].values())
    assert f"standard deviation of {ours} at a step, where that of DP-SGD has {plain}" in page
    rows = {row["method"]: row["accuracy"] for row in result["rows"]}
    for rate in ("0.001", "0.01"):
        stock = statistics.mean(rows["stock Opacus, Adam"][rate])
        assert statistics.mean(rows["planner's choice, our Adam"][rate]) > stock
