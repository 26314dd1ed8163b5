"""A checkpoint without the key tells nothing about the noise that it keeps."""

import numpy as np
import pytest

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key, sealing

KEY, OTHER = Key.from_bytes(bytes(range(32))), Key.from_bytes(bytes(range(1, 33)))
HEADER = {"run": "a", "next_step": 3}
WORKLOAD, PART = cn.workloads.sgd(24, momentum=0.9), cn.Participation(24, 6, 4)
RECURSIVE = {
    "bsr": cn.mechanisms.bsr(WORKLOAD, num_bands=6),
    "band_mf": cn.mechanisms.band_mf(WORKLOAD, PART, num_bands=6),
    "blt": cn.mechanisms.blt(WORKLOAD, PART, num_buffers=2),
    "dense": cn.mechanisms.dense(WORKLOAD, PART),
}


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (3, 1000), (2, 40_000)])
def test_what_is_sealed_comes_back(shape, monkeypatch):
    monkeypatch.setattr(sealing, "_PIECE", 1 << 16)  # several pieces in the last case
    vectors = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sealed = sealing.seal(vectors, KEY.subkey("state"), HEADER)
    found = sealing.unseal(sealed, KEY.subkey("state"), HEADER, shape)
    assert np.array_equal(found, vectors)
    assert not np.array_equal(sealed, sealing.seal(vectors, KEY.subkey("state"), HEADER))


def test_any_change_is_refused(monkeypatch):
    monkeypatch.setattr(sealing, "_PIECE", 256)
    vectors = np.random.default_rng(0).standard_normal((2, 100)).astype(np.float32)
    key = KEY.subkey("state")
    sealed = sealing.seal(vectors, key, HEADER)
    shape = (2, 100)
    swapped = sealed.copy()  # two whole pieces exchanged
    swapped[12:284], swapped[284:556] = sealed[284:556], sealed[12:284]
    attempts = [
        (sealed[:-1], key, HEADER, shape),
        (swapped, key, HEADER, shape),
        (sealed, OTHER.subkey("state"), HEADER, shape),
        (sealed, key, {**HEADER, "next_step": 4}, shape),
        (sealed, key, HEADER, (2, 101)),
    ]
    for place in range(0, sealed.size, 7):
        damaged = sealed.copy()
        damaged[place] ^= 1
        attempts.append((damaged, key, HEADER, shape))
    assert len(attempts) > 100
    for attempt in attempts:
        with pytest.raises(ValueError, match="damaged"):
            sealing.unseal(*attempt)


@pytest.mark.parametrize("name", RECURSIVE)
def test_the_state_of_a_recursion_shows_no_noise(name):
    """Every byte of the state looks random: no row of the noise is in it, scaled or not.

    False alarm: correlations of 20,000 independent values beyond 6 standard deviations, below 1e-7
    for all rows together.
    """
    noise = CorrelatedNoise(RECURSIVE[name], KEY)
    grads = [np.zeros(20_000, np.float32)]
    for step in range(8):
        noise.add_(grads, step, 1.0)
    state = noise.state_dict()["state"]
    assert state.dtype == np.uint8
    body = state[12:]
    count = body.size // 4 * 4
    with np.errstate(invalid="ignore"):
        values = np.nan_to_num(body[:count].view("<f4").astype(np.float64))
    values = np.clip(values, -10, 10)
    rows = np.stack([noise.row(step, 0, 20_000) for step in range(8)]).astype(np.float64)
    found = 0
    for start in range(0, values.size - 20_000 + 1, 20_000):
        for row in rows:
            found = max(found, abs(np.corrcoef(values[start : start + 20_000], row)[0, 1]))
    assert 0.0 < found < 6.0 / 20_000**0.5


@pytest.mark.parametrize("name", RECURSIVE)
def test_the_state_of_a_recursion_continues_the_noise_with_the_key_alone(name):
    noise = CorrelatedNoise(RECURSIVE[name], KEY)
    for step in range(8):
        noise.add_([np.zeros(100, np.float32)], step, 1.0)
    state = noise.state_dict()
    again = CorrelatedNoise(RECURSIVE[name], KEY)
    again.load_state_dict(state)
    expected, found = np.zeros(100, np.float32), np.zeros(100, np.float32)
    noise.add_([expected], 8, 1.0)
    again.add_([found], 8, 1.0)
    assert np.array_equal(found, expected)
    with pytest.raises(ValueError, match="key_fingerprint"):
        CorrelatedNoise(RECURSIVE[name], OTHER).load_state_dict(state)
    forged = {**state, "key_fingerprint": OTHER.fingerprint}
    with pytest.raises(ValueError, match="damaged"):
        CorrelatedNoise(RECURSIVE[name], OTHER).load_state_dict(forged)
    with pytest.raises(ValueError, match="damaged"):
        CorrelatedNoise(RECURSIVE[name], KEY).load_state_dict({**state, "next_step": 7})
