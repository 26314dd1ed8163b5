from __future__ import annotations

import warnings
from importlib import metadata

import numpy as np
import opacus
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import KEY, dataset, loader, model, private, train, weights

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key
from corrnoise.torch import PrivacyEngine


def stock_engine():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return opacus.PrivacyEngine()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_dp_sgd_with_opacus_normals_equals_stock_opacus_bit_for_bit(mode, clipping):
    clip = 0.7 if clipping == "flat" else [0.2, 0.3, 0.4, 0.1]
    results = []
    for engine, more in (
        (stock_engine(), {"poisson_sampling": False}),
        (PrivacyEngine(), {"mechanism": "dp_sgd", "sampling": "fixed", "epochs": 3}),
    ):
        net = model()
        made = engine.make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
            data_loader=loader(),
            noise_multiplier=1.3,
            max_grad_norm=clip,
            clipping=clipping,
            grad_sample_mode=mode,
            noise_generator=torch.Generator().manual_seed(5),
            **more,
        )
        wrapped, optimizer, batches = made
        train(wrapped, optimizer, batches, steps=14)
        results.append(weights(net))
    assert torch.equal(*results)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("mechanism", ["bisr", "band_mf", "blt"])
def test_only_the_noise_differs_from_stock_opacus(mode, mechanism):
    """One step of each, from the same weights: gradients differ by the noise and nothing else."""
    engine, own = PrivacyEngine(key=KEY), model()
    net, optimizer, *rest = private(engine, net=own, mechanism=mechanism, grad_sample_mode=mode)
    batches, criterion = rest[-1], rest[0] if mode == "ghost" else None
    train(net, optimizer, batches, steps=4, criterion=criterion)
    start = {name: value.clone() for name, value in own.state_dict().items()}
    train(net, optimizer, batches, steps=1, criterion=criterion)
    ours = torch.cat([p.grad.reshape(-1) for p in net.parameters()])

    plain = model()
    wrapped, private_optimizer, *rest = stock_engine().make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=0.1),
        data_loader=loader(),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    plain.load_state_dict(start)
    x, y = dataset()[40:50]  # the fifth batch
    criterion = rest[0] if mode == "ghost" else nn.CrossEntropyLoss()
    criterion(wrapped(x), y).backward()
    private_optimizer.step()
    exact = torch.cat([p.grad.reshape(-1) for p in plain.parameters()])
    noise = CorrelatedNoise(engine.plan.mechanism, KEY).row(4, 0, exact.numel())
    assert torch.allclose(ours - exact, torch.from_numpy(noise) / 10, atol=1e-5)


def test_the_covariance_of_parameters_is_that_of_a_times_noising():
    """Zero gradients, many weights: Cov(θ_s, θ_t) = (ηασC/B)²·(A C⁻¹ C⁻ᵀ Aᵀ)[s, t].

    False alarm: 300 entries, each a mean of 20,000 products, beyond 6 of its standard deviations:
    below 1e-6.
    """
    d, epochs, sigma, clip, rate = 20_000, 6, 2.0, 0.5, 0.1
    net = nn.Linear(d, 1, bias=False)
    nn.init.zeros_(net.weight)
    data = TensorDataset(torch.zeros(12, d), torch.zeros(12, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.8, weight_decay=0.3)
    engine = PrivacyEngine(key=Key.from_bytes(bytes(range(1, 33))))
    wrapped, optimizer, batches = engine.make_private(
        module=net,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=3),
        noise_multiplier=sigma,
        max_grad_norm=clip,
        epochs=epochs,
        mechanism="bisr",
        sampling="fixed",
    )
    rows: list[torch.Tensor] = []
    n = 4 * epochs

    def zero(output, target):
        return (output * 0.0).sum(dim=1).mean()

    train(
        wrapped,
        optimizer,
        batches,
        steps=n,
        criterion=zero,
        after=lambda _: rows.append(weights(net)),
    )
    path = torch.stack(rows).double().numpy()
    mechanism = engine.plan.mechanism
    a, c_inv = (np.tril(toeplitz(v)) for v in (mechanism.workload.coef, mechanism.noising_coef))
    b = a @ c_inv * (rate * sigma * clip / 3)
    expected = b @ b.T
    found = path @ path.T / d
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / d)
    assert np.max(np.abs(found - expected) / spread) < 6.0
    assert np.max(np.abs(path.mean(axis=1)) / np.sqrt(np.diag(expected) / d)) < 6.0
    # and it is not what independent noise would give
    plain = a @ a.T * (rate * sigma * clip / 3) ** 2
    assert np.max(np.abs(found - plain) / spread) > 50.0


def toeplitz(column):
    n = len(column)
    return np.array([[column[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])


def test_micro_batches_give_one_noise_for_each_logical_step():
    results = []
    for size in (None, 4):
        net = model()
        engine = PrivacyEngine(key=KEY)
        wrapped, optimizer, batches = private(engine, net=net, sampling="balls-in-bins")
        if size is None:
            train(wrapped, optimizer, batches, steps=18)
        else:
            for _ in range(3):
                with BatchMemoryManager(
                    data_loader=batches, max_physical_batch_size=size, optimizer=optimizer
                ) as small:
                    for x, y in small:
                        assert len(x) <= size
                        optimizer.zero_grad()
                        nn.CrossEntropyLoss()(wrapped(x), y).backward()
                        optimizer.step()
        assert engine.steps_taken == 18
        results.append(weights(net))
    assert torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_an_empty_batch_still_adds_noise_and_counts(mode):
    data = DataLoader(dataset(9), batch_size=1)  # 9 bins for 9 examples: some are empty
    engine, net = PrivacyEngine(key=KEY), model()
    # torch's expanded weights take no empty batch: Opacus can put a random one in its place.
    fake = mode == "ew"
    net, optimizer, *rest = private(
        engine,
        net=net,
        data_loader=data,
        sampling="balls-in-bins",
        grad_sample_mode=mode,
        rand_on_empty=fake,
    )
    batches, criterion = rest[-1], rest[0] if mode == "ghost" else nn.CrossEntropyLoss()
    sizes = []
    for x, y in batches:
        before = weights(net)
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
        sizes.append(len(x))
        assert not torch.equal(before, weights(net))
        assert torch.isfinite(weights(net)).all()
    if not fake:
        assert 0 in sizes
        assert sum(sizes) == 9
    assert engine.steps_taken == 9


def test_the_divisor_is_declared_and_not_the_size_of_the_batch():
    engine = PrivacyEngine(key=KEY)
    _, optimizer, batches = private(engine, sampling="poisson", mechanism="dp_sgd")
    assert optimizer.expected_batch_size == 10
    assert len({len(x) for x, _ in batches}) > 1


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_delivers_the_batches_of_the_plan(workers):
    engine = PrivacyEngine(key=KEY)
    data = loader(num_workers=workers)
    net, optimizer, batches = private(engine, data_loader=data, sampling="balls-in-bins")
    assert len(batches) == 6
    expected = engine.plan.batches(KEY)
    x_all = dataset().tensors[0]
    seen = []

    def check(count):
        assert engine.steps_taken == count

    for _ in range(3):
        for x, y in batches:
            assert torch.equal(x, x_all[expected.indices(engine.steps_taken)])
            seen.append(len(x))
            optimizer.zero_grad()
            nn.CrossEntropyLoss()(net(x), y).backward()
            optimizer.step()
            check(len(seen))
    assert len(seen) == 18


def test_looking_at_the_data_without_a_step_changes_nothing():
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine)
    first = [x for x, _ in batches]
    train(net, optimizer, batches, steps=8)
    again = next(iter(batches))[0]
    assert torch.equal(again, first[2])  # step 8 of epochs of 6


def test_epsilon_grows_with_the_steps_to_the_planned_one():
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(
        engine, target_epsilon=4.0, target_delta=1e-3, epochs=3, sampling="fixed"
    )
    assert engine.get_epsilon(1e-3) == 0.0
    spent = []
    train(net, optimizer, batches, steps=18, after=lambda _: spent.append(engine.get_epsilon(1e-3)))
    assert spent == sorted(spent)
    assert spent[-1] == engine.plan.epsilon == 4.0
    assert spent[5] == pytest.approx(engine.plan.calibration.spent(6))
    assert engine.accountant.get_epsilon(delta=1e-3) == 4.0
    assert engine.get_epsilon(1e-5) > 4.0 > engine.get_epsilon(1e-1) > 0.0


def test_the_noise_is_calibrated_for_the_mechanism_that_runs():
    engine = PrivacyEngine(key=KEY)
    private(
        engine, target_epsilon=4.0, target_delta=1e-3, epochs=3, mechanism="blt", sampling="fixed"
    )
    noise = CorrelatedNoise(engine.plan.mechanism, KEY)
    assert noise.mechanism == engine.plan.mechanism
    exact = cn.account(
        noise.mechanism,
        engine.plan.participation,
        noise_multiplier=engine.plan.noise_multiplier,
        delta=1e-3,
    )
    assert exact.epsilon <= 4.0


def test_defaults_follow_opacus_flags():
    for more, sampling, name in (
        ({}, "balls-in-bins", "bisr"),
        ({"poisson_sampling": False}, "fixed", "bisr"),
        ({"mechanism": "dp_sgd"}, "poisson", "dp_sgd"),
        (
            {"mechanism": "band_mf", "num_bands": 3, "sampling": "cyclic-poisson"},
            "cyclic-poisson",
            "band_mf",
        ),
    ):
        engine = PrivacyEngine(key=KEY)
        private(engine, **{"sampling": None, **more})
        assert (engine.plan.sampling.name, engine.plan.mechanism.name) == (sampling, name)
        assert repr(engine.plan.mechanism.workload) == "sgd(18, momentum=0.9, decay=1.0)"


def test_a_plan_decides_everything():
    plan = cn.plan(
        num_examples=60, batch_size=10, epochs=3, epsilon=4, delta=1e-3, sampling="fixed"
    )
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine, plan=cn.Plan.from_json(plan.to_json()))
    assert engine.plan == plan
    train(net, optimizer, batches, steps=18)
    assert engine.get_epsilon(1e-3) == 4.0


def test_the_planner_can_choose():
    engine = PrivacyEngine(key=KEY)
    private(
        engine, target_epsilon=4.0, target_delta=1e-3, epochs=3, mechanism="best", sampling="fixed"
    )
    assert engine.plan.alternatives
    assert engine.plan.epsilon == 4.0


def test_noise_is_fresh_unless_a_key_is_given():
    found = []
    for key in (None, None, KEY, KEY):
        net = model()
        wrapped, optimizer, batches = private(PrivacyEngine(key=key), net=net)
        train(wrapped, optimizer, batches, steps=2)
        found.append(weights(net))
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


def test_the_key_is_not_shown():
    engine = PrivacyEngine(key=KEY)
    private(engine)
    state = engine.state_dict()
    for text in (repr(engine.key), repr(state), engine.statement().to_json()):
        assert KEY.reveal().hex() not in text
    assert engine.key.fingerprint in engine.statement().to_text()


def test_the_statement_says_what_a_reviewer_needs():
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(
        engine, mechanism="bisr", sampling="balls-in-bins", epochs=3, target_epsilon=4.0,
        target_delta=1e-3,
    )  # fmt: skip
    train(net, optimizer, batches, steps=7)
    statement = engine.statement()
    text = statement.to_text()
    for part in (
        "one example",
        "one example against an empty one; the number of examples is public",
        "7 of 18 released",
        "in a random one of the first 6 steps (b) and in every b-th step after it, so at most 3 "
        "times (k)",
        "balls-in-bins",
        "60 examples, 10 expected in a batch",
        "Clip norm",
        "a proven upper bound",  # of a part of the run, where a certificate would take longer
        "ChaCha20",
        f"torch {torch.__version__.split('+')[0]}",
        f"opacus {metadata.version('opacus')}",
    ):
        assert part in text, part
    assert statement.epsilon == engine.get_epsilon(engine.plan.delta) < statement.planned_epsilon
    assert len(text.splitlines()) < 40
    train(net, optimizer, batches, steps=11)
    text = engine.statement().to_text()
    assert "certified by sampling; it fails with probability at most 1e-09" in text
    assert engine.statement().epsilon == 4.0


def test_a_deterministic_run_does_not_depend_on_torchs_generator():
    found = []
    for seed in (1, 2):
        net = model()
        torch.manual_seed(seed)
        wrapped, optimizer, batches = private(
            PrivacyEngine(key=KEY), net=net, sampling="balls-in-bins"
        )
        train(wrapped, optimizer, batches, steps=5)
        found.append(weights(net))
    assert torch.equal(*found)


def test_weights_of_the_first_step_are_normal():
    # False alarm: 1e-6.
    net = nn.Linear(400, 50)
    engine = PrivacyEngine(key=KEY)
    data = DataLoader(TensorDataset(torch.zeros(8, 400), torch.zeros(8, 50)), batch_size=4)
    wrapped, optimizer, batches = private(
        engine, net=net, data_loader=data, optimizer=torch.optim.SGD(net.parameters(), lr=1.0)
    )
    before = weights(net)
    train(wrapped, optimizer, batches, steps=1, criterion=lambda out, y: (out * 0.0).mean())
    moved = (weights(net) - before).numpy() * 4
    assert stats.kstest(moved, "norm").pvalue > 1e-6


def test_memory_and_rounds_of_the_engine_reach_the_noise():
    for options in ({}, {"target_epsilon": 4.0, "target_delta": 1e-3, "epochs": 3}):
        engine = PrivacyEngine(key=KEY, memory=3, rounds=12)
        private(engine, **{"sampling": "fixed", **options})
        assert (engine.plan.memory, engine.plan.rounds) == (3, 12)
        assert 0 < engine._setup.noise.scheme.num_vectors <= 3
        assert "ChaCha12" in engine.statement().to_text()


def test_a_batch_may_be_larger_than_the_dataset():
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine, data_loader=loader(20, 64))
    train(net, optimizer, batches, steps=3)
    assert engine.plan.batch_size == 20


def test_the_divisor_survives_rounding():
    assert int(49 * (1 / 49)) == 0  # what Opacus would divide by
    engine = PrivacyEngine(key=KEY)
    net, optimizer, batches = private(engine, data_loader=loader(49, 1))
    assert optimizer.expected_batch_size == 1
    train(net, optimizer, batches, steps=2)
    assert torch.isfinite(weights(net)).all()
