"""The instructions of the kernel for CUDA devices, run one by one in NumPy."""

import math
import re

import numpy as np
import pytest

from corrnoise.jax import ptx
from corrnoise.jax.chacha import in_registers
from corrnoise.jax.normals import fraction, pair
from corrnoise.noise import Key, NoiseStream
from corrnoise.noise.generator.normals import box_muller_exact

F, U = np.float32, np.uint32


def fma(a, b, c):
    """Rounded once, but for rare ties: the product is exact in float64."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(F)


def wide(function):
    return lambda *args: function(*(np.float64(x) for x in args)).astype(F)


def rotated(a, b, left):
    np.testing.assert_array_equal(a, b)
    return (a << left) | (a >> (U(32) - left))


# Arguments and results are float32; those of the instructions in INTEGERS are uint32.
RUN = {
    "fma.rn.f32": fma,
    "add.rn.f32": np.add,
    "sub.rn.f32": np.subtract,
    "mul.rn.f32": np.multiply,
    "abs.f32": np.abs,
    "neg.f32": np.negative,
    "mov.b32": lambda a: a,
    "lg2.approx.ftz.f32": wide(lambda x: np.log2(np.where(x > 0, x, 1.0))),
    "rsqrt.approx.ftz.f32": wide(lambda x: (1 + 2.0**-22.9) / np.sqrt(x)),  # the largest error
    "setp.lt.f32": np.less,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "cvt.rn.f32.u8": lambda a: (a & U(255)).astype(F),
    "cvt.rn.f32.s32": lambda a: a.view(np.int32).astype(F),
    "shr.u32": lambda a, n: (a >> n).view(F),
    "xor.b32": np.bitwise_xor,
    "shf.l.wrap.b32": rotated,
    "mad.lo.u32": lambda a, b, c: a * b + c,
}


def run(text, *args):
    """Run one of the texts; a register holds whatever the last instruction wrote."""
    held = {f"${k}": arg for k, arg in enumerate(args, 1)}
    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *names = (part.strip() for part in rest.split(","))
        held[target] = RUN[name](*(operand(held, part) for part in names))
    return held["$0"]


def operand(held, name):
    if name.startswith("0f"):
        return np.array([int(name[2:], 16)], U).view(F)[0]
    return U(int(name)) if re.fullmatch(r"\d+", name) else held[name]


def normals(radius_words, angle_words, f=None):
    """The two normals of pairs, by the instructions, in float32."""
    f = run(ptx.UNIFORM, radius_words, angle_words) if f is None else f
    radius = run(ptx.RADIUS, f, np.full(f.shape, ptx.UNIT, F))
    zero = np.zeros(f.shape, F)
    cos = run(ptx.ADD_COS, angle_words, radius, zero)
    return cos, run(ptx.ADD_SIN, angle_words, radius, zero)


def exact(radius_words, angle_words):
    words = np.stack([radius_words.reshape(-1, 256), angle_words.reshape(-1, 256)], axis=1)
    found = box_muller_exact(words.reshape(-1), lambda pairs: (np.zeros(pairs.size, U),) * 2)
    return found.reshape(-1, 2, 256).transpose(1, 0, 2).reshape(2, -1)


def test_the_normals_are_exact_to_a_millionth():
    words = NoiseStream(Key.from_bytes(bytes(range(32)))).words(0, 0, 1 << 20)
    r, a = (np.ascontiguousarray(part).reshape(-1) for part in
            words.reshape(-1, 2, 256).transpose(1, 0, 2))  # fmt: skip
    found = np.stack(normals(r, a))
    assert np.abs(found - exact(r, a)).max() < 1e-6


def test_the_normals_at_the_ends_of_the_radius_and_of_the_quadrants():
    near = [(256 << k) + d for k in range(24) for d in (-1, 0, 1)]
    near = [x for x in near if x >= 256] + [2**32 - 1 - x for x in near] + [2**32 - 1, 2**31 - 1]
    turns = [(k << 29) + d for k in range(8) for d in (-257, -256, -1, 0, 1, 255, 256)]
    r, a = (x.reshape(-1) for x in np.meshgrid(near, np.array(turns) % 2**32))
    r, a = (np.resize(x, -(-x.size // 256) * 256).astype(U) for x in (r, a))
    found, expected = np.stack(normals(r, a)), exact(r, a)
    radius = np.hypot(*expected)
    assert radius.max() > 5.7
    assert (np.abs(found - expected) / radius).max() < 3.5e-7
    assert np.abs(np.hypot(*np.float64(found)) / radius - 1).max() < 3.5e-7


@pytest.mark.parametrize("u", [2.0**-105, 2.0**-60, 2.0**-41])
def test_the_tail(u):
    a = np.arange(0, 2**32, 2**24 + 4711, dtype=np.uint64).astype(U)
    cos, sin = normals(None, a, np.full(a.shape, u, F))
    radius = math.sqrt(-2 * math.log(u))
    theta = (2.0 * (a >> U(8)) + 1) * (math.pi / 2**24)
    for found, expected in ((cos, radius * np.cos(theta)), (sin, radius * np.sin(theta))):
        assert np.abs(found - expected).max() < 3.5e-7 * radius


def test_the_sums_are_added_to():
    a, r, x = np.array([123456789], U), np.array([2.0], F), np.array([10.0], F)
    for text in (ptx.ADD_COS, ptx.ADD_SIN):
        assert run(text, a, r, x) - 10 == pytest.approx(run(text, a, r, 0 * x), abs=2e-6)


@pytest.fixture
def emulated(monkeypatch):
    def apply(text, kinds, *args):
        same = np.broadcast_arrays(*(np.asarray(arg) for arg in args))
        inputs = [x.astype(F) if kind == "f" else x.view(U)
                  for x, kind in zip(same, kinds[1:], strict=True)]  # fmt: skip
        return run(text, *inputs)

    monkeypatch.setattr(ptx, "apply", apply)


def test_a_block_by_the_instructions_is_that_of_the_stream(emulated):
    stream = NoiseStream(Key.from_bytes(bytes(range(32))), 5)
    secret = list(np.frombuffer(stream.secret, "<u4").astype(U))
    tail = np.arange(64, dtype=U), U(0), U(3), U(5)
    words = in_registers(secret, tail, 20, steps=ptx.steps(np.ones(64, U)), unroll=9)
    found = np.stack(words).reshape(16, 2, 32).transpose(1, 0, 2).reshape(-1)
    np.testing.assert_array_equal(found, stream.words(3, 0, 1024))


def test_normals_are_weighted_and_added_also_in_the_tail(emulated):
    rng = np.random.default_rng(0)
    words = list(rng.integers(0, 2**32, (4, 50), np.uint64).astype(U))
    words[0][:10], words[2][:10] = 0, words[2][:10] & ~U(255)  # the far end of the tail
    second = rng.integers(0, 2**32, (2, 2, 50), np.uint64).astype(U)
    found = [fraction(*second[k]) for k in range(2)]
    sums = ptx.add_normals([np.full(50, 0.5, F)] * 4, words, F(-0.75), found)
    for k in range(2):
        pairs = pair(words[k], words[k + 2], found[k])
        for total, normal in zip((sums[k], sums[k + 2]), pairs, strict=True):
            assert np.abs(total - (0.5 - 0.75 * normal)).max() < 2e-6
    without = ptx.add_normals([np.full(50, 0.5, F)] * 4, words, F(-0.75), None)
    assert np.abs(without[0] - sums[0])[:10].max() > 1e-3


def test_the_steps_of_chacha():
    a, b = (np.array(x, U) for x in ([1, 2**32 - 1, 0xDEADBEEF], [5, 7, 0x80000001]))
    np.testing.assert_array_equal(run(ptx.ADD, a, b, np.ones(3, U)), a + b)
    for left in (16, 12, 8, 7):
        expected = ((a ^ b) << U(left)) | ((a ^ b) >> U(32 - left))
        np.testing.assert_array_equal(run(ptx.TURN.format(left), a, b), expected)
