"""z[step, index]: the definition, random access, and bad input."""

import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from corrnoise.noise import Key, NoiseStream, truncation
from corrnoise.noise.generator import chacha, normals
from corrnoise.noise.generator import stream as stream_module
from corrnoise.noise.generator.stream import TILE

KEY = Key.from_bytes(bytes(range(32)))
STREAM = NoiseStream(KEY, stream=5)


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869 by another library."""
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


@pytest.mark.parametrize("purpose", ["noise", "batches", "digests", "ledger", "state"])
def test_subkeys_are_hkdf(purpose) -> None:
    for secret in (bytes(range(32)), bytes(range(1, 33))):
        expected = hkdf(secret, b"corrnoise v1 " + purpose.encode())
        assert Key.from_bytes(secret).subkey(purpose) == expected


def z_by_hand(
    key: bytes, stream: int, step: int, index: int, rounds: int = 20
) -> tuple[int, float]:
    """docs/noise-stream.md, word by word, in plain Python."""
    group, place = divmod(index, 512)
    j, lane = divmod(place, 32)
    block = 32 * group + lane
    tail = [[block % 2**32], [block // 2**32], [step], [stream]]
    words = [int(w) for w in chacha.blocks(key, tail, rounds)[:, 0]]
    radius_word, angle_word = words[j % 8], words[j % 8 + 8]
    v = Fraction(1, 2)
    if radius_word < 2**8:
        tail[1] = [block // 2**32 + 2**31]
        second = [int(w) for w in chacha.blocks(key, tail, rounds)[:, 0]]
        v = (2**32 * second[j % 8] + second[j % 8 + 8] + Fraction(1, 2)) / 2**64
    u = float((256 * radius_word + angle_word % 256 + v) / 2**40)
    theta = math.pi * (2 * (angle_word // 256) + 1) / 2**24
    radius = math.sqrt(-2 * math.log(u))
    return words[j], radius * (math.cos(theta) if j < 8 else math.sin(theta))


@pytest.mark.parametrize("index", [0, 31, 32, 255, 256, 511, 512, 70_001, 2**36 + 17, 2**62 + 300])
@pytest.mark.parametrize("step", [0, 2**32 - 1])
def test_definition(step, index) -> None:
    word, z = z_by_hand(hkdf(bytes(range(32)), b"corrnoise v1 noise"), 5, step, index)
    assert int(STREAM.words(step, index, index + 1)[0]) == word
    assert STREAM.normals(step, index, index + 1, np.float64)[0] == pytest.approx(z, abs=1e-13)
    assert STREAM.normals(step, index, index + 1)[0] == pytest.approx(z, abs=2e-6)


def test_the_values_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "noise-stream.md").read_text()
    rows = re.findall(r"^\| (\d+) \| `([0-9a-f]{8})` \| ([-+.\d]+) \|$", text, flags=re.M)
    assert len(rows) == 10
    stream = NoiseStream(KEY, stream=7)
    for index, word, z in ((int(i), int(w, 16), float(z)) for i, w, z in rows):
        assert int(stream.words(3, index, index + 1)[0]) == word
        assert abs(stream.normals(3, index, index + 1, np.float64)[0] - z) < 1e-12


@settings(max_examples=40, deadline=None)
@given(start=st.integers(0, 3 * TILE), size=st.integers(0, 2 * TILE), step=st.integers(0, 3))
def test_any_slice_is_the_slice_of_the_whole(start, size, step) -> None:
    whole = STREAM.normals(step, 0, 5 * TILE)
    assert np.array_equal(STREAM.normals(step, start, start + size), whole[start : start + size])


@pytest.mark.parametrize("start", [2**36 - 700, 2**63 - 5000])
def test_slices_far_out(start) -> None:
    whole = STREAM.words(1, start, start + 1400)
    assert np.array_equal(STREAM.words(1, start + 333, start + 999), whole[333:999])
    assert np.array_equal(
        STREAM.normals(1, start + 333, start + 999), STREAM.normals(1, start, start + 1400)[333:999]
    )


def test_float32_keeps_the_accuracy_of_the_definition() -> None:
    a, b = STREAM.normals(0, 0, 1 << 20), STREAM.normals(0, 0, 1 << 20, np.float64)
    radius = np.sqrt(np.sum(b.reshape(-1, 2, 256) ** 2, axis=1, keepdims=True))
    assert np.max(np.abs((a - b).reshape(-1, 2, 256)) / radius) < 2.0**-21


# Places with a radius word R in the tail, under KEY, stream 7 and step 3: (rounds, index, R).
TAILS = [
    (20, 21_109_780_133, 0),
    (20, 1_099_616_730_255, 68),
    (12, 42_193_488, 128),
    (8, 38_757_917, 141),
]


@pytest.mark.parametrize(("rounds", "index", "word"), TAILS)
def test_the_tail_is_the_definition(rounds, index, word) -> None:
    """Real places in the tail, of a pair's both normals, within slices that begin anywhere."""
    key, stream = hkdf(bytes(range(32)), b"corrnoise v1 noise"), NoiseStream(KEY, 7, rounds)
    assert int(stream.words(3, index, index + 1)[0]) == word
    for place in (index, index + 256):
        z = z_by_hand(key, 7, 3, place, rounds)[1]
        for start in (place, place - 700):
            exact = stream.normals(3, start, place + 3, np.float64)[place - start]
            assert exact == pytest.approx(z, rel=1e-13)
            assert stream.normals(3, start, place + 3)[place - start] == pytest.approx(z, rel=1e-6)


def test_the_second_block_is_no_index_of_another() -> None:
    """The words of all indices come from blocks below 2^59."""
    assert stream_module.LARGEST_INDEX // 16 < 2**59 <= stream_module.REFINEMENT_BLOCK
    place = STREAM.refinement(3, 512)(np.array([32 * 2 + 5, 256 + 7]))
    key = hkdf(bytes(range(32)), b"corrnoise v1 noise")
    for k, (block, j) in enumerate([(32 + 5, 2), (64 + 7, 0)]):
        second = chacha.blocks(key, [[block], [2**31], [3], [5]])[:, 0]
        assert (place[0][k], place[1][k]) == (second[j], second[j + 8])


def test_the_probability_beyond_the_end() -> None:
    assert truncation(0, 10) == truncation(10, 0) == 0.0
    assert math.exp(-(normals.LARGEST_RADIUS**2) / 2) == pytest.approx(2.0**-105, rel=1e-12)
    for steps, size in ((1, 1), (1000, 300_000), (10_000, 10**8), (2**32, 2**63)):
        exact = -math.expm1(steps * size * math.log1p(-(2.0**-105)))
        assert exact <= truncation(steps, size) <= exact * (1 + 1e-3)
    with pytest.raises(ValueError, match="num_steps must be"):
        truncation(-1, 5)
    with pytest.raises(ValueError, match="num_parameters must be"):
        truncation(1, 0.5)  # type: ignore[arg-type]


def _one_pair(
    radius_word: int, angle_word: int, high: int = 2**31, low: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    def refinement(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full(pairs.size, high, np.uint32), np.full(pairs.size, low, np.uint32)

    words = np.zeros(512, np.uint32).reshape(2, 256)
    words[0], words[1] = radius_word, angle_word
    out = np.empty(512, np.float32)
    scratch = normals.Scratch(np.empty(512, np.uint32))
    normals.box_muller(words.reshape(-1), out, scratch, refinement)
    exact = normals.box_muller_exact(words.reshape(-1), refinement)
    return out.reshape(2, 256)[:, 0].astype(np.float64), exact.reshape(2, 256)[:, 0]


@pytest.mark.parametrize(
    "word", [0, 1, 255, 2**16, 2**24 + 1, 2**31 - 1, 2**31, 2**31 + 1, *(2**32 - 2 ** np.arange(9))]
)
@pytest.mark.parametrize("low", [0, 1, 128, 255])
def test_the_radius_is_accurate_at_both_ends(word, low) -> None:
    """Relative accuracy for u near 0 (the tail) and near 1 (the centre)."""
    found, exact = _one_pair(int(word), (123_456 << 8) + low)
    assert np.hypot(*found) == pytest.approx(np.hypot(*exact), rel=3e-7)


def test_the_extremes() -> None:
    found, largest = _one_pair(0, 0, 0, 0)
    assert np.hypot(*largest) == pytest.approx(math.sqrt(210 * math.log(2)), rel=1e-12)
    assert np.hypot(*found) == pytest.approx(normals.LARGEST_RADIUS, rel=3e-7)
    assert pytest.approx(12.0648, abs=1e-4) == normals.LARGEST_RADIUS
    smallest = _one_pair(2**32 - 1, 255)[0]
    assert np.hypot(*smallest) == pytest.approx(math.sqrt(2 * 2.0**-41), rel=1e-6)
    assert np.all(smallest != 0)


@pytest.mark.parametrize("second", [(0, 0), (0, 1), (1, 0), (5, 2**31), (2**32 - 1, 2**32 - 1)])
@pytest.mark.parametrize(("word", "low"), [(0, 0), (0, 255), (1, 0), (255, 255)])
def test_the_tail_is_accurate_at_both_ends(word, low, second) -> None:
    found, exact = _one_pair(word, (123_456 << 8) + low, *second)
    v = (2**32 * second[0] + second[1] + Fraction(1, 2)) / 2**64
    radius = math.sqrt(-2 * math.log(float((256 * word + low + v) / 2**40)))
    assert np.hypot(*exact) == pytest.approx(radius, rel=1e-14)
    assert np.hypot(*found) == pytest.approx(radius, rel=3e-7)


def test_the_tail_begins_where_it_should() -> None:
    """R = 255 is refined and 256 is not: the radius is monotone across the border."""
    cells = [(255, 255, 0), (255, 255, 2**32 - 1), (256, 0, 0), (256, 0, 2**32 - 1)]
    sizes = [np.hypot(*_one_pair(word, low, high)[1]) for word, low, high in cells]
    assert sizes[0] > sizes[1] > sizes[2] == sizes[3]
    assert np.hypot(*_one_pair(256, 0)[0]) > 5.76


@pytest.mark.parametrize("low", [0, 255])
@pytest.mark.parametrize("angle", [0, 2**22 - 1, 2**22, 2**23 - 1, 2**23, 2**24 - 1])
def test_the_angle_covers_the_circle(angle, low) -> None:
    found, exact = _one_pair(2**31, (angle << 8) + low)
    theta = math.pi * (2 * angle + 1) / 2**24
    assert np.allclose(found, exact, atol=4e-7)
    assert np.allclose(exact, np.hypot(*exact) * np.array([math.cos(theta), math.sin(theta)]))


def test_keys_streams_steps_and_rounds_give_other_noise() -> None:
    base = STREAM.words(0, 0, 512)
    others = [
        NoiseStream(Key.from_bytes(bytes(range(1, 33))), 5).words(0, 0, 512),
        NoiseStream(KEY, 5, purpose="batches").words(0, 0, 512),
        NoiseStream(KEY, 4).words(0, 0, 512),
        STREAM.words(1, 0, 512),
        NoiseStream(KEY, 5, rounds=12).words(0, 0, 512),
        NoiseStream(KEY, 5, rounds=8).words(0, 0, 512),
    ]
    assert all(np.mean(base == other) < 0.01 for other in others)


def test_an_empty_slice_is_empty() -> None:
    assert STREAM.normals(0, 5, 5).size == 0
    assert STREAM.words(0, 0, 0).dtype == np.uint32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: STREAM.normals(-1, 0, 1), "step must be in"),
        (lambda: STREAM.normals(2**32, 0, 1), "step must be in"),
        (lambda: STREAM.normals(0.5, 0, 1), "step must be an integer"),
        (lambda: STREAM.words(0, -1, 1), "start must be in"),
        (lambda: STREAM.words(0, 0, 2**63), "stop must be in"),
        (lambda: STREAM.words(0, 3, 2), "stop must be at least start=3"),
        (lambda: STREAM.normals(0, 0, 1, np.int32), "dtype must be"),
        (lambda: NoiseStream(KEY, -1), "stream must be in"),
        (lambda: NoiseStream(KEY, 2**32), "stream must be in"),
        (lambda: NoiseStream(KEY, rounds=10), "rounds must be one of"),
        (lambda: NoiseStream(KEY, rounds=True), "rounds must be one of"),
        (lambda: NoiseStream(None), "key must be a Key"),
    ],
)
def test_bad_input(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()
