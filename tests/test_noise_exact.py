"""Releases that are rounded exactly: against high precision, on every path and device."""

from __future__ import annotations

import decimal
import math
import re
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import oracles
import pytest
from scipy import stats

from corrnoise import mechanisms, workloads
from corrnoise.noise import CorrelatedNoise, Key, NoiseStream
from corrnoise.noise.exact import ExactNoise, Release
from corrnoise.noise.generator import keystream, reals
from corrnoise.participation import Participation

KEY = Key.from_bytes(bytes(range(32)))
END = 1 << 35  # u = 2^-29, in units of 2^-64
TOP = 1 << 64


def mechanism(bands, num_steps=40):
    workload = workloads.prefix_sum(num_steps)
    if bands == 1:
        return mechanisms.dp_sgd(workload).in_float32()
    return mechanisms.bisr(workload, num_bands=bands).in_float32()


def exact(bands=4, **options):
    return ExactNoise(mechanism(bands), KEY, **options)


def released(noise, values, step, scale, offset=0):
    """In units of the grid."""
    found = np.array(values, dtype=np.float64)
    noise.add_([found], step, scale, [offset])
    return (found / noise.release(step, scale).grid).tolist()


# u and θ at corners and at random, as 64-bit numbers.
EDGES = [END, END + 1, 3 * END, 1 << 40, TOP // 2 - 1, TOP // 2, TOP // 2 + 1, TOP - 2**50]
EDGES += [TOP - 2 * END, TOP - END - 2, TOP - END - 1]
TURNS = [k * TOP // 8 + shift for k in range(8) for shift in (-1, 0, 1)]
RANDOM = np.random.default_rng(5).integers(0, TOP, size=(4, 300), dtype=np.uint64)
POINTS = [(u, theta % TOP) for u in EDGES for theta in TURNS]
POINTS += [(int(u), int(theta)) for u, theta in RANDOM[:2].T if END <= u < TOP - END]
POINTS += [(max(END, int(u) >> int(s) % 29), int(t)) for u, t, s in RANDOM[[2, 3, 0]].T]


def as_words(points):
    """One block for each point: four times the same pair."""
    numbers = np.array([[u] * 4 + [theta] * 4 for u, theta in points], dtype="<u8")
    return numbers.view("<u4").astype(np.uint32).reshape(-1)


def by_numpy(points):
    found = np.empty((8, len(points)))
    with np.errstate(invalid="ignore"):
        reals.approximate(as_words(points), found)
    return found.T


def by_torch(points):
    torch = pytest.importorskip("torch")
    from corrnoise.noise.backends import torch_exact

    words = torch.from_numpy(as_words(points).reshape(-1, 16).view(np.int32)).T
    return torch_exact.approximate(words).T.numpy()


@pytest.mark.parametrize("approximate", [by_numpy, by_torch])
def test_approximate_normals_are_within_their_bound_of_all_reals_of_their_cell(approximate):
    found = approximate(POINTS)
    worst = 0.0
    with mpmath.workdps(40):
        for (u, theta), row in zip(POINTS, found, strict=True):
            for here, there in ((u, theta), (u + 1, theta), (u, theta + 1), (u + 1, theta + 1)):
                radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(here) / TOP))
                angle = 2 * mpmath.pi * mpmath.mpf(there) / TOP
                for value, part in ((row[0], mpmath.cos), (row[4], mpmath.sin)):
                    worst = max(worst, float(abs(mpmath.mpf(value) - radius * part(angle))))
    assert 2.0**-39 < worst <= reals.ERROR  # the corner u = 2^-29 is near to it
    assert np.array_equal(found[:, 0], found[:, 3])
    assert np.array_equal(found[:, 4], found[:, 7])


@pytest.mark.parametrize("approximate", [by_numpy, by_torch])
def test_the_ends_of_u_are_left_undecided(approximate):
    inside = approximate([(END, 7), (TOP - END - 1, 7)])
    outside = approximate([(0, 7), (1, 7), (END - 1, 7), (TOP - END, 7), (TOP - 1, 7)])
    assert np.isfinite(inside).all()
    assert np.isnan(outside).all()


def by_library(torch):
    """The functions of NumPy and of torch, on every device here, from arrays to arrays."""
    yield np.log, np.sqrt, np.tan
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        yield tuple(
            (lambda x, f=f, device=device: f(torch.from_numpy(x).to(device)).cpu().numpy())
            for f in (torch.log, torch.sqrt, torch.tan)
        )


def test_library_functions_are_as_accurate_as_assumed():
    """A sample, not a proof: libraries document a 64th of the assumption, or less."""
    random = np.random.default_rng(3)
    u = np.concatenate([random.random(400), 2.0 ** -random.uniform(0, 29, 200)])
    u = np.concatenate([u, 1.0 - 2.0 ** -random.uniform(1, 29, 200), [2.0**-29, 1 - 2.0**-29]])
    half = math.pi / 2
    angles = np.concatenate([random.uniform(-half, half, 600), np.arange(-8, 9) * math.pi / 16])
    angles = np.concatenate([angles, half - 2.0 ** -random.uniform(1, 50, 100)])
    angles = np.concatenate([angles, 2.0 ** -random.uniform(1, 63, 100)])
    with mpmath.workdps(60):
        for functions in by_library(pytest.importorskip("torch")):
            truths = (mpmath.log, mpmath.sqrt, mpmath.tan)
            for function, truth, points in zip(functions, truths, (u, 42 * u, angles), strict=True):
                for x, y in zip(points.tolist(), function(points).tolist(), strict=True):
                    right = truth(mpmath.mpf(x))
                    assert abs(mpmath.mpf(y) - right) <= reals.LIBRARY * abs(right) / 64


def test_the_values_of_the_documentation():
    text = (Path(__file__).parents[1] / "docs" / "noise-stream.md").read_text()
    rows = re.findall(r"\| (\d+) \| `(\w{16})` \| `(\w{16})` \| (\S+) \|", text)
    assert len(rows) == 4
    for index, a, b, z in rows:
        place = {"stream": 7, "step": 3, "index": int(index)}
        assert reals.digits(KEY, rounds=20, levels=1, **place) == (int(a, 16), int(b, 16))
        digits = reals.digits(KEY, rounds=20, levels=2, **place)
        middle, radius = reals.enclosed(*digits, index=int(index), levels=2)
        assert abs(decimal.Decimal(z) - middle) < radius + decimal.Decimal("1e-18")
        assert abs(float(oracles.real_normal(KEY, **place)) - float(z)) < 1e-15


@pytest.mark.parametrize(
    ("bands", "step", "scale", "stream"),
    [(1, 0, 1.0, 0), (1, 39, 0.37, 5), (4, 0, 1.0, 0), (4, 2, 3.0, 2**32 - 1), (4, 39, 1.7, 0),
     (16, 39, 1e-3, 1)],
)  # fmt: skip
def test_releases_are_those_of_high_precision(bands, step, scale, stream):
    noise = exact(bands, stream=stream)
    release = noise.release(step, scale)
    offset, size = 8 * 2**32 - 9, 20  # over the boundary of the low word of the counter
    values = scale * np.random.default_rng(bands).normal(size=size) * 10.0 ** (np.arange(size) % 7)
    weights = noise._filter.mechanism.noising_row(step)
    truth = [
        oracles.exact_release(
            KEY, weights, stream=stream, step=step, index=offset + k, value=float(value),
            scale=scale, grid=release.grid,
        )
        for k, value in enumerate(values)
    ]  # fmt: skip
    assert released(noise, values, step, scale, offset) == truth


@pytest.mark.parametrize("bands", [1, 4])
def test_the_slow_path_decides_as_float64_does(bands):
    noise = exact(bands)
    release = noise.release(21, 1.3)
    values = np.random.default_rng(0).normal(size=150) * 50
    fast = released(noise, values, 21, 1.3)
    slow = [noise.nearest(float(value), k, release) for k, value in enumerate(values)]
    assert fast == slow


def test_sums_that_float64_can_hardly_add_to_are_released_exactly():
    """At 2^45 to 2^53 units the sum itself is rounded by a large part of a unit, or by more."""
    torch = pytest.importorskip("torch")
    noise = exact(1)
    release = noise.release(8, 1.0)
    powers = np.arange(120) % 9 + 45
    values = np.floor(2.0**powers * np.random.default_rng(8).uniform(0.5, 1, 120)) * release.grid
    right = [float(noise.nearest(float(v), k, release)) for k, v in enumerate(values)]
    assert released(noise, values, 8, 1.0) == right
    tensor = torch.from_numpy(values.copy())
    noise.round_tensors([tensor], ((0, 120),), release)
    assert (tensor / release.grid).tolist() == right


def test_undecided_entries_go_to_the_slow_path_alone(monkeypatch):
    noise, values = exact(), np.random.default_rng(0).normal(size=300) * 50
    before = released(noise, values, 21, 1.3)
    asked = []
    slow = ExactNoise.nearest

    def counted(self, value, index, release):
        asked.append(index)
        return slow(self, value, index, release)

    monkeypatch.setattr(ExactNoise, "nearest", counted)
    assert released(noise, values, 21, 1.3) == before
    assert asked == []
    # As if float64 knew the noise to within 0.1 units of the grid: a fifth is undecided.
    monkeypatch.setattr(Release, "room", property(lambda self: 0.4))
    assert released(noise, values, 21, 1.3) == before
    assert 30 < len(asked) < 90


def test_float64_leaves_few_entries_undecided(monkeypatch):
    """About p·2^-27 of them: 2^20 entries of 4 bands meet one with probability 3 %, fixed here."""
    asked = []
    monkeypatch.setattr(
        ExactNoise, "nearest", lambda self, value, index, _: asked.append(index) or 0
    )
    exact(4).add_([np.zeros(1 << 20)], 30, 1.0)
    assert len(asked) <= 1


def test_a_release_just_beside_a_boundary_is_right():
    """G puts an entry within 2^-60 of a boundary, where float64 cannot know the side."""
    noise = exact(1)
    release = noise.release(3, 1.0)
    for index in range(6):
        with mpmath.workdps(90):
            z = oracles.real_normal(KEY, stream=0, step=3, index=index)
            boundary = (mpmath.floor(z / release.grid) + mpmath.mpf(1) / 2) * release.grid
            value = float(boundary - z)  # rounded: some 2^-60 beside it
            side = mpmath.mpf(value) + z > boundary
            wanted = int(mpmath.floor(z / release.grid)) + int(side)
        assert released(noise, [value], 3, 1.0, index) == [wanted]


@pytest.mark.parametrize("u", [1, 2, END, TOP - 1, TOP // 3])
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_enclosures_contain_the_normal_and_shrink(u, levels):
    size = TOP**levels
    u = u * TOP ** (levels - 1) + (TOP ** (levels - 1) - 1) // 3
    for theta in (0, size // 3, size // 2 - 1, size - 1):
        with mpmath.workdps(30 + 25 * levels):
            truths = [
                mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(u + a) / size))
                * part(2 * mpmath.pi * mpmath.mpf(theta + b) / size)
                for a in (0, 1)
                for b in (0, 1)
                for part in (mpmath.cos, mpmath.sin)
            ]
            for index, some in ((3, truths[0::2]), (7, truths[1::2])):
                middle, radius = reals.enclosed(u, theta, index=index, levels=levels)
                wide = [mpmath.mpf(str(part)) for part in (middle, radius)]
                assert all(abs(truth - wide[0]) <= wide[1] for truth in some)
                # Near u = 1 the radius has half of the digits of u.
                assert wide[1] < 1 / mpmath.mpf(u) + mpmath.mpf(2) ** (5 - 32 * levels)


def test_a_u_of_zeros_has_no_enclosure_and_takes_more_levels(monkeypatch):
    assert reals.enclosed(0, 5, index=0, levels=1) is None
    noise = exact(1)
    release = noise.release(0, 1.0)
    real = reals.digits
    seen = []

    def tiny(key, **place):
        seen.append(place["levels"])
        return real(key, **place)[0] >> 140, real(key, **place)[1]

    monkeypatch.setattr(reals, "digits", tiny)
    far = noise.nearest(0.0, 0, release) * release.grid
    assert seen == [2, 4]  # 128 zeros first, then 256 bits
    assert 8.0 < math.hypot(far, noise.nearest(0.0, 4, release) * release.grid) < 15.0


def test_pi_and_the_context():
    with mpmath.workdps(140), decimal.localcontext() as context:
        context.prec = 140
        assert abs(mpmath.mpf(str(reals._pi(128))) - mpmath.pi) < mpmath.mpf(10) ** -86


def test_slices_offsets_and_threads_give_the_same_release(monkeypatch):
    whole = np.random.default_rng(1).normal(size=70_000)
    one = released(exact(threads=1), whole, 9, 2.0)
    monkeypatch.setattr("corrnoise.noise.exact._SHARE", 1000)
    assert released(exact(threads=3), whole, 9, 2.0) == one
    for low, high in ((0, 5), (3, 17), (32_760, 32_780), (69_990, 70_000)):
        assert released(exact(), whole[low:high], 9, 2.0, low) == one[low:high]
    parts = [whole[:11].copy(), whole[11:40_000].copy()]
    exact().add_(parts, 9, 2.0)
    assert (np.concatenate(parts) / exact().release(9, 2.0).grid).tolist() == one[:40_000]


@pytest.mark.parametrize("rounds", [20, 12, 8])
@pytest.mark.parametrize("block", [0, 2**32 - 3, 2**59 + 5])
def test_the_words_of_torch_are_those_of_the_stream(rounds, block):
    torch = pytest.importorskip("torch")
    from corrnoise.noise.backends import torch_exact

    stream = NoiseStream(KEY, 2**32 - 2, rounds, purpose=reals.purpose(0))
    step, right = 2**31 + 7, np.empty(16 * 9, dtype=np.uint32)
    keystream.fill(
        right, stream.secret, stream=stream.stream, step=step, block=block, rounds=rounds
    )
    found = torch_exact.Words(stream, torch.device("cpu"))(step, block, 9)
    assert np.array_equal(found.T.reshape(-1).numpy().view(np.uint32), right)


@pytest.mark.parametrize(("bands", "rounds"), [(1, 20), (4, 20), (4, 8), (16, 20)])
def test_torch_releases_what_numpy_releases(bands, rounds, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("corrnoise.noise.backends.torch_exact._TILE", 1 << 13)
    noise = exact(bands, rounds=rounds)
    values = np.random.default_rng(2).normal(size=30_001) * 5
    tensor, release = torch.from_numpy(values.copy()), noise.release(25, 0.9)
    noise.round_tensors([tensor], ((13, tensor.numel()),), release)
    ours = released(noise, values, 25, 0.9, 13)
    assert (tensor / release.grid).tolist() == ours
    # The slow path too, from a tensor.
    monkeypatch.setattr(Release, "room", property(lambda self: 0.4995))
    again = torch.from_numpy(values.copy())
    noise.round_tensors([again], ((13, again.numel()),), release)
    assert torch.equal(again, tensor)
    inside = torch.from_numpy(values.copy()).view(-1, 1)
    noise.add_([inside], 25, 0.9, [13])
    assert torch.equal(inside[:, 0], tensor)


def test_the_grid_is_a_power_of_two_just_fine_enough():
    for scale in (1.0, 1.999, 2.0, 0.3, 1e-9, 1e20):
        release = Release(0, (1.0,), scale)
        assert math.frexp(release.grid)[0] == 0.5
        assert 2.0**-9 * scale < release.grid <= 2.0**-8 * scale
        assert Fraction(release.ratio) == Fraction(scale) / Fraction(release.grid)


def test_the_error_of_a_sum_covers_normals_and_rounding():
    assert reals.sum_error([1.0]) >= 2.0**-37 + 2.0**-49
    weights = [0.5, -0.25, 1.0]
    assert reals.sum_error(weights) >= 1.75 * (2.0**-37 + 4 * 2.0**-50)
    assert reals.sum_error(weights) < 1.76 * 2.0**-37


def test_normals_are_normal():
    """Kolmogorov and Smirnov, and the fourth moment; false alarm below 1e-6 together."""
    scale = 2.0**20  # so that the grid is far below what the test sees, and G is 0
    noise, size = exact(1), 200_000
    values = np.zeros(size)
    noise.add_([values], 11, scale)
    z = values / scale
    assert stats.kstest(z, "norm").pvalue > 1e-7
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - mean) < 5.5 * math.sqrt(variance / size)
    pair = z.reshape(-1, 2, 4)  # both normals of a pair, in every block
    assert abs((pair[:, 0] * pair[:, 1]).mean()) < 5.5 / math.sqrt(size / 2)


def test_noise_is_correlated_as_the_mechanism_says():
    """Every entry of C⁻¹C⁻ᵀ within 5.5 of its standard deviations; false alarm below 1e-6."""
    noise, size, steps = exact(4), 60_000, 7
    rows = np.zeros((steps, size))
    for step in range(steps):
        noise.add_([rows[step]], step, 3.0)
    found = rows @ rows.T / (9.0 * size)
    inverse = noise._filter.mechanism.noising_matrix(steps)
    truth = inverse @ inverse.T
    spread = np.sqrt((np.outer(np.diag(truth), np.diag(truth)) + truth**2) / size)
    assert np.all(np.abs(found - truth) < 5.5 * spread + 2.0**-16 / 12)


def test_levels_and_other_uses_of_the_key_share_no_words():
    purposes = {KEY.subkey(reals.purpose(level)) for level in range(40)}
    others = ("noise", "batches", "state", "ledger", "digests", "positions", "augmentation")
    assert len(purposes | {KEY.subkey(each) for each in others}) == 40 + len(others)
    plain = CorrelatedNoise(mechanism(1), KEY).row(3, 0, 1000)
    ours = np.array(released(exact(1), np.zeros(1000), 3, 1.0))
    assert abs(np.corrcoef(plain, ours)[0, 1]) < 5.0 / math.sqrt(1000)


@pytest.mark.parametrize(
    "made",
    [
        mechanisms.dp_sgd(workloads.prefix_sum(20)),
        mechanisms.bifr(workloads.prefix_sum(20), num_bands=3, power=0.4),
        mechanisms.band_inv_mf(workloads.prefix_sum(20), Participation(20, 5, 4), num_bands=3),
        mechanisms.lambda_cgd(workloads.prefix_sum(20), rate=0.9),
    ],
    ids=lambda made: made.name,
)
def test_every_banded_family_runs_with_its_own_coefficients(made):
    run = made.in_float32()
    noise = ExactNoise(run, KEY)
    assert noise.release(19, 1.0).weights == tuple(run.noising_row(19).tolist())
    assert noise.release(1, 1.0).weights == tuple(run.noising_row(1).tolist())


def test_what_is_not_covered_is_refused():
    workload = workloads.prefix_sum(20)
    with pytest.raises(ValueError, match="banded C⁻¹"):
        ExactNoise(mechanisms.bsr(workload, num_bands=3).in_float32(), KEY)
    with pytest.raises(ValueError, match="coefficients in float32"):
        ExactNoise(mechanisms.lambda_cgd(workload, rate=0.9), KEY)
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        exact(threads=0)
    noise = exact()
    for grads, words in (
        ([np.zeros(3, np.float32)], "must be float64"),
        ([np.zeros((4, 4))[:, 1]], "contiguous"),
        ([], "non-empty"),
        ([[1.0]], "got list"),
    ):
        with pytest.raises(ValueError, match=words):
            noise.add_(grads, 0, 1.0)
    for step, scale, words in ((40, 1.0, "step"), (0, 0.0, "2\\^-100"), (0, math.inf, "finite")):
        with pytest.raises(ValueError, match=words):
            noise.add_([np.zeros(3)], step, scale)
    with pytest.raises(ValueError, match="finite"):
        noise.add_([np.array([1.0, math.nan])], 0, 1.0)


def test_a_state_belongs_to_its_noise():
    noise = exact()
    noise.load_state_dict(noise.state_dict())
    with pytest.raises(ValueError, match="exact"):
        noise.load_state_dict(CorrelatedNoise(mechanism(4), KEY).state_dict())
    with pytest.raises(ValueError, match="key_fingerprint"):
        noise.load_state_dict(ExactNoise(mechanism(4), Key.generate()).state_dict())
