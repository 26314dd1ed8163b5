"""The key is never shown, copied, overwritten or lost."""

import copy
import json
import logging
import os
import pickle
import stat

import numpy as np
import pytest

import corrnoise as cn
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream
from corrnoise.noise.generator.key import key_use, mark_released

SECRET = bytes(range(100, 132))
KEY = Key.from_bytes(SECRET)


def _noise(name: str) -> CorrelatedNoise:
    workload, part = cn.workloads.prefix_sum(8), cn.Participation(8, 4, 2)
    mechanism = {
        "bisr": lambda: cn.mechanisms.bisr(workload, num_bands=2),
        "blt": lambda: cn.mechanisms.blt(workload, part, num_buffers=1),
    }[name]()
    return CorrelatedNoise(mechanism, KEY)


def _spellings() -> list[str]:
    words = np.frombuffer(SECRET, "<u4")
    return [SECRET.hex(), repr(SECRET)[2:-1], str(list(SECRET))[1:-1], str(words.tolist())[1:-1]]


def test_generate_uses_the_operating_system(monkeypatch) -> None:
    assert Key.generate() != Key.generate()
    asked = []
    real = os.urandom
    monkeypatch.setattr("secrets.token_bytes", lambda n: asked.append(n) or real(n))
    Key.generate()
    assert asked == [32]


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33), "0" * 32, None])
def test_wrong_secrets_are_refused_and_not_repeated(secret) -> None:
    with pytest.raises(ValueError, match="secret must"):
        Key.from_bytes(secret)


def test_a_raw_key_in_the_wrong_place_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="key must be a Key, got bytes") as caught:
        NoiseStream(SECRET)
    assert not any(text in str(caught.value) for text in _spellings())


@pytest.mark.parametrize("name", ["bisr", "blt"])
def test_the_key_appears_nowhere(name, caplog) -> None:
    noise = _noise(name)
    with caplog.at_level(logging.DEBUG):
        noise.add_([np.zeros(40, np.float32)], 0, 1.0)
    state = noise.state_dict()
    state["state"] = None if state["state"] is None else state["state"].tolist()
    texts = [repr(KEY), str(KEY), f"{KEY}", repr(noise), repr(noise.stream), str(noise.scheme)]
    texts += [json.dumps(state), caplog.text, repr(vars(noise)), repr(vars(noise.stream))]
    assert not any(text in where for text in _spellings() for where in texts)
    assert KEY.fingerprint in json.dumps(state)


@pytest.mark.parametrize("thing", [KEY, NoiseStream(KEY), {"key": KEY}])
def test_pickling_raises(thing) -> None:
    with pytest.raises(TypeError, match=r"Key\.save"):
        pickle.dumps(thing)
    with pytest.raises(TypeError):
        pickle.dumps(_noise("blt"))
    with pytest.raises(TypeError):
        json.dumps({"key": KEY})


def test_copies_are_the_key_itself() -> None:
    assert copy.copy(KEY) is KEY
    assert copy.deepcopy({"key": KEY})["key"] is KEY
    assert {KEY: 1}[Key.from_bytes(SECRET)] == 1


def test_fingerprint_is_separated_from_the_plain_hash() -> None:
    import hashlib

    assert len(KEY.fingerprint) == 16
    assert int(KEY.fingerprint, 16) >= 0
    assert not hashlib.sha256(SECRET).hexdigest().startswith(KEY.fingerprint)


def test_save_and_load(tmp_path) -> None:
    path = tmp_path / "run.key"
    old = os.umask(0)
    try:
        KEY.save(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Key.load(path) == KEY
    with pytest.raises(ValueError, match="never overwritten"):
        Key.generate().save(path)
    assert Key.load(path) == KEY
    path.chmod(0o640)
    with pytest.raises(ValueError, match="0600"):
        Key.load(path)


def test_a_file_that_is_no_key_is_refused(tmp_path) -> None:
    path = tmp_path / "other"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"Key\.save wrote") as caught:
        Key.load(path)
    assert not any(text in str(caught.value) for text in _spellings())


def test_import_leaves_the_extras_alone() -> None:
    import subprocess
    import sys

    code = (
        "import sys, corrnoise, corrnoise.noise\n"
        "print([m for m in ('torch', 'triton', 'cryptography') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_torn_mark_of_use_counts_as_one_and_leaves_the_key_readable(tmp_path) -> None:
    key = Key.generate()
    for size in range(1, len(b"released\n") + 1):
        path = tmp_path / f"{size}.key"
        key.save(path, run_id="ab" * 16)
        assert not key_use(path).released
        with path.open("ab") as file:
            file.write(b"released\n"[:size])
        assert key_use(path).released
        mark_released(path, "ab" * 16)  # and nothing is written after it
        assert Key.load(path) == key


def test_a_folder_in_the_place_of_a_key_is_named_and_not_to_be_changed(tmp_path) -> None:
    with pytest.raises(ValueError, match="must be a key file, got the folder"):
        Key.load(tmp_path)
