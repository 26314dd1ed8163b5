"""The noise of ``corrnoise.jax`` against the stream of NumPy, and what it refuses."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import corrnoise as cn
from corrnoise.jax import (
    NoiseState,
    correlated_noise,
    pallas_kernel,
    secret_words,
    slices,
    transformation,
)
from corrnoise.jax.chacha import in_registers, in_rows
from corrnoise.jax.rows import Source, blocks_of, noise_of
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream

KEY = Key.from_bytes(bytes(range(32)))
MECHANISM = cn.mechanisms.bisr(cn.workloads.prefix_sum(20), num_bands=4)
# A pair in the tail, R < 2^8, of this key in stream 0 at step 0; found by a search.
TAIL_INDEX = 84_206_250


def source(weights=(1.0,), step=3, stream=5, rounds=20):
    words = np.frombuffer(NoiseStream(KEY, stream).secret, "<u4").astype(np.uint32)
    return Source(
        jnp.asarray(words), jnp.asarray(weights, jnp.float32), jnp.uint32(step), stream, rounds
    )


def flat(tree):
    return np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(("rounds", "unroll"), [(20, 3), (20, 9), (12, 4), (8, 1)])
def test_words_are_those_of_the_stream_bit_for_bit(rounds, unroll):
    here, numbers = source(rounds=rounds), blocks_of(jnp.arange(7, 10))
    tail = here.tail(numbers, jnp.uint32(0))
    expected = NoiseStream(KEY, 5, rounds).words(3, 7 * 512, 10 * 512)
    rows = jax.jit(lambda: in_rows(here.secret, tail, rounds))()
    words = jax.jit(lambda: in_registers(list(here.secret), tail, rounds, unroll=unroll))()
    for found in (np.asarray(rows), np.stack([np.asarray(word) for word in words])):
        np.testing.assert_array_equal(found.transpose(1, 0, 2).reshape(-1), expected)


def test_normals_are_exact_to_a_millionth_also_in_the_tail():
    first = TAIL_INDEX // 512 - 1
    found = jax.jit(noise_of)(source(step=0, stream=0), blocks_of(first + jnp.arange(3)))
    stream = NoiseStream(KEY)
    start, stop = first * 512, (first + 3) * 512
    assert stream.words(0, TAIL_INDEX, TAIL_INDEX + 1)[0] < 256
    exact = stream.normals(0, start, stop, np.float64)
    assert np.abs(np.asarray(found).reshape(-1) - exact).max() < 1e-6
    # The fast path of NumPy is as exact, so that both are the same stream.
    assert np.abs(np.asarray(found).reshape(-1) - stream.normals(0, start, stop)).max() < 2e-6


@pytest.mark.parametrize("place", [(0, 3), (TAIL_INDEX // 512 - 1, 100)])
def test_the_kernel_for_cuda_computes_the_same_noise(place):
    group, rest = place
    here = source(weights=(1.0, -0.5), step=1, stream=0)
    values = jnp.arange(2 * 1300, dtype=jnp.float32).reshape(2, 1300) / 1000
    groups, rests = jnp.array([group, group + 9], jnp.uint32), jnp.array([rest, 511])
    by_xla = jax.jit(slices.add_by_xla, static_argnums=4)
    expected = by_xla(values, groups, rests, here, 4.0)
    found = pallas_kernel.add_to_slices(
        values, groups, rests, here, 4.0, interpret=True, layout=pallas_kernel.Layout(unroll=1)
    )
    assert float(jnp.abs(found - expected).max()) < 1e-6
    assert float(jnp.abs(found - values / 4).max()) > 0.1


def test_the_kernel_for_cuda_is_lowered_without_a_device():
    noise, grads = correlated_noise(MECHANISM, KEY, scale=1.0), jnp.zeros(3000)
    step = jax.jit(lambda g, s, k: noise.update(g, s, secret=k))
    traced = step.trace(grads, noise.init(grads), secret_words(KEY))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text
    assert "lg2.approx" in text


def test_the_same_noise_as_the_other_backends_in_a_pytree_and_under_scan():
    tree = {"a": jnp.zeros((10, 33)), "b": [jnp.zeros(7), jnp.zeros((0, 3)), jnp.zeros((600, 300))]}
    noise = correlated_noise(MECHANISM, KEY, scale=2.0, divisor=4.0)

    @jax.jit
    def run(secret):
        def step(state, _):
            updates, state = noise.update(tree, state, secret=secret)
            return state, updates

        return jax.lax.scan(step, noise.init(tree), None, length=6)

    state, rows = run(secret_words(KEY))
    assert int(state.step) == 6
    reference = CorrelatedNoise(MECHANISM, KEY)
    for step in range(6):
        found = flat(jax.tree.map(lambda leaf, step=step: leaf[step], rows))
        expected = reference.row(step, 0, found.size) * 0.5
        assert np.abs(found - expected).max() < 1e-6


def test_the_covariance_of_what_is_released_is_that_of_the_mechanism():
    """100,000 samples of 6 steps: entries within 6 standard errors; false alarms below 1e-7."""
    small = cn.mechanisms.bisr(cn.workloads.prefix_sum(6), num_bands=3)
    noise = correlated_noise(small, KEY, scale=1.0)
    zeros = jnp.zeros(100_000)
    update = jax.jit(lambda state, secret: noise.update(zeros, state, secret=secret))
    state, rows = noise.init(zeros), []
    for _ in range(6):
        row, state = update(state, secret_words(KEY))
        rows.append(np.asarray(row, np.float64))
    found = np.stack(rows) @ np.stack(rows).T / zeros.size
    inverse = small.in_float32().noising_matrix(6)
    expected = inverse @ inverse.T
    errors = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / zeros.size)
    assert np.all(np.abs(found - expected) < 6 * errors)


def test_past_the_last_step_everything_is_nan_and_stays_so():
    noise, grads = correlated_noise(MECHANISM, KEY, scale=0.0), {"w": jnp.ones(5)}
    last = NoiseState(jnp.int32(19), noise.init(grads).layout)
    updates, state = noise.update(grads, last)
    assert np.all(np.isfinite(updates["w"]))
    for _ in range(3):
        updates, state = noise.update(grads, state)
        assert np.all(np.isnan(updates["w"]))
        assert int(state.step) == 20
    updates, _ = noise.update(grads, NoiseState(jnp.int32(-1), state.layout))
    assert np.all(np.isnan(updates["w"]))


def test_in_a_chain_of_optax_with_bfloat16():
    noise = correlated_noise(MECHANISM, KEY, scale=1.0)
    chain = optax.chain(noise, optax.sgd(0.5))
    params = {"w": jnp.zeros(600, jnp.bfloat16)}
    updates, _ = chain.update(params, chain.init(params), params, secret=secret_words(KEY))
    expected = -0.5 * CorrelatedNoise(MECHANISM, KEY).row(0, 0, 600)
    assert updates["w"].dtype == jnp.bfloat16
    assert np.abs(np.asarray(updates["w"], np.float32) - expected).max() < 2**-8 * 4


def test_two_groups_of_leaves_with_one_noise_are_refused(monkeypatch):
    monkeypatch.setattr(transformation, "_GROUPS", {})
    params = {"a": jnp.zeros(5), "b": jnp.zeros(5)}

    def grouped(*streams):
        noises = [correlated_noise(MECHANISM, KEY, scale=1.0, stream=k) for k in streams]
        return optax.multi_transform(
            {k: optax.chain(noise, optax.sgd(0.1)) for k, noise in enumerate(noises)},
            {"a": 0, "b": 1},
        )

    for _ in range(2):  # the same groups again, as in a notebook
        state = grouped(1, 2).init(params)
    updates, _ = grouped(1, 2).update(params, state)
    assert not np.any(np.asarray(updates["a"]) == np.asarray(updates["b"]))
    with pytest.raises(ValueError, match="key and stream must serve one group of leaves"):
        grouped(3, 3).init(params)
    frozen = {0: correlated_noise(MECHANISM, KEY, scale=1.0), 1: optax.set_to_zero()}
    optax.multi_transform(frozen, {"a": 0, "b": 1}).init(params)


@pytest.mark.parametrize("kind", [jnp.float16, jnp.int32, jnp.complex64])
def test_leaves_that_cannot_get_noise_are_refused(kind):
    noise = correlated_noise(MECHANISM, KEY, scale=1.0)
    with pytest.raises(ValueError, match=r"leaves must be float32 or bfloat16, got .* in \['w'\]"):
        noise.init({"w": jnp.zeros(3, kind)})


def test_other_shapes_than_those_of_init_are_refused():
    noise = correlated_noise(MECHANISM, KEY, scale=1.0)
    state = noise.init({"w": jnp.zeros(3)})
    for other in ({"w": jnp.zeros(4)}, {"w": jnp.zeros(3, jnp.bfloat16)}, {"w": jnp.zeros((3, 1))}):
        with pytest.raises(ValueError, match="updates must have the shapes and dtypes that init"):
            noise.update(other, state)


def test_a_batch_of_updates_is_refused():
    noise = correlated_noise(MECHANISM, KEY, scale=1.0)
    state = noise.init(jnp.zeros(3))
    with pytest.raises(ValueError, match="updates must not be batched by vmap"):
        jax.vmap(lambda grads: noise.update(grads, state)[0])(jnp.zeros((2, 3)))


@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_updates_of_single_devices_are_refused(how):
    noise = correlated_noise(MECHANISM, KEY, scale=1.0)
    state = noise.init(jnp.zeros(3))

    def update(grads):
        return noise.update(grads, state)[0]

    mesh, part = jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(update, mesh=mesh, in_specs=part, out_specs=part)
    if how == "pmap":
        mapped = jax.pmap(update)
    with pytest.raises(ValueError, match="update must be called outside of shard_map and pmap"):
        mapped(jnp.zeros(3) if how == "shard_map" else jnp.zeros((1, 3)))


def test_a_batch_of_updates_with_a_key_for_each():
    noise, zeros = correlated_noise(MECHANISM, KEY, scale=1.0), jnp.zeros((2, 600))
    other = Key.from_bytes(bytes(range(1, 33)))
    state = noise.init(zeros[0])
    secrets = jnp.stack([secret_words(KEY), secret_words(other)])
    rows = jax.vmap(lambda g, words: noise.update(g, state, secret=words)[0])(zeros, secrets)
    for key, row in zip((KEY, other), rows, strict=True):
        assert np.abs(np.asarray(row) - CorrelatedNoise(MECHANISM, key).row(0, 0, 600)).max() < 1e-6


def test_rows_of_several_steps_by_vmap_over_the_step():
    noise, zeros = correlated_noise(MECHANISM, KEY, scale=1.0), jnp.zeros(600)
    layout = noise.init(zeros).layout
    rows = jax.vmap(lambda step: noise.update(zeros, NoiseState(step, layout))[0])(jnp.arange(3))
    for step, row in enumerate(rows):
        expected = CorrelatedNoise(MECHANISM, KEY).row(step, 0, 600)
        assert np.abs(np.asarray(row) - expected).max() < 1e-6


def test_the_same_noise_where_jit_is_disabled():
    noise, zeros = correlated_noise(MECHANISM, KEY, scale=1.0), jnp.zeros((2, 300))
    with jax.disable_jit():
        found, _ = noise.update(zeros, noise.init(zeros))
    assert np.abs(flat(found) - CorrelatedNoise(MECHANISM, KEY).row(0, 0, 600)).max() < 1e-6


def test_a_mechanism_that_needs_stored_noise_is_refused():
    part = cn.Participation(num_steps=20, min_sep=10, max_participations=2)
    blt = cn.mechanisms.blt(cn.workloads.prefix_sum(20), part, num_buffers=2)
    for mechanism in (blt, cn.mechanisms.dense(cn.workloads.prefix_sum(20), part)):
        with pytest.raises(ValueError, match="plan must have a banded C⁻¹"):
            correlated_noise(mechanism, KEY, scale=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a mechanism must come with scale"),
        ({"scale": 1.0, "clip_norm": 1.0}, "a mechanism must come with scale"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"scale": 1.0, "divisor": -1.0}, "divisor must be finite and above 0"),
        ({"scale": 1.0, "divisor": 0.0}, "divisor must be finite and above 0"),
        ({"scale": 1.0, "rounds": 4}, "rounds must be one of"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        correlated_noise(MECHANISM, KEY, **arguments)


def test_the_key_is_not_stored_in_a_cache_of_programs(tmp_path):
    noise = correlated_noise(MECHANISM, KEY, scale=1.0)
    state, secret = noise.init(jnp.zeros(3)), secret_words(KEY)
    program = jax.jit(lambda g, s, words: noise.update(g, s, secret=words))
    text = program.lower(jnp.zeros(3), state, secret).as_text()
    assert str(int(secret[0])) not in text
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        with pytest.raises(ValueError, match="secret must be given where compiled programs are"):
            jax.jit(lambda g, s: noise.update(g, s)).lower(jnp.zeros(3), state)
        program.lower(jnp.zeros(3), state, secret)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_no_temporary_grows_with_the_model():
    """BISR, p = 16, on 1e9 parameters: compiled, not run."""
    mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=16)
    noise = correlated_noise(mechanism, KEY, scale=1.0)
    tree = {"a": jax.ShapeDtypeStruct((31_250, 16_000), jnp.float32),
            "b": jax.ShapeDtypeStruct((500_000_000,), jnp.float32)}  # fmt: skip
    state = jax.eval_shape(noise.init, tree)
    assert [leaf.size for leaf in jax.tree.leaves(state)] == [1]
    secret = jax.ShapeDtypeStruct((8,), jnp.uint32)
    step = jax.jit(lambda g, s, k: noise.update(g, s, secret=k), donate_argnums=0)
    memory = step.lower(tree, state, secret).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 4_000_000_000  # in place
    assert memory.temp_size_in_bytes < 20_000_000


_SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import corrnoise as cn
from corrnoise.jax import correlated_noise, secret_words

key = cn.noise.Key.from_bytes(bytes(range(32)))
mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=3)
noise = correlated_noise(mechanism, key, scale=1.0)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
parts = [((6,), P("a")), ((5, 1400), P(None, "b")), ((6, 2100), P("a", "b")),
         ((8, 100), P(("a", "b"), None)), ((3, 4, 6), P(None, "a", "b")),
         ((3, 280000), P(None, "b"))]
places = [NamedSharding(mesh, spec) for _, spec in parts]
tree = [jax.device_put(jnp.zeros(shape), place) for (shape, _), place in zip(parts, places)]
step = jax.jit(lambda g, s, k: noise.update(g, s, secret=k))
state, secret = noise.init(tree), secret_words(key)
step = step.lower(tree, state, secret).compile()
text = step.as_text()
found = re.findall("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", text)
assert not found, found
for _ in range(3):
    rows, state = step(tree, state, secret)
for row, place in zip(rows, places):
    assert row.sharding.is_equivalent_to(place, row.ndim), row.sharding
flat = np.concatenate([np.asarray(row).reshape(-1) for row in rows])
expected = cn.noise.CorrelatedNoise(mechanism, key).row(2, 0, flat.size)
assert np.abs(flat - expected).max() < 2e-6

# Shards of which the last one is shorter, or empty, get no noise of others either.
parts = [((5, 7), P("a", "b")), ((9, 3, 5), P(None, ("a", "b"), None)), ((300, 5), P(None, "b")),
         ((3, 1307), P(None, ("a", "b"))), ((2, 5), P(None, ("a", "b")))]
@jax.jit
def uneven(state, secret):
    tree = [jax.lax.with_sharding_constraint(jnp.zeros(shape), NamedSharding(mesh, spec))
            for shape, spec in parts]
    return noise.update(tree, state, secret=secret)[0]
state = noise.init([jnp.zeros(shape) for shape, _ in parts])
flat = np.concatenate([np.asarray(row).reshape(-1) for row in uneven(state, secret)])
expected = cn.noise.CorrelatedNoise(mechanism, key).row(0, 0, flat.size)
assert np.abs(flat - expected).max() < 2e-6

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
grads = jax.device_put(jnp.zeros((6, 2100)), NamedSharding(mesh, P("a", "b")))
step = jax.jit(lambda g, s, k: noise.update(g, s, secret=k))
step = step.lower(grads, noise.init(grads), secret).compile()
text = step.as_text()
found = re.findall("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", text)
assert not found, found
row, _ = step(grads, noise.init(grads), secret)
expected = cn.noise.CorrelatedNoise(mechanism, key).row(0, 0, row.size)
assert np.abs(np.asarray(row).reshape(-1) - expected).max() < 2e-6
print("same")
"""


def test_every_device_makes_its_own_part_without_communication(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = subprocess.run(
        [sys.executable, "-c", _SHARDED], capture_output=True, text=True, check=False
    )
    assert found.stdout == "same\n", found.stderr
