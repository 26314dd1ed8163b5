"""C⁻¹z for every mechanism, scheme, sharding and restart, against the explicit matrix product."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import corrnoise as cn
from corrnoise.algebra import toeplitz
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import DenseMechanism, ToeplitzMechanism
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream
from corrnoise.noise.filtering import scheme
from corrnoise.noise.filtering.filters import Filter
from corrnoise.noise.generator.stream import TILE

KEY = Key.from_bytes(bytes(range(32)))
N = 24
WORKLOAD = cn.workloads.prefix_sum(N)
PART = cn.Participation(N, 8, 3)
MECHANISMS = {
    "dp_sgd": cn.mechanisms.dp_sgd(WORKLOAD),
    "bisr-1": cn.mechanisms.bisr(WORKLOAD, num_bands=1),
    "bisr-4": cn.mechanisms.bisr(WORKLOAD, num_bands=4),
    "bisr-n": cn.mechanisms.bisr(WORKLOAD, num_bands=N),
    "band_inv_mf": cn.mechanisms.band_inv_mf(WORKLOAD, PART, num_bands=5),
    "square_root": cn.mechanisms.square_root(WORKLOAD),
    "bsr": cn.mechanisms.bsr(WORKLOAD, num_bands=7),
    "bsr-sgd": cn.mechanisms.bsr(cn.workloads.sgd(N, momentum=0.9, decay=0.999), num_bands=7),
    "band_mf": cn.mechanisms.band_mf(WORKLOAD, PART, num_bands=8),
    "blt": cn.mechanisms.blt(WORKLOAD, PART, num_buffers=3),
    "dense": cn.mechanisms.dense(WORKLOAD, PART),
    "dense-1": cn.mechanisms.dense(WORKLOAD, PART, num_bands=1),
    "diagonal": ToeplitzMechanism("diagonal", WORKLOAD, Rational.of(denominator=[[2.0]])),
    "two-factors": ToeplitzMechanism(
        "two", WORKLOAD, Rational.of([[2.0, -0.5], [1.0, -0.25, 0.1]])
    ),
    "mixed": ToeplitzMechanism(
        "mixed", WORKLOAD, Rational.of([[2.0, -1.5, 0.3]], [[0.5, -0.2], [3.0, 1.0]])
    ),
}
SIZES, OFFSETS = ((3, 50), (600,), (1,)), [TILE + 5000, TILE - 300, 3]


def matrix_product(mechanism, start: int, stop: int) -> np.ndarray:
    z = np.stack([NoiseStream(KEY).normals(i, start, stop, np.float64) for i in range(N)])
    if isinstance(mechanism, DenseMechanism):
        return np.linalg.inv(mechanism.strategy) @ z
    return np.linalg.inv(toeplitz.matrix(mechanism.strategy_coef)) @ z


def explicit(mechanism) -> list[np.ndarray]:
    """The rows of C⁻¹Z at the places of the gradients, one after the other."""
    parts = [
        matrix_product(mechanism, offset, offset + math.prod(shape))
        for shape, offset in zip(SIZES, OFFSETS, strict=True)
    ]
    return list(np.concatenate(parts, axis=1))


def grads(dtype=np.float32) -> list[np.ndarray]:
    return [np.full(shape, 0.5, dtype) for shape in SIZES]


def flat(arrays) -> np.ndarray:
    return np.concatenate([np.asarray(a).ravel() for a in arrays])


def run(noise: CorrelatedNoise, step: int, dtype=np.float32) -> np.ndarray:
    target = grads(dtype)
    noise.add_(target, step, 3.0, offsets=OFFSETS)
    return flat(target)


@pytest.mark.parametrize("memory", [0, 1, 2, 4, 100])
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_step_of_every_scheme(name, memory) -> None:
    noise = CorrelatedNoise(MECHANISMS[name], KEY, memory=memory, threads=2)
    for step, row in enumerate(explicit(MECHANISMS[name])):
        assert np.allclose(run(noise, step), 0.5 + 3.0 * row, rtol=1e-5, atol=1e-5), step


@pytest.mark.parametrize("p", [1, 2, 5, 16, 24])
def test_all_schemes_of_a_banded_inverse_give_the_same_bits(p) -> None:
    mechanism = cn.mechanisms.bisr(WORKLOAD, num_bands=p)
    reference = CorrelatedNoise(mechanism, KEY)
    for kind in scheme.candidates(p):
        noise = CorrelatedNoise(mechanism, KEY, threads=1)
        noise.scheme = kind
        noise._forget(0)
        for step in range(N):
            assert np.array_equal(run(noise, step), run(reference, step)), (kind, step)


@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_a_ring_of_any_size_takes_steps_in_any_order(s) -> None:
    mechanism = cn.mechanisms.bisr(WORKLOAD, num_bands=5)
    reference = CorrelatedNoise(mechanism, KEY)
    noise = CorrelatedNoise(mechanism, KEY, threads=1)
    noise.scheme = scheme.Scheme("ring", s, 5.0 - s)
    noise._forget(0)
    for step in (0, 1, 2, 2, 9, 10, 11, 3, 4, 20, 0, 23):
        assert np.array_equal(run(noise, step), run(reference, step)), step
    assert noise._vectors.shape == (s, 751)


@pytest.mark.parametrize("memory", [0, 1, 2, 100])
@pytest.mark.parametrize("name", MECHANISMS)
def test_restart_at_any_step_with_nothing_but_the_key(name, memory) -> None:
    straight = CorrelatedNoise(MECHANISMS[name], KEY, memory=memory)
    rows = [run(straight, step) for step in range(N)]
    for step in range(N):
        noise = CorrelatedNoise(MECHANISMS[name], KEY, memory=memory)
        noise.seek(step)
        for later in range(step, min(step + 3, N)):
            assert np.array_equal(run(noise, later), rows[later]), (step, later)


@pytest.mark.parametrize("name", MECHANISMS)
def test_restart_at_any_step_from_a_saved_state(name) -> None:
    noise = CorrelatedNoise(MECHANISMS[name], KEY, memory=2)
    states, rows = [], []
    for step in range(N):
        states.append(noise.state_dict())
        rows.append(run(noise, step))
    for step in range(N):
        again = CorrelatedNoise(MECHANISMS[name], KEY, memory=2)
        again.load_state_dict(states[step])
        for later in range(step, min(step + 3, N)):
            assert np.array_equal(run(again, later), rows[later]), (step, later)


@pytest.mark.parametrize(
    ("name", "memory"), [("bisr-4", 0), ("bisr-4", 1), ("bisr-4", 2), ("blt", 0), ("dense", 0)]
)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_shard_gets_its_slice(name, memory, data) -> None:
    size, base, steps = 3000, TILE - 1500, (0, 1, 2, 3) if memory else (0, 1)
    whole = np.zeros(size, np.float32)
    noise = CorrelatedNoise(MECHANISMS[name], KEY, memory=memory)
    for step in steps:
        noise.add_([whole], step, 1.0, offsets=[base])
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=5))), size]
    parts = [np.zeros(b - a, np.float32) for a, b in itertools.pairwise(cuts)]
    order = data.draw(st.permutations(range(len(parts))))
    shard = CorrelatedNoise(MECHANISMS[name], KEY, memory=memory)
    for step in steps:
        shard.add_([parts[k] for k in order], step, 1.0, offsets=[base + cuts[k] for k in order])
    assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("name", MECHANISMS)
def test_offline_and_reference_rows(name) -> None:
    noise = CorrelatedNoise(MECHANISMS[name], KEY)
    expected = matrix_product(MECHANISMS[name], 500, 700)
    assert np.allclose(noise.rows(500, 700), expected, rtol=1e-9, atol=1e-9)
    for step in (0, 5, N - 1):
        assert np.allclose(noise.row(step, 500, 700), expected[step], rtol=1e-5, atol=1e-5)


def test_offline_uses_the_fft_for_long_coefficients() -> None:
    n = 400
    mechanism = cn.mechanisms.square_root(cn.workloads.prefix_sum(n))
    noise = CorrelatedNoise(mechanism, KEY)
    assert np.allclose(noise.rows(0, 40)[n - 1], noise.row(n - 1, 0, 40), atol=1e-5)


def test_the_default_offsets_run_on() -> None:
    noise = CorrelatedNoise(MECHANISMS["bisr-4"], KEY)
    target = [np.zeros(700, np.float32), np.zeros(0, np.float32), np.zeros((2, 400), np.float64)]
    noise.add_(target, 9, 1.0)
    assert np.array_equal(flat(target).astype(np.float32), noise.row(9, 0, 1500))


def test_threads_do_not_change_a_bit() -> None:
    size = 4 * TILE + 77
    results = []
    for threads in (1, 2, 5):
        grad = np.zeros(size, np.float32)
        CorrelatedNoise(MECHANISMS["bisr-4"], KEY, threads=threads).add_([grad], 4, 1.0)
        results.append(grad)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_poles_near_one_stay_accurate_in_float32() -> None:
    n, theta, phi = 4000, 1 - 1e-6, 1 - 1e-5
    series = Rational.of([[1.0, -theta]], [[1.0, -phi]])
    mechanism = ToeplitzMechanism("slow", cn.workloads.prefix_sum(n), series)
    noise = CorrelatedNoise(mechanism, KEY, threads=1)
    rows = noise.rows(0, 8)
    for step in range(n):
        grad = np.zeros(8, np.float32)
        noise.add_([grad], step, 1.0)
    assert np.allclose(grad, rows[-1], atol=2e-6)


# Schemes


def test_memory_buys_draws() -> None:
    spec = Filter.of(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=16))
    chosen = [scheme.choose(spec, memory, 20) for memory in range(16)]
    assert chosen[0] == scheme.Scheme("regenerate", 0, 16.0)
    assert chosen[1] == scheme.Scheme("lookahead", 1, 8.5, lookahead=2)
    assert all(c.num_vectors <= memory for memory, c in enumerate(chosen))
    costs = [scheme.step_cost(c, spec, 20) for c in chosen]
    assert costs == sorted(costs, reverse=True)
    assert {c.kind for c in scheme.candidates(16)} == {"regenerate", "lookahead", "ring"}
    rings = [c for c in scheme.candidates(16) if c.kind == "ring"]
    assert [(c.num_vectors, c.draws_per_step) for c in rings] == [(s, 16 - s) for s in range(1, 16)]


def test_the_ring_is_taken_where_it_is_fastest() -> None:
    spec = Filter.of(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4))
    assert scheme.choose(spec, 1, 20) == scheme.Scheme("lookahead", 1, 2.5, lookahead=2)
    assert scheme.choose(spec, 2, 20) == scheme.Scheme("ring", 2, 2.0)
    assert scheme.choose(spec, 3, 20) == scheme.Scheme("ring", 3, 1.0)
    assert scheme.choose(spec, 9, 20) == scheme.Scheme("ring", 3, 1.0)
    assert scheme.choose(spec, 3, 20).state_bytes(10) == 120


def test_the_model_of_time_orders_schemes_as_they_were_measured() -> None:
    """Every pair of schemes for the same bands and rounds that differ by 2 % or more."""
    page = (Path(__file__).parents[1] / "benchmarks" / "noise-h200.md").read_text(encoding="utf-8")
    line = re.compile(
        r"^(chacha20|lookahead|ring) p=(4|16)(?:, (\d) vectors)? +(\d+\.\d+) ms", re.MULTILINE
    )
    for p, count in (("4", 6), ("16", 4)):
        spec = Filter.of(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=int(p)))
        measured = {
            ("regenerate" if kind == "chacha20" else kind, int(vectors or 0)): float(time)
            for kind, bands, vectors, time in line.findall(page)
            if bands == p
        }
        assert len(measured) == count
        model = {
            (s.kind, s.num_vectors): scheme.step_cost(s, spec, 20)
            for s in scheme.candidates(int(p))
        }
        for a, b in itertools.permutations(measured, 2):
            if measured[a] < 0.98 * measured[b]:
                assert model[a] < model[b], (a, b)


def test_recursions_say_what_they_keep() -> None:
    kept = {name: CorrelatedNoise(m, KEY).scheme for name, m in MECHANISMS.items()}
    assert kept["bsr"] == scheme.Scheme("recursion", 6, 1.0)
    assert kept["blt"] == scheme.Scheme("recursion", 3, 1.0)
    assert kept["dense"].num_vectors == 7
    assert kept["mixed"].num_vectors == 3


# Order and bad input


def test_a_recursion_refuses_repeated_and_skipped_steps() -> None:
    noise = CorrelatedNoise(MECHANISMS["blt"], KEY)
    for wrong in (1, 5):
        with pytest.raises(ValueError, match=r"step must be 0, the next one.*seek"):
            run(noise, wrong)
    run(noise, 0)
    with pytest.raises(ValueError, match="step must be 1"):
        run(noise, 0)
    run(noise, 1)


def test_an_interrupted_step_is_not_continued() -> None:
    noise = CorrelatedNoise(MECHANISMS["blt"], KEY, threads=1)
    run(noise, 0)
    saved = noise.state_dict()
    expected = run(noise, 1)
    noise.load_state_dict(saved)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    backend = noise._backend("numpy")
    real, backend._run = backend._run, stop
    with pytest.raises(KeyboardInterrupt):
        run(noise, 1)
    backend._run = real
    with pytest.raises(ValueError, match="interrupted"):
        run(noise, 1)
    with pytest.raises(ValueError, match="interrupted"):
        noise.state_dict()
    noise.load_state_dict(saved)
    assert np.array_equal(run(noise, 1), expected)


def test_a_state_of_another_run_is_refused() -> None:
    noise = CorrelatedNoise(MECHANISMS["blt"], KEY)
    run(noise, 0)
    state = noise.state_dict()
    for other, field in [
        (
            CorrelatedNoise(MECHANISMS["blt"], Key.from_bytes(bytes(range(1, 33)))),
            "key_fingerprint",
        ),
        (CorrelatedNoise(MECHANISMS["blt"], KEY, stream=1), "stream"),
        (CorrelatedNoise(MECHANISMS["blt"], KEY, rounds=12), "rounds"),
        (CorrelatedNoise(MECHANISMS["bsr"], KEY), "mechanism_digest"),
    ]:
        with pytest.raises(ValueError, match=f"state must have {field}="):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="damaged"):
        CorrelatedNoise(MECHANISMS["blt"], KEY).load_state_dict({**state, "layout": [[0, 3]]})


def test_the_state_is_bound_to_its_tensors() -> None:
    noise = CorrelatedNoise(MECHANISMS["blt"], KEY)
    noise.add_([np.zeros(10, np.float32)], 0, 1.0)
    with pytest.raises(ValueError, match="grads must keep the sizes"):
        noise.add_([np.zeros(11, np.float32)], 1, 1.0)
    noise.add_([np.zeros(10, np.float32)], 1, 1.0)


GOOD = np.zeros(10, np.float32)


@pytest.mark.parametrize("name", ["bisr-4", "blt"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0, 1.0), "non-empty list"),
        ((GOOD, 0, 1.0), "non-empty list"),
        (([GOOD, None], 0, 1.0), "all torch tensors or all NumPy"),
        (([GOOD, np.zeros(3, np.int64)], 0, 1.0), r"grads\[1\] must be float32 or float64"),
        (([GOOD, np.zeros((4, 4), np.float32)[:, ::2]], 0, 1.0), r"grads\[1\] must be contiguous"),
        (([GOOD, np.broadcast_to(np.float32(0), (4,))], 0, 1.0), r"grads\[1\] must be contiguous"),
        (([GOOD, GOOD], 0, 1.0), "must not share memory"),
        (([GOOD], -1, 1.0), r"step must be in \[0, 23\]"),
        (([GOOD], N, 1.0), r"step must be in \[0, 23\], got 24; the mechanism is planned for 24"),
        (([GOOD], 0.0, 1.0), "step must be an integer"),
        (([GOOD], 0, -1.0), "scale must be finite"),
        (([GOOD], 0, math.nan), "scale must be finite"),
        (([GOOD], 0, math.inf), "scale must be finite"),
        (([GOOD], 0, 1e39), "scale must be finite in float32"),
        (([GOOD], 0, "1"), "scale must be a number"),
        (([GOOD], 0, 1.0, [-1]), r"offsets\[0\] must be in"),
        (([GOOD], 0, 1.0, [2**63 - 5]), r"offsets\[0\] must be in"),
        (([GOOD], 0, 1.0, [0, 5]), "offsets must have one entry"),
        (([GOOD, np.zeros(5, np.float32)], 0, 1.0, [0, 9]), "offsets must keep grads apart"),
    ],
)
def test_bad_input_changes_nothing(name, arguments, message) -> None:
    noise = CorrelatedNoise(MECHANISMS[name], KEY)
    with pytest.raises(ValueError, match=message):
        noise.add_(*arguments)
    assert not GOOD.any()
    target = np.zeros(10, np.float32)
    noise.add_([target], 0, 1.0)
    assert np.allclose(target, noise.row(0, 0, 10), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: CorrelatedNoise(m, KEY, memory=-1), "memory must be"),
        (lambda m: CorrelatedNoise(m, KEY, memory=math.nan), "memory must be"),
        (lambda m: CorrelatedNoise(m, KEY, memory=None), "memory must be"),
        (lambda m: CorrelatedNoise(m, KEY, rounds=7), "rounds must be"),
        (lambda m: CorrelatedNoise(m, KEY, stream=-3), "stream must be"),
        (lambda m: CorrelatedNoise(m, KEY, threads=0), "threads must be"),
        (lambda m: CorrelatedNoise(m, bytes(32)), "key must be a Key"),
        (lambda m: CorrelatedNoise(m.workload, KEY), "mechanism must be"),
        (lambda m: CorrelatedNoise(m, KEY).seek(N), "step must be in"),
        (lambda m: CorrelatedNoise(m, KEY).row(N, 0, 1), "step must be in"),
        (lambda m: CorrelatedNoise(m, KEY).row(0, 2, 1), "stop must be at least"),
    ],
)
def test_bad_arguments(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(MECHANISMS["bisr-4"])


def test_coefficients_that_are_not_finite_are_refused() -> None:
    nan = ToeplitzMechanism("nan", WORKLOAD, Rational((np.array([1.0, math.nan]),), ()))
    huge = ToeplitzMechanism("huge", WORKLOAD, Rational.of([[1.0]], [[1.0, -1e6]]))
    for mechanism in (nan, huge):
        with pytest.raises(OverflowError, match="coefficients of C⁻¹ grow beyond float64"):
            CorrelatedNoise(mechanism, KEY)
    large = ToeplitzMechanism("large", WORKLOAD, Rational.of([[1.0]], [[1.0, -100.0]]))
    with pytest.raises(ValueError, match="finite coefficients of C⁻¹ in float32"):
        CorrelatedNoise(large, KEY)


def test_a_fresh_key_is_made_where_none_is_given() -> None:
    a, b = (CorrelatedNoise(MECHANISMS["dp_sgd"]) for _ in range(2))
    assert a.key != b.key
    assert not np.array_equal(a.row(0, 0, 8), b.row(0, 0, 8))


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_realized_mechanism_has_float32_coefficients_and_stays_close(name) -> None:
    noise = CorrelatedNoise(MECHANISMS[name], KEY)
    realized = noise.mechanism
    again = CorrelatedNoise(realized, KEY).mechanism
    assert again == realized
    assert realized.name == MECHANISMS[name].name
    if isinstance(realized, DenseMechanism):
        assert np.allclose(realized.strategy, MECHANISMS[name].strategy, rtol=1e-6)
    else:
        assert realized.strategy_bands == MECHANISMS[name].strategy_bands
        assert realized.noising_bands == MECHANISMS[name].noising_bands
        assert np.allclose(
            realized.strategy_coef, MECHANISMS[name].strategy_coef, rtol=1e-5, atol=1e-6
        )
    found = realized.sensitivity(PART).value
    assert found == pytest.approx(MECHANISMS[name].sensitivity(PART).value, rel=1e-5)


def test_what_is_run_is_the_realized_mechanism() -> None:
    """A zero so close to 1 that float32 moves it: the noise follows the rounded one."""
    n = 3000
    wanted = 1.0 - 1.7e-6
    mechanism = ToeplitzMechanism(
        "slow", cn.workloads.prefix_sum(n), Rational.of([[1.0, -0.5]], [[1.0, -wanted]])
    )
    noise = CorrelatedNoise(mechanism, KEY)
    realized = noise.mechanism
    z = np.stack([NoiseStream(KEY).normals(i, 0, 64, np.float64) for i in range(n)])
    exact, meant = (toeplitz.apply(m.noising_coef, z)[-1] for m in (realized, mechanism))
    for step in range(n):
        grad = np.zeros(64, np.float32)
        noise.add_([grad], step, 1.0)
    assert np.abs(grad - exact).max() < 0.1 * np.abs(grad - meant).max()
    part = cn.Participation(n, n // 3, 3)
    change = realized.sensitivity(part).value / mechanism.sensitivity(part).value - 1
    assert 0 < abs(change) < 1e-3
