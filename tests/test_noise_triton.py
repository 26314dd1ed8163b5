"""The Triton kernels against the specification: interpreted here, compiled where there is a GPU.

Without a CUDA device the kernels run in Triton's interpreter, which must be chosen before Triton
is imported, on tensors in main memory.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import corrnoise as cn  # noqa: E402
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream  # noqa: E402
from corrnoise.noise.backends import torch_exact, torch_targets, triton_kernel  # noqa: E402
from corrnoise.noise.backends.triton_backend import TritonBackend, Tuning  # noqa: E402
from corrnoise.noise.exact import ExactNoise  # noqa: E402
from corrnoise.noise.filtering import scheme  # noqa: E402
from corrnoise.noise.generator import normals, reals  # noqa: E402

ROOT = Path(__file__).parents[1]
DEVICE = "cuda:0" if CUDA else "cpu"
KEY = Key.from_bytes(bytes(range(200, 232)))
STREAM = NoiseStream(KEY, stream=2**31 + 5)
TUNING = Tuning() if CUDA else Tuning(block=128, num_warps=4, fast=False)
N = 5
WORKLOAD = cn.workloads.prefix_sum(N)
PART = cn.Participation(N, 2, 2)
needs_gpu = pytest.mark.skipif(not CUDA, reason="CUDA is not available")


def backend(stream: NoiseStream = STREAM, tuning: Tuning = TUNING) -> TritonBackend:
    return TritonBackend(stream, DEVICE, tuning)


def words_of(maker: TritonBackend, *place: int) -> np.ndarray:
    return maker.words(*place).cpu().numpy().view(np.uint32)


@pytest.mark.parametrize("rounds", [20, 12, 8])
def test_words_are_those_of_the_reference(rounds) -> None:
    stream = NoiseStream(KEY, 2**31 + 5, rounds)
    place = (2**32 - 2, 700, 3000)
    assert np.array_equal(words_of(backend(stream), *place), stream.words(*place))


@pytest.mark.parametrize("start", [2**36 - 333, 2**62 + 5])
def test_words_far_out(start) -> None:
    stream = NoiseStream(KEY, 1, rounds=8)
    assert np.array_equal(
        words_of(backend(stream), 3, start, start + 900), stream.words(3, start, start + 900)
    )


@triton.jit
def pairs_kernel(
    radius_words, angle_words, highs, lows, cos, sin, SIZE: tl.constexpr, FAST: tl.constexpr
):
    at = tl.arange(0, SIZE)
    r = tl.load(radius_words + at).to(tl.uint32, bitcast=True)
    a = tl.load(angle_words + at).to(tl.uint32, bitcast=True)
    e = tl.load(highs + at).to(tl.uint32, bitcast=True)
    d = tl.load(lows + at).to(tl.uint32, bitcast=True)
    v = triton_kernel.fraction((e, e, e, e, e, e, e, e, d), 0)
    f = triton_kernel.refine(triton_kernel.uniform(r, a), v)
    x, y = triton_kernel.normal_pair(f, a, -1.4142135623730951, FAST)
    tl.store(cos + at, x)
    tl.store(sin + at, y)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=[needs_gpu, pytest.mark.gpu])])
def test_box_muller_keeps_its_accuracy_at_both_ends(fast) -> None:
    """Against the definition in float64: radius to 4e-7 of itself, normals to 1e-6 of it."""
    size = 4096
    rng = np.random.default_rng(1)
    radius = rng.integers(0, 2**32, size, dtype=np.uint32)
    angle = rng.integers(0, 2**32, size, dtype=np.uint32)
    high, low = (rng.integers(0, 2**32, size, dtype=np.uint32) for _ in range(2))
    high[:60:2], low[:60:3] = 0, 0
    ends = [0, 1, 2, 255, 2**24, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 256, 2**32 - 2, 2**32 - 1]
    radius[: 4 * len(ends)] = np.repeat(np.array(ends, np.uint32), 4)
    radius[100:1100] = 2**32 - 1 - (2 ** rng.uniform(0, 31, 1000)).astype(np.uint32)
    radius[1100:2100] = (2 ** rng.uniform(0, 31, 1000)).astype(np.uint32)
    radius[2100:2500] = rng.integers(0, 2**9, 400)
    angle[0:40:4] = angle[0:40:4] & np.uint32(0xFFFFFF00)
    inputs = [torch.from_numpy(x.view(np.int32)).to(DEVICE) for x in (radius, angle, high, low)]
    cos, sin = (torch.empty(size, device=DEVICE) for _ in range(2))
    pairs_kernel[(1,)](*inputs, cos, sin, SIZE=size, FAST=fast)
    words = np.stack([radius.reshape(-1, 256), angle.reshape(-1, 256)], axis=1).reshape(-1)
    exact = normals.box_muller_exact(words, lambda pairs: (high[pairs], low[pairs]))
    exact = exact.reshape(-1, 2, 256)
    found = np.stack([x.cpu().numpy().reshape(-1, 256) for x in (cos, sin)], axis=1)
    size_of = np.hypot(exact[:, 0], exact[:, 1])[:, None]
    assert np.max(np.abs(found - exact) / size_of) < 1e-6
    measured = np.hypot(found[:, 0].astype(float), found[:, 1].astype(float))[:, None]
    assert np.max(np.abs(measured / size_of - 1)) < (8e-7 if fast else 4e-7)


def test_one_call_for_tensors_of_all_kinds() -> None:
    """Unaligned offsets, an empty tensor, three dtypes, tiles at the edges."""
    step = 4
    noise = CorrelatedNoise(cn.mechanisms.bisr(WORKLOAD, num_bands=3), KEY, 9)
    kinds = [torch.float32, torch.bfloat16, torch.float32, torch.float16]
    layout = ((2000, 100), (7, 50), (90, 0), (5000, 60))
    grads = [
        torch.linspace(-2, 2, size).to(kind).to(DEVICE)
        for kind, (_, size) in zip(kinds, layout, strict=True)
    ]
    before = [grad.clone() for grad in grads]
    backend(noise.stream).add_weighted(grads, layout, step, noise._filter.weights(step), 0.5)
    for grad, old, (offset, size) in zip(grads, before, layout, strict=True):
        row = torch.from_numpy(noise.row(step, offset, offset + size)).to(DEVICE)
        exact = old.float() + 0.5 * row
        unit = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[grad.dtype]
        assert torch.allclose(grad.float(), exact, rtol=unit, atol=2e-6)
        if size == 50 and CUDA:  # the interpreter does not round to nearest
            assert torch.mean((grad == exact.to(grad.dtype)).float()) > 0.9


# (rounds, index of a pair in the tail) under this key, stream 7 and step 3; see test_noise_stream.
TAILS = [(20, 21_109_780_133), (20, 1_099_616_730_255), (12, 42_193_488), (8, 38_757_917)]


@pytest.mark.parametrize(("rounds", "index"), TAILS)
def test_the_tail_of_the_reference(rounds, index) -> None:
    """A sum of two steps of which one has a pair in the tail; the tile is cut on both sides."""
    stream = NoiseStream(Key.from_bytes(bytes(range(32))), 7, rounds)
    start, size = index - 300, 700
    for first in (2, 3):
        out = torch.zeros(size, device=DEVICE)
        weights = np.array([0.5, -2.0], np.float32)
        backend(stream).add_weighted([out], ((start, size),), first + 1, weights, 1.0)
        z = [stream.normals(first + t, start, start + size, np.float64) for t in range(2)]
        assert np.max(np.abs(out.cpu().numpy() - (0.5 * z[0] - 2.0 * z[1]))) < 1e-5
        radius = np.hypot(z[3 - first][300], z[3 - first][556])
        assert radius > 5.76


@pytest.mark.parametrize("kind", ["lookahead", "filtered"])
def test_the_tail_in_the_other_kernels(kind) -> None:
    rounds, index = TAILS[3]
    stream = NoiseStream(Key.from_bytes(bytes(range(32))), 7, rounds)
    layout = ((index - 300, 700),)
    z = [stream.normals(step, index - 300, index + 400, np.float64) for step in (2, 3)]
    out, maker = torch.zeros(700, device=DEVICE), backend(stream)
    state = maker.zeros(1, 700)
    if kind == "lookahead":
        rows = [np.ones(1, np.float32), np.array([0.5, 1.0], np.float32)]
        maker.add_lookahead([out], layout, 2, rows, 0, 1.0, state)
        expected, kept = z[0], 0.5 * z[0] + z[1]
    else:
        noise = CorrelatedNoise(cn.mechanisms.bisr(WORKLOAD, num_bands=2), KEY)
        maker.add_filtered([out], layout, 3, noise._filter.window(1), 1.0, state)
        expected, kept = z[1], z[1]
    assert np.max(np.abs(out.cpu().numpy() - expected)) < 1e-5
    assert np.max(np.abs(state[0].cpu().numpy() - kept)) < 1e-5


def test_what_lies_around_a_tensor_is_left_alone() -> None:
    room = torch.zeros(700, device=DEVICE)
    stream = NoiseStream(KEY, rounds=8)
    weights = np.ones(1, np.float32)
    backend(stream).add_weighted([room[100:300]], ((60, 200),), 0, weights, 1.0)
    assert not room[:100].any()
    assert not room[300:].any()
    assert np.allclose(room[100:300].cpu().numpy(), stream.normals(0, 60, 260), atol=2e-6)


def _noise(monkeypatch, mechanism, kind: str | None, size: int = 1) -> CorrelatedNoise:
    """A CorrelatedNoise whose tensors on this device go to the Triton backend.

    ``size`` is what the scheme's name says of it: rows made at once, or vectors of a ring.
    """
    noise = CorrelatedNoise(mechanism, KEY, rounds=8)
    if kind is not None:
        p = noise._filter.num_terms
        assert p is not None
        of_kind = [s for s in scheme.candidates(p) if s.kind == kind]
        (noise.scheme,) = (
            s for s in of_kind if (s.num_vectors if kind == "ring" else s.lookahead) == size
        )
        noise._forget(0)
    noise._backends[DEVICE] = backend(noise.stream)
    monkeypatch.setattr(torch_targets, "check", lambda grads: (DEVICE, [g.view(-1) for g in grads]))
    return noise


CASES = {
    "regenerate": (cn.mechanisms.bisr(WORKLOAD, num_bands=3), "regenerate", 1),
    "lookahead-4": (cn.mechanisms.bisr(WORKLOAD, num_bands=3), "lookahead", 4),
    "ring-1": (cn.mechanisms.bisr(WORKLOAD, num_bands=3), "ring", 1),
    "ring-2": (cn.mechanisms.bisr(WORKLOAD, num_bands=4), "ring", 2),
    "ring-3": (cn.mechanisms.bisr(WORKLOAD, num_bands=4), "ring", 3),
    "bsr": (cn.mechanisms.bsr(WORKLOAD, num_bands=3), None, 1),
    "blt": (cn.mechanisms.blt(WORKLOAD, PART, num_buffers=2), None, 1),
    "dense": (cn.mechanisms.dense(WORKLOAD, PART), None, 1),
}
# A whole tile of 2048, and one that is cut at both ends.
OFFSETS, SIZES = [2048, 5000], [(8, 256), (3, 20)]


@pytest.mark.parametrize("case", CASES)
def test_every_scheme_against_the_rows(case, monkeypatch) -> None:
    noise = _noise(monkeypatch, *CASES[case])
    exact = np.hstack([noise.rows(o, o + r * c) for o, (r, c) in zip(OFFSETS, SIZES, strict=True)])

    def check(noise: CorrelatedNoise, step: int) -> None:
        grads = [torch.full(size, 0.25, device=DEVICE) for size in SIZES]
        noise.add_(grads, step, 2.0, offsets=OFFSETS)
        found = torch.cat([grad.view(-1) for grad in grads]).cpu().numpy()
        assert np.allclose(found, 0.25 + 2.0 * exact[step], atol=1e-5), step

    saved = None
    for step in range(N):
        if step == 3:
            saved = noise.state_dict()
        check(noise, step)
    # A restart in the middle: from nothing, and where there is a state to save from that too.
    again = _noise(monkeypatch, *CASES[case])
    again.seek(3)
    check(again, 3)
    if noise.scheme.kind == "recursion":
        again = _noise(monkeypatch, *CASES[case])
        again.load_state_dict(saved)
        check(again, 3)


def test_addresses_and_tables_are_kept_and_renewed() -> None:
    stream = NoiseStream(KEY, rounds=8)
    maker = backend(stream)
    layout, weights = ((0, 200),), np.ones(1, np.float32)
    first, second = torch.zeros(200, device=DEVICE), torch.zeros(200, device=DEVICE)
    maker.add_weighted([first], layout, 0, weights, 1.0)
    maker.add_weighted([second], layout, 0, weights, 1.0)
    maker.add_weighted([first], layout, 1, weights, 1.0)
    assert len(maker._groups) == 1
    z = [stream.normals(i, 0, 200) for i in (0, 1)]
    assert np.allclose(second.cpu().numpy(), z[0], atol=2e-6)
    assert np.allclose(first.cpu().numpy(), z[0] + z[1], atol=4e-6)


def test_sums_of_no_terms_are_refused() -> None:
    """The kernels are compiled for one term or more, and would read beyond the weights."""
    grad, maker, none = torch.zeros(200, device=DEVICE), backend(), np.zeros(0, np.float32)
    with pytest.raises(ValueError, match="at least 1 term, got 0"):
        maker.add_weighted([grad], ((0, 200),), 0, none, 1.0)
    with pytest.raises(ValueError, match="at least 1 term, got 0"):
        maker.add_lookahead([grad], ((0, 200),), 0, [none], 0, 1.0, maker.zeros(1, 200))
    assert not grad.any()


@pytest.mark.parametrize(
    ("tuning", "limit"),
    [
        (Tuning(), 56),
        (Tuning(256, 4), 112),
        (Tuning(256, 1), 255),
        (Tuning(fast=False), None),
        (Tuning(registers=None), None),
    ],
)
def test_the_limit_of_registers(tuning, limit) -> None:
    """For each block of a thread, up to what a thread may have."""
    assert tuning.limit() == limit


def test_this_file_runs_without_hypothesis() -> None:
    """Machines with a GPU often have nothing but torch and pytest.

    In a process of its own: Hypothesis's plugin for pytest is not there either.
    """
    script = "import runpy, sys; sys.modules['hypothesis'] = None; runpy.run_path(sys.argv[1])"
    conftest = str(ROOT / "tests" / "conftest.py")
    subprocess.run([sys.executable, "-c", script, conftest], check=True)


def test_the_backend_is_not_pickled() -> None:
    with pytest.raises(TypeError, match=r"Key\.save"):
        pickle.dumps(backend())


COMPILE = """
import numpy as np, torch
import noise_registers
from triton.runtime import driver

driver.set_active(noise_registers.Hopper())

import corrnoise as cn
from corrnoise.noise import Key, NoiseStream
from corrnoise.noise.filtering.filters import Filter
from corrnoise.noise.backends.triton_backend import TritonBackend

made = {}

def compile(kernel, group, **arguments):
    found = kernel.warmup(group.table, group.owners, num_warps=4, grid=(1,), **arguments)
    if kernel.__name__ == "add_weighted" and "add_weighted" not in made:
        used = noise_registers.usage(found.asm["cubin"], 4)
        assert used.registers <= 56 and used.warps >= 36, used
        assert used.spills[0] == 0 and used.instructions[1] > 500, used
    made.setdefault(kernel.__name__, set()).add(found.hash)
    assert len(found.asm["cubin"]) > 0
    assert kernel.__name__ == "add_stored" or "shf.l.wrap" in found.asm["ptx"]

workload, layout, state = cn.workloads.prefix_sum(100), ((0, 4096),), torch.zeros(3, 4096)
grads = [torch.zeros(4096)]
bisr = Filter.of(cn.mechanisms.bisr(workload, num_bands=16))
bsr = Filter.of(cn.mechanisms.bsr(workload, num_bands=4))
for word in (0, 1, 16, 0x80000000):  # Triton specializes on some values of an integer: not here
    stream = NoiseStream(Key.generate(), stream=word, rounds=8)
    stream.secret = int(word).to_bytes(4, "little") * 8
    backend = TritonBackend(stream, "cpu")
    backend._launch = compile
    for step in (15, 50):
        backend.add_weighted(grads, layout, step, bisr.weights(step), 1.0)
backend.add_lookahead(grads, layout, 48, [bisr.weights(48 + r) for r in range(2)], 0, 1.0, state)
backend.add_stored(grads, layout, 0.5, state[0])
for step in (50, 51):
    backend.add_filtered(grads, layout, step, bsr.sections(step), 1.0, state)
print({name: len(found) for name, found in made.items()})
"""


def test_the_kernels_compile_for_hopper_without_one(tmp_path) -> None:
    """Through Triton's own launch path, once for each kernel whatever key, step and count are.

    The first pass of ``add_weighted`` keeps to the registers of a kernel without a tail, with none
    in memory. With 8 rounds, since the compiler unrolls them all; a recursion is a ring and more.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    paths = [str(ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == (
        "{'add_weighted': 1, 'add_lookahead': 1, 'add_stored': 1, 'add_filtered': 1}"
    )


# On a real device


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("tuning", [Tuning(64, 2), Tuning(256, 4), Tuning(32, 1)])
@pytest.mark.parametrize("rounds", [20, 12, 8])
def test_every_tuning_gives_the_same_words(tuning, rounds) -> None:
    stream = NoiseStream(KEY, 77, rounds)
    for start in (0, 12_345, 2**36 - 5000):
        place = (9, start, start + 10_000)
        assert np.array_equal(words_of(backend(stream, tuning), *place), stream.words(*place))


@needs_gpu
@pytest.mark.gpu
def test_a_large_gradient_through_the_public_call() -> None:
    mechanism = cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=8)
    noise = CorrelatedNoise(mechanism, KEY)
    grads = [torch.zeros(3_000_001, device="cuda"), torch.zeros(7, 11, device="cuda")]
    noise.add_(grads, 50, 1.0)
    found = torch.cat([grad.view(-1) for grad in grads]).cpu().numpy()
    assert np.allclose(found, noise.row(50, 0, 3_000_078), atol=1e-5)


@needs_gpu
@pytest.mark.gpu
def test_a_far_shard_is_its_slice() -> None:
    noise = CorrelatedNoise(cn.mechanisms.bisr(cn.workloads.prefix_sum(100), num_bands=4), KEY)
    for offset in (2**32 - 1000, 2**36 - 1000, 2**40 + 77):
        grad = torch.zeros(2000, device="cuda")
        noise.add_([grad], 50, 1.0, offsets=[offset])
        assert np.allclose(grad.cpu().numpy(), noise.row(50, offset, offset + 2000), atol=1e-5)


@needs_gpu
@pytest.mark.gpu
def test_two_cuda_streams_share_no_table() -> None:
    """Each waits long behind the other's back; a table that they shared would be written over."""
    maker = backend()
    layout, weights = ((0, 3000),), np.ones(1, np.float32)
    grads = [torch.zeros(3000, device="cuda") for _ in range(2)]
    queues = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for step in range(3):
        for queue, grad in zip(queues, grads, strict=True):
            with torch.cuda.stream(queue):
                torch.cuda._sleep(10_000_000)
                maker.add_weighted([grad], layout, step, weights, 1.0)
    torch.cuda.synchronize()
    expected = sum(STREAM.normals(step, 0, 3000) for step in range(3))
    for grad in grads:
        assert np.allclose(grad.cpu().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("rounds", [20, 8])
@pytest.mark.parametrize(("block", "count"), [(0, 64), (37, 200), (2**32 - 40, 90)])
def test_the_words_of_exact_releases_are_those_of_torch(rounds, block, count) -> None:
    stream = NoiseStream(KEY, 7, rounds, purpose=reals.purpose(0))
    device = torch.device(DEVICE)
    ours = torch_exact.Words(stream, device, by_triton=True)(2**31 + 3, block, count)
    assert torch.equal(
        ours, torch_exact.Words(stream, device, by_triton=False)(2**31 + 3, block, count)
    )


@needs_gpu
@pytest.mark.parametrize("bands", [1, 4])
def test_exact_releases_of_a_gpu_are_those_of_numpy(bands) -> None:
    mechanism = cn.mechanisms.bisr(WORKLOAD, num_bands=bands).in_float32()
    noise = ExactNoise(mechanism, KEY)
    values = np.random.default_rng(bands).normal(size=1_000_003) * 5.0
    there = torch.from_numpy(values).to(DEVICE)
    noise.add_([there], 4, 1.3, [5])
    noise.add_([values], 4, 1.3, [5])
    assert np.array_equal(there.cpu().numpy(), values)
