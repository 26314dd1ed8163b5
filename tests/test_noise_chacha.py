"""The cipher against RFC 8439, and OpenSSL against the NumPy specification."""

import numpy as np
import pytest

from corrnoise.noise.generator import chacha, keystream

COUNTING = bytes(range(32))
ZERO = bytes(32)

# (name, key, counter, nonce, keystream), all from RFC 8439
RFC = [
    (
        "2.3.2",
        COUNTING,
        1,
        "000000090000004a00000000",
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        "2.4.2",
        COUNTING,
        1,
        "000000000000004a00000000",
        "224f51f3401bd9e12fde276fb8631ded8c131f823d2c06e27e4fcaec9ef3cf78"
        "8a3b0aa372600a92b57974cded2b9334794cba40c63e34cdea212c4cf07d41b7"
        "69a6749f3f630f4122cafe28ec4dc47e26d4346d70b98c73f3e9c53ac40c5945"
        "398b6eda1a832c89c167eacd901d7e2bf363",
    ),
    (
        "A.1 #1",
        ZERO,
        0,
        "00" * 12,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "A.1 #2",
        ZERO,
        1,
        "00" * 12,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "A.1 #3",
        bytes(31) + b"\x01",
        1,
        "00" * 12,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "A.1 #4",
        b"\x00\xff" + bytes(30),
        2,
        "00" * 12,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    (
        "A.1 #5",
        ZERO,
        0,
        "00" * 11 + "02",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


def test_quarter_round_of_section_2_1_1() -> None:
    state = [np.array([w], np.uint32) for w in (0x11111111, 0x01020304, 0x9B8D6F43, 0x01234567)]
    chacha.quarter_round(state, 0, 1, 2, 3)
    assert [int(w[0]) for w in state] == [0xEA2A92F4, 0xCB1CF8CE, 0x4581472E, 0x5881C4BB]


@pytest.mark.parametrize(
    ("key", "counter", "nonce", "expected"), [v[1:] for v in RFC], ids=[v[0] for v in RFC]
)
@pytest.mark.parametrize("openssl", [True, False], ids=["openssl", "numpy"])
def test_rfc_8439(key, counter, nonce, expected, openssl, monkeypatch) -> None:
    if not openssl:
        monkeypatch.setattr(keystream, "_openssl", lambda: None)
    high, step, stream = np.frombuffer(bytes.fromhex(nonce), "<u4").tolist()
    size = -(-len(expected) // 128) * 16
    out = np.empty(size, np.uint32)
    block = counter + (high << 32)
    keystream.fill(out, key, stream=stream, step=step, block=block)
    assert out.astype("<u4").tobytes().hex().startswith(expected)


@pytest.mark.parametrize(
    ("rounds", "start"),
    [(8, "3e00ef2f895f40d67f5bb8e81f09a5a1"), (12, "9bf49a6a0755f953811fce125f2683d5")],
)
def test_fewer_rounds_match_the_published_vectors(rounds, start) -> None:
    """TC1 of draft-strombergson-chacha-test-vectors: key and IV all zero."""
    out = np.empty(16, np.uint32)
    keystream.fill(out, ZERO, stream=0, step=0, block=0, rounds=rounds)
    assert out.astype("<u4").tobytes().hex().startswith(start)


@pytest.mark.parametrize("block", [0, 2**32 - 3, 2**59])
def test_openssl_and_numpy_agree_across_the_counter(block, monkeypatch) -> None:
    def words() -> np.ndarray:
        out = np.empty(16 * 9000, np.uint32)
        keystream.fill(out, COUNTING, stream=7, step=2**32 - 1, block=block)
        return out

    fast = words()
    monkeypatch.setattr(keystream, "_openssl", lambda: None)
    assert np.array_equal(fast, words())
