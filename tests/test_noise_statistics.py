"""The law of z and the covariances of C⁻¹z, on 2e7 draws under a fixed key.

The checks and their false-alarm rates (below 1e-6 in all) are those of the benchmark of the same
name, which runs them on 1e9 draws. The key is fixed, so a failure is a defect and not chance.
"""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from corrnoise.noise import Key, NoiseStream
from corrnoise.noise.generator import normals

_PATH = Path(__file__).parents[1] / "benchmarks" / "noise_statistics.py"
_SPEC = importlib.util.spec_from_file_location("noise_statistics", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
statistics = importlib.util.module_from_spec(_SPEC)
sys.modules["noise_statistics"] = statistics
_SPEC.loader.exec_module(statistics)

KEY = Key.from_bytes(b"a fixed key for the statistics..")


@pytest.mark.parametrize(("draws", "rounds"), [(20_000_000, 20), (1_000_000, 12), (1_000_000, 8)])
def test_the_law_of_z(draws, rounds) -> None:
    checks = statistics.stream_checks(draws, KEY, rounds)
    assert len(checks) == 19
    assert [c for c in checks if not c.passed] == []


@pytest.mark.parametrize(("low_bits", "end"), [(0xFF, 32), (0x00, 40)], ids=["6.66", "7.45"])
@pytest.mark.parametrize("exact", [True, False], ids=["float64", "float32"])
def test_the_law_of_the_tail(low_bits, end, exact) -> None:
    """Radius words of 0, with the words of real second blocks: u is uniform below 2^-end.

    So -2 ln u - 2·end·ln 2 is exponential with mean 2, and the normals follow the Gaussian tail.
    The Kolmogorov-Smirnov test has a false-alarm rate of 1e-8, under a fixed key.
    """
    stream, size = NoiseStream(KEY), 1 << 14
    words = np.random.default_rng(3).integers(0, 2**32, 2 * size, dtype=np.uint32)
    words = words.reshape(-1, 2, 256)
    words[:, 0] = 0
    words[:, 1] &= np.uint32(0xFFFFFF00 | low_bits)
    refinement = stream.refinement(0, 0)
    if exact:
        z = normals.box_muller_exact(words.reshape(-1), refinement)
    else:
        z = np.empty(words.size, np.float32)
        scratch = normals.Scratch(np.empty(words.size, np.uint32))
        normals.box_muller(words.reshape(-1), z, scratch, refinement)
    pairs = z.reshape(-1, 2, 256).astype(np.float64)
    square = np.sum(pairs**2, axis=1).reshape(-1)
    excess = square - 2 * end * np.log(2)
    assert excess.min() > -1e-4
    assert scipy.stats.kstest(excess, "expon", args=(0, 2)).pvalue > 1e-8
    assert np.sqrt(square.max()) > np.sqrt(2 * end * np.log(2)) + 1
    # The angle is independent of the radius: half of the pairs on either side of each axis.
    for z_side in (pairs[:, 0], pairs[:, 1]):
        assert abs(np.mean(z_side > 0) - 0.5) < 6 * 0.5 / np.sqrt(size)


def test_the_covariances_of_the_rows() -> None:
    checks = statistics.lag_checks(1 << 20, KEY)
    assert len(checks) == 48
    assert [c for c in checks if not c.passed] == []


@pytest.mark.parametrize(
    ("spoil", "caught"),
    [
        (lambda z: z * 1.003, "moment 2"),
        (lambda z: z + 0.004, "moment 1"),
        (lambda z: np.clip(z, -3.9, 3.9), "beyond 4 sigma"),
        (lambda z: np.where(np.abs(z) > 4, 4.5, z), "moment 8"),
        (lambda z: np.repeat(z[::2], 2), "correlation: neighbours"),
        (lambda z: np.abs(z), "Kolmogorov-Smirnov"),
        (lambda z: np.round(z * 8) / 8, "Kolmogorov-Smirnov"),
    ],
    ids=["scale", "shift", "cut", "tail", "repeat", "sign", "coarse"],
)
def test_the_checks_catch_defects(spoil, caught) -> None:
    tally = statistics.Tally()
    rng = np.random.default_rng(0)
    for _ in range(20):
        z, after, other = (rng.standard_normal(1 << 18) for _ in range(3))
        tally.add(spoil(z), after, other)
    assert caught in [c.name for c in tally.checks() if not c.passed]
