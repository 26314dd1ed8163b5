"""Private runs in JAX: the same as in PyTorch, resumed, refused, and exchanged with jax_privacy."""

import dataclasses
import importlib.util
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import same_noise

import corrnoise as cn
from corrnoise import evidence
from corrnoise.jax import (
    PrivateRun,
    clipped_sums,
    correlated_noise,
    from_jax_privacy,
    to_jax_privacy,
)
from corrnoise.noise import Key
from corrnoise.records import keys
from corrnoise.torch import PrivacyEngine

KEY = Key.from_bytes(bytes(range(32)))
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def _forget():
    keys._RELEASED.clear()  # tests repeat runs with one key on purpose


@pytest.fixture(scope="module")
def plan():
    return cn.plan(
        num_examples=1437,
        batch_size=64,
        epochs=2,
        epsilon=3,
        delta=1e-4,
        momentum=0.9,
        mechanisms=["bisr"],
        sampling="balls-in-bins",
    )


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("jax_digits", EXAMPLES / "jax_digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_torch(plan, params, example, steps):
    """The same network, data, plan and key with the engine for PyTorch; its weights as a list."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    data = TensorDataset(x[: example.TRAIN], y[: example.TRAIN])
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    with torch.no_grad():
        for weight, value in zip(net.parameters(), jax.tree.leaves(params), strict=True):
            weight.copy_(torch.tensor(np.asarray(value)))
    optimizer = torch.optim.SGD(net.parameters(), lr=example.RATE, momentum=example.MOMENTUM)
    net, optimizer, loader = PrivacyEngine(key=KEY).make_private(
        module=net,
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=64),
        max_grad_norm=example.CLIP,
        plan=plan,
    )
    taken = 0
    while taken < steps:
        for image, label in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(image), label).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                break
    return [weight.detach().numpy() for weight in net.parameters()]


def test_the_weights_are_those_of_the_engine_for_pytorch(plan, example):
    params = example.start()
    example.main(plan=plan, params=params, key=KEY, stop=30)
    ours = jax.tree.leaves(example.main.params)
    keys._RELEASED.clear()
    theirs = in_torch(plan, params, example, 30)
    moved = max(np.abs(a - b).max() for a, b in zip(theirs, jax.tree.leaves(params), strict=True))
    apart = max(np.abs(a - b).max() for a, b in zip(theirs, ours, strict=True))
    assert moved > 0.1
    assert apart < 2e-6


@pytest.fixture
def small(plan):
    """A run on 12 parameters, as its plan has it but for the data."""

    def begin(folder=None, **options):
        params = {"w": jnp.zeros((3, 4))}
        paths = {"key": KEY}
        if folder is not None:
            paths = {"key": folder / "key", "ledger": folder / "ledger"}
        run = PrivateRun(plan, params, **{"clip_norm": 1.0, "data": "none", **paths, **options})
        return run, params, run.init(params)

    return begin


def test_a_resumed_run_repeats_its_steps_or_stops(small, tmp_path):
    run, sums, state = small(tmp_path)
    first, after = run.release(sums, state)
    run.release(sums, after)
    run.close()
    run, _, state = small(tmp_path)
    assert run.steps_released == 2
    again, after = run.release(sums, state)
    np.testing.assert_array_equal(first["w"], again["w"])
    with pytest.raises(ValueError, match="step 1 was released before with another gradient"):
        run.release({"w": jnp.ones((3, 4))}, after)
    assert run.statement().steps_taken == 2
    assert run.statement().versions["jax"] == jax.__version__
    run.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_norm": 2.0}, "differs in max_grad_norm"),
        ({"settings": {"rate": 1}}, "differs in settings"),
        ({"data": "others"}, "differs in data"),
    ],
)
def test_another_run_with_the_same_key_is_refused(small, tmp_path, change, message):
    run, sums, state = small(tmp_path)
    run.release(sums, state)
    run.close()
    with pytest.raises(ValueError, match=message):
        small(tmp_path, **change)
    (tmp_path / "ledger").unlink()
    with pytest.raises(ValueError, match="key must be new or come with the ledger of its run"):
        small(tmp_path)


def test_a_plan_priced_before_rounding_is_refused(plan):
    part = plan.participation
    exact = cn.mechanisms.bisr(cn.workloads.sgd(part.num_steps, momentum=0.9), num_bands=4)
    budget = cn.calibrate(exact, part, epsilon=3, delta=1e-4, sampling="fixed")
    with pytest.raises(ValueError, match="plan must be priced for the coefficients that run"):
        PrivateRun(
            dataclasses.replace(plan, calibration=budget),
            {"w": jnp.zeros(3)},
            clip_norm=1.0,
            data="none",
        )


def test_a_key_of_this_process_serves_one_run(small):
    run, sums, state = small()
    run.release(sums, state)
    with pytest.raises(ValueError, match="key must be of one run"):
        small()


def test_settings_are_compared_as_the_ledger_has_them(small, tmp_path):
    for _ in range(2):
        run, sums, state = small(tmp_path, settings={"betas": (0.9, 0.999), "at": {1: 0.5}})
        run.release(sums, state)
        run.close()
    with pytest.raises(ValueError, match=r"settings.betas.0. \(was|differs in settings.betas"):
        small(tmp_path, settings={"betas": (0.8, 0.999), "at": {1: 0.5}})
    with pytest.raises(ValueError, match="settings must have plain values"):
        small(settings={"rate": jnp.float32(0.1)})


def test_bytes_are_no_path_for_a_key(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="key must be a Key or a path, got bytes"):
        small(key=bytes(range(32)))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="plan must be a Plan, got NoneType"):
        PrivateRun(None, jnp.zeros(3), clip_norm=1.0, data="none")


def test_two_processes_cannot_continue_one_run(small, tmp_path):
    run, _, _ = small(tmp_path)
    with pytest.raises(ValueError, match="ledger must be open in one process only"):
        small(tmp_path)
    run.close()


def test_a_copy_of_the_ledger_cannot_go_on_beside_the_run(small, tmp_path):
    run, sums, state = small(tmp_path)
    run.release(sums, state)
    (tmp_path / "copy").write_bytes((tmp_path / "ledger").read_bytes())
    with pytest.raises(ValueError, match="key must be in use by one process only"):
        small(tmp_path, ledger=tmp_path / "copy")
    run.close()
    small(tmp_path)[0].close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e4])
def test_sums_that_are_not_clipped_are_refused(small, value):
    run, sums, state = small()
    with pytest.raises(ValueError, match="clipped gradients must be finite with a norm of at most"):
        run.release({"w": sums["w"].at[0, 0].set(value)}, state)
    assert run.steps_released == 0


def test_sums_of_other_shapes_are_refused_before_they_are_recorded(small):
    run, sums, state = small()
    with pytest.raises(ValueError, match=r"got sums of shapes \[\(4, 3\)\] for parameters of"):
        run.release({"w": sums["w"].T}, state)
    other = {"w": sums["w"].T}
    with pytest.raises(ValueError, match="sums and state must be of the parameters"):
        run.release(other, run.init(other))
    assert run.steps_released == 0
    run.release(sums, state)


def test_sums_for_parameters_in_bfloat16_stay_in_float32_until_they_have_noise(plan):
    """Of 1,022 or 1,021 gradients of norm 1, rounded to bfloat16, the sums are 4 apart."""
    params = {"w": jnp.zeros((3, 4), jnp.bfloat16)}
    run = PrivateRun(plan, params, clip_norm=1.0, data="none", key=KEY)
    state, sums = run.init(params), {"w": jnp.ones((3, 4)) / 7}
    with pytest.raises(ValueError, match="sums must be float32"):
        run.release({"w": sums["w"].astype(jnp.bfloat16)}, state)
    assert run.steps_released == 0
    rounded, after = run.release(sums, state)
    noise = correlated_noise(plan, KEY, clip_norm=1.0)
    exact, _ = jax.jit(noise.update)(sums, noise.init(sums))
    assert rounded["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded["w"], exact["w"].astype(jnp.bfloat16))
    assert after.layout == state.layout


def test_threads_cannot_release_two_gradients_with_one_noise(small, tmp_path):
    run, _, state = small(tmp_path)
    found: list[str] = []

    def release(value):
        try:
            run.release({"w": jnp.full((3, 4), value)}, state)
            found.append("released")
        except ValueError as refused:
            found.append(str(refused)[:52])

    threads = [threading.Thread(target=release, args=(float(k),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = "step 0 was released before with another gradient: ad"
    assert sorted(found) == ["released"] + [refused] * 7
    run.close()
    small(tmp_path)[0].close()  # the ledger is whole


@pytest.mark.parametrize("give", [np.asarray, jax.device_put])
def test_sums_in_a_buffer_that_is_used_again_are_those_that_were_recorded(plan, give):
    """JAX computes later, and on a CPU from the memory of NumPy itself."""
    size = 1 << 20
    memory = np.zeros(size + 16, np.float32)
    first = -memory.ctypes.data % 64 // 4  # JAX takes memory that is aligned as it is
    buffer = memory[first : first + size]
    run = PrivateRun(plan, jnp.zeros(size), clip_norm=1.0, data="none", key=KEY)
    state = run.init(jnp.zeros(size))
    expected = np.asarray(run.release(jnp.zeros(size), state)[0])
    found, _ = run.release(give(buffer), state)
    assert found.is_ready()  # what is written now comes too late
    buffer.fill(1e4)
    np.testing.assert_array_equal(found, expected)


def test_a_release_inside_of_compiled_functions_is_refused(small):
    run, sums, state = small()
    for inside in (
        lambda: jax.jit(run.release)(sums, state),
        lambda: jax.vmap(lambda some: run.release(some, state))({"w": jnp.zeros((2, 3, 4))}),
        lambda: jax.lax.scan(lambda at, _: run.release(sums, at)[::-1], state, length=2),
    ):
        with pytest.raises(ValueError, match="release must be called outside of jit, scan, vmap"):
            inside()
    assert run.steps_released == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros((1436, 2)), "data must have the plan's 1437 examples, got an array of 1436 rows"),
        (object(), "data must be a name or a pytree of arrays, which can be digested, got object"),
        ([np.array(["a", {}], object)], "got ndarray; pass a name"),
        (None, "got NoneType; pass a name"),
    ],
)
def test_data_of_another_size_or_without_a_digest_are_refused(small, data, message):
    with pytest.raises(ValueError, match=message):
        small(data=data)
    small(data={"x": np.zeros((1437, 2)), "from": "a survey"})


def test_steps_outside_of_the_plan_and_forks_are_refused(small, monkeypatch):
    run, sums, state = small()
    late = type(state)(jnp.int32(run.plan.num_steps), state.layout)
    with pytest.raises(ValueError, match=r"step must be in \[0, 46\), as planned, got 46"):
        run.release(sums, late)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ValueError, match="a run must stay in the process that began it"):
        run.release(sums, state)
    assert run.steps_released == 0


def test_epsilon_grows_to_that_of_the_plan(small):
    run, _, _ = small()
    spent = [run.epsilon(steps) for steps in (0, 1, 30, 46)]
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert spent[-1] == run.plan.epsilon


def test_the_example_resumes_and_its_files_agree(example, plan, tmp_path, monkeypatch):
    same_noise(monkeypatch)
    example.main(plan=plan, folder=tmp_path, stop=30)
    accuracy = example.main(plan=plan, folder=tmp_path)
    assert accuracy > 0.5  # chance is 0.1
    verdict = evidence.verify(tmp_path, keys=[tmp_path / "key"])
    assert verdict.holds, verdict.to_text()


def test_a_run_clips_by_its_own_norm(plan):
    rows = 9.0 * jnp.eye(3)
    run = PrivateRun(plan, jnp.zeros(3), clip_norm=0.5, data="none", key=KEY)
    found = run.clipped_sums(jnp.dot, jnp.zeros(3), rows, mask=jnp.arange(3) < 2)
    np.testing.assert_array_equal(
        found, clipped_sums(jnp.dot, jnp.zeros(3), rows[:2], clip_norm=0.5)
    )
    assert 0.499 < float(found[0]) <= 0.5
    assert float(found[2]) == 0.0
    run.close()


def test_clipped_sums_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(7, 5)) * np.array([[0.1], [1], [3], [10], [0], [2], [9]]))
    params = {"w": jnp.asarray(rng.normal(size=5), jnp.float32), "b": jnp.float32(0.5)}

    def loss(params, row):
        return jnp.sin(params["w"] @ row + params["b"])

    expected = {"w": np.zeros(5), "b": 0.0}
    for row in x[:6]:
        grad = {k: np.asarray(v, np.float64) for k, v in jax.grad(loss)(params, row).items()}
        norm = np.sqrt(sum(np.sum(v**2) for v in grad.values()))
        for name in grad:
            expected[name] = expected[name] + grad[name] * min(1.0, 0.7 / norm)
    x = x.at[6].set(jnp.nan)
    found = clipped_sums(loss, params, x, clip_norm=0.7, mask=jnp.arange(7) < 6)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5)
    bad = jnp.concatenate([x, jnp.full((1, 5), jnp.inf), 3e38 * jnp.ones((1, 5))])
    again = jax.jit(clipped_sums, static_argnums=0)(loss, params, bad, clip_norm=0.7)
    for name, value in expected.items():  # without a mask
        np.testing.assert_allclose(again[name], value, atol=1e-5)
    one = clipped_sums(loss, params, x[3:4], clip_norm=0.7)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(v, np.float64))) for v in one.values()))
    assert 0.7 * (1 - 1e-5) < norm <= 0.7


@pytest.mark.parametrize("clip", [1e-30, 1e-19, 1.0, 1e19])
@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0, 1e3])
def test_squares_of_gradients_neither_underflow_nor_overflow(clip, size):
    """Elements of size·C: what one example adds is the smaller one of its norm and C."""
    x = jnp.full((1, 100), np.float32(size * clip))
    (found,) = clipped_sums(lambda w, row: jnp.dot(w, row), jnp.zeros(100), x, clip_norm=clip)[None]
    norm, wanted = np.linalg.norm(np.asarray(found, np.float64)), min(1.0, 10.0 * size) * clip
    assert wanted * (1 - 1e-5) < norm <= wanted * (1 + 1e-7)


def test_a_batch_or_a_parameter_may_be_empty():
    """Random batches are, now and then."""

    def loss(params, row):
        return params["w"] @ row + params["none"].sum() + params["b"]

    params = {"w": jnp.zeros(5), "none": jnp.zeros((0, 3)), "b": jnp.float32(0.0)}
    found = clipped_sums(loss, params, jnp.ones((0, 5)), clip_norm=1.0)
    assert all(not np.asarray(value).any() for value in found.values())
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in params.items()
    }
    found = clipped_sums(loss, params, jnp.ones((1, 5)), clip_norm=1.0)
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(v, np.float64))) for v in found.values()))
    assert 1.0 - 1e-5 < norm <= 1.0


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf"), float("nan")])
def test_clip_norms_that_clip_nothing_are_refused(clip):
    with pytest.raises(ValueError, match="clip_norm must be finite and above 0"):
        clipped_sums(jnp.dot, jnp.zeros(3), jnp.ones((2, 3)), clip_norm=clip)
    limit = jax.jit(lambda c: clipped_sums(jnp.dot, jnp.zeros(3), jnp.ones((2, 3)), clip_norm=c))
    assert float(jnp.linalg.norm(limit(0.5))) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (), (1,), (3,)])
def test_a_mask_has_a_number_for_each_example(shape):
    with pytest.raises(ValueError, match="mask must have one number for each of the 2 examples"):
        clipped_sums(jnp.dot, jnp.zeros(3), jnp.ones((2, 3)), clip_norm=1.0, mask=jnp.ones(shape))


def test_one_key_serves_one_run_however_early_both_began(small):
    (first, sums, state), (second, *_) = small(), small()
    first.release(sums, state)
    with pytest.raises(ValueError, match="key must be of one run"):
        second.release(sums, state)
    assert [run.steps_released for run in (first, second)] == [1, 0]


def test_mechanisms_go_to_jax_privacy_and_back():
    workload = cn.workloads.prefix_sum(12)
    part = cn.Participation(num_steps=12, min_sep=6, max_participations=2)
    for mechanism in (
        cn.mechanisms.bisr(workload, num_bands=4),
        cn.mechanisms.bsr(workload, num_bands=4),
        cn.mechanisms.dp_sgd(workload),
    ):
        matrix = to_jax_privacy(mechanism)
        expected = mechanism.in_float32().noising_matrix(12)
        np.testing.assert_allclose(np.asarray(matrix.materialize(12)), expected, atol=1e-6)
        back = from_jax_privacy(matrix, workload)
        assert back.sensitivity(part).value == pytest.approx(
            mechanism.sensitivity(part).value, 1e-5
        )


def test_a_strategy_of_jax_privacy_is_priced_and_run_here():
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    n = 24
    workload = cn.workloads.prefix_sum(n)
    coef = toeplitz.optimal_max_error_strategy_coefs(n)[:6]
    part = cn.Participation(num_steps=n, min_sep=12, max_participations=2)
    mechanism = from_jax_privacy(coef, workload)
    theirs = float(toeplitz.minsep_sensitivity_squared(coef, 12, 2, n)) ** 0.5
    assert mechanism.sensitivity(part).value == pytest.approx(theirs, rel=1e-5)
    budget = cn.calibrate(mechanism, part, epsilon=2, delta=1e-5, sampling="fixed")
    assert budget.noise_multiplier > theirs
    with pytest.raises(ValueError, match="plan must have a banded C⁻¹"):
        correlated_noise(mechanism, KEY, scale=1.0)


def test_their_privatizer_runs_our_mechanism_with_buffers_where_ours_has_none():
    noise_addition = pytest.importorskip("jax_privacy.noise_addition")
    mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=16)
    params = jax.ShapeDtypeStruct((1000,), jnp.float32)
    theirs = noise_addition.matrix_factorization_privatizer(
        to_jax_privacy(mechanism), stddev=1.0, prng_key=0
    )
    kept = [x for x in jax.tree.leaves(jax.eval_shape(theirs.init, params)) if x.size >= 1000]
    assert sum(x.size for x in kept) == 15 * 1000
    ours = correlated_noise(mechanism, KEY, scale=1.0)
    assert [x.size for x in jax.tree.leaves(jax.eval_shape(ours.init, params))] == [1]


def test_what_is_not_toeplitz_is_refused():
    part = cn.Participation(num_steps=6, min_sep=3, max_participations=2)
    workload = cn.workloads.prefix_sum(6)
    with pytest.raises(ValueError, match="mechanism must be Toeplitz"):
        to_jax_privacy(cn.mechanisms.dense(workload, part))
    with pytest.raises(ValueError, match="strategy must be Toeplitz coefficients"):
        from_jax_privacy(np.eye(6), workload)
    with pytest.raises(ValueError, match="strategy must have finite coefficients"):
        from_jax_privacy(np.array([np.nan, 1.0]), workload)
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    coef = toeplitz.optimal_max_error_strategy_coefs(6)
    coef = coef / jnp.linalg.norm(coef)
    normalised = toeplitz.inverse_as_streaming_matrix(coef, column_normalize_for_n=6)
    with pytest.raises(ValueError, match="strategy must be a Toeplitz matrix"):
        from_jax_privacy(normalised, workload)
    # Of a banded C only the last columns differ, in rows where C⁻¹ has nearly nothing left.
    banded = toeplitz.optimal_max_error_strategy_coefs(400)[:20]
    banded = toeplitz.inverse_as_streaming_matrix(banded, column_normalize_for_n=400)
    with pytest.raises(ValueError, match="strategy must be a Toeplitz matrix"):
        from_jax_privacy(banded, cn.workloads.prefix_sum(400))
