from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import corrnoise as cn
from corrnoise.algebra.rational import Rational
from corrnoise.mechanisms import DenseMechanism, ToeplitzMechanism
from corrnoise.noise import Key
from corrnoise.samplings import Sampling, random_words
from corrnoise.samplings import sampling as sampling_module
from corrnoise.samplings.fixed import Fixed

KEY = Key.from_bytes(bytes(range(32)))


def batches(num_examples, n, b, sampling, *, key=KEY, num_groups=1, **options):
    part = cn.Participation(n, b, -(-n // b))
    mechanism = cn.mechanisms.bsr(cn.workloads.prefix_sum(n), num_bands=num_groups)
    return cn.samplings.get(sampling).batches(num_examples, part, mechanism, key, **options)


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 4), st.booleans())
def test_fixed_batches_use_every_example_once_an_epoch_in_the_same_order(size, b, k, shuffled):
    if b > size:
        b = size
    found = batches(size, b * k, b, "fixed", shuffled=shuffled)
    epoch = [found.indices(step).tolist() for step in range(b)]
    assert sorted(chain(*epoch)) == list(range(size))
    assert max(map(len, epoch)) - min(map(len, epoch)) <= 1
    for step in range(b, b * k):
        assert found.indices(step).tolist() == epoch[step % b]


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 3))
def test_bins_hold_every_example_once_and_come_back_every_epoch(size, b, k):
    found = batches(size, b * k, b, "balls-in-bins")
    epoch = [found.indices(step).tolist() for step in range(b)]
    assert sorted(chain(*epoch)) == list(range(size))
    for step in range(b, b * k):
        assert found.indices(step).tolist() == epoch[step % b]


def test_bins_are_uniform_and_independent_of_their_neighbours():
    # False alarm: 2 tests at 1e-6.
    size, b = 100_000, 37
    found = batches(size, b, b, "balls-in-bins")
    bins = np.empty(size, int)
    for step in range(b):
        bins[found.indices(step)] = step
    assert stats.chisquare(np.bincount(bins, minlength=b)).pvalue > 1e-6
    pairs = np.bincount(bins[:-1:2] * b + bins[1::2], minlength=b * b)
    assert stats.chisquare(pairs).pvalue > 1e-6


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 3))
def test_random_allocation_uses_every_example_once_in_each_epoch(size, b, k):
    found = batches(size, b * k, b, "random-allocation")
    for epoch in range(k):
        steps = [found.indices(step).tolist() for step in range(epoch * b, epoch * b + b)]
        assert sorted(chain(*steps)) == list(range(size))
        assert all(step == sorted(step) for step in steps)


def allocated(size, b, k):
    """The step within its epoch of every example: shape (k, size)."""
    found = batches(size, b * k, b, "random-allocation")
    result = np.empty((k, size), int)
    for step in range(b * k):
        result[step // b, found.indices(step)] = step % b
    return result


def test_random_allocation_is_uniform_and_independent_in_each_epoch():
    # False alarm: 5 tests at 1e-6.
    size, b = 100_000, 37
    first, second = allocated(size, b, 2)
    for steps in (first, second):
        assert stats.chisquare(np.bincount(steps, minlength=b)).pvalue > 1e-6
        pairs = np.bincount(steps[:-1:2] * b + steps[1::2], minlength=b * b)
        assert stats.chisquare(pairs).pvalue > 1e-6
    both = np.bincount(first * b + second, minlength=b * b)
    assert stats.chisquare(both).pvalue > 1e-6


def test_an_allocation_does_not_depend_on_how_many_examples_follow_or_on_the_order_of_steps():
    few, many = allocated(50, 7, 3), allocated(80, 7, 3)
    assert np.array_equal(few, many[:, :50])
    found = batches(80, 21, 7, "random-allocation")
    for step in (20, 0, 13, 6, 14):
        assert found.indices(step).tolist() == np.flatnonzero(many[step // 7] == step % 7).tolist()


def test_a_bin_does_not_depend_on_how_many_examples_follow():
    few, many = (batches(size, 7, 7, "balls-in-bins") for size in (50, 80))
    for step in range(7):
        assert [i for i in many.indices(step) if i < 50] == few.indices(step).tolist()


@pytest.mark.parametrize(("b", "groups"), [(10, 1), (10, 3), (4, 4)])
def test_poisson_takes_each_example_with_its_probability(b, groups):
    # False alarm: 1e-6 for each of 3 cases and 2 counts.
    size, n = 2_000, 60
    sampling = "poisson" if groups == 1 else "cyclic-poisson"
    found = batches(size, n, b, sampling, num_groups=groups)
    taken = np.zeros((n, size), bool)
    for step in range(n):
        taken[step, found.indices(step)] = True
    group = random_words(KEY, size) % np.uint64(groups)
    for step in range(n):
        assert not taken[step, group != step % groups].any()
    possible = sum(int((group == step % groups).sum()) for step in range(n))
    count = int(taken.sum())
    if groups == b:
        assert count == possible
    else:
        assert stats.binomtest(count, possible, groups / b).pvalue > 1e-6
    if groups > 1:
        sizes = np.bincount(group.astype(int), minlength=groups)
        assert stats.chisquare(sizes).pvalue > 1e-6


def test_batches_are_replayed_from_the_key_alone():
    for sampling in ("balls-in-bins", "poisson", "random-allocation"):
        first, again = (batches(500, 20, 10, sampling) for _ in range(2))
        other = batches(500, 20, 10, sampling, key=Key.from_bytes(bytes(range(1, 33))))
        for step in (19, 3, 11):
            assert (first.indices(step) == again.indices(step)).all()
        assert first.indices(3).tolist() != other.indices(3).tolist()


def test_sampling_and_noise_use_different_words():
    stream = cn.noise.NoiseStream(KEY)
    words = [random_words(KEY, 100), random_words(KEY, 100, 0), random_words(KEY, 100, epoch=0)]
    drawn = {int(w) for w in chain(*words, random_words(KEY, 100, epoch=1))}
    assert len(drawn) == 400
    noise = stream.words(0, 0, 400).reshape(-1, 2).view(np.uint64)[:, 0]
    assert not drawn & {int(w) for w in noise}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 5, "fixed"), "num_examples"),
        ((0, 10, 5, "balls-in-bins"), "num_examples must be at least 1, got 0"),
        ((0, 10, 5, "poisson"), "num_examples must be at least 1, got 0"),
        ((3, 10, 5, "fixed"), "min_sep must be at most num_examples=3"),
        ((10, 10, 5, "shuffle"), "sampling must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(*arguments)


def test_groups_belong_to_cyclic_poisson():
    with pytest.raises(ValueError, match="correlates the noise"):
        batches(10, 10, 5, "poisson", num_groups=2)
    with pytest.raises(ValueError, match="6 bands, more than min_sep=5"):
        batches(10, 10, 5, "cyclic-poisson", num_groups=6)


def test_a_step_outside_the_run_raises():
    found = batches(10, 10, 5, "balls-in-bins")
    for step in (-1, 10):
        with pytest.raises(ValueError, match="planned for 10 steps"):
            found.indices(step)


# Samplings as objects.


def verdicts(mechanism, part):
    """Which samplings have a valid analysis, from C itself and the terms of its series."""
    n, b, k = part.num_steps, part.min_sep, part.max_participations
    dense = isinstance(mechanism, DenseMechanism)
    C = mechanism.strategy if dense else oracles.matrix(mechanism.strategy_coef)
    bands = n
    if not dense and mechanism.noising.numerator_terms == 1:
        bands = mechanism.noising.denominator_terms
    rows, columns = np.nonzero(C)
    assert np.max(rows - columns) < bands
    return {
        "fixed": True,
        "balls-in-bins": C.min() >= -1e-12 * np.abs(C).max() and k == -(-n // b),
        "poisson": bands == 1 and not dense,
        "random-allocation": bands == 1 and not dense and k == -(-n // b),
        "cyclic-poisson": bands <= b and not dense,
    }


SHAPES = [(24, 6, 4), (24, 6, 2), (23, 6, 4), (24, 24, 1), (24, 1, 24), (24, 1, 3), (24, 12, 1)]
FAMILIES = {
    "dp_sgd": lambda w, part: cn.mechanisms.dp_sgd(w),
    "bsr-1": lambda w, part: cn.mechanisms.bsr(w, num_bands=1),
    "bsr-3": lambda w, part: cn.mechanisms.bsr(w, num_bands=3),
    "bsr-7": lambda w, part: cn.mechanisms.bsr(w, num_bands=7),
    "bisr-1": lambda w, part: cn.mechanisms.bisr(w, num_bands=1),
    "bisr-4": lambda w, part: cn.mechanisms.bisr(w, num_bands=4),
    "square_root": lambda w, part: cn.mechanisms.square_root(w),
    "band_mf": lambda w, part: cn.mechanisms.band_mf(w, part, num_bands=part.min_sep),
    "band_inv_mf": lambda w, part: cn.mechanisms.band_inv_mf(w, part, num_bands=4),
    "blt": lambda w, part: cn.mechanisms.blt(w, part, num_buffers=2),
    "dense": lambda w, part: cn.mechanisms.dense(w, part),
    "dense-1": lambda w, part: cn.mechanisms.dense(w, part, num_bands=1),
    "negative": lambda w, part: ToeplitzMechanism(
        "negative", w, cn.mechanisms.bisr(w, num_bands=2).noising.reciprocal
    ),
    "rounding": lambda w, part: ToeplitzMechanism(
        "rounding", w, Rational.of(denominator=[[1.0, 0.5, -1e-13]])
    ),
    "tiny": lambda w, part: ToeplitzMechanism(
        "tiny", w, Rational.of(denominator=[[1.0, 0.5, -1e-11]])
    ),
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_has_an_analysis(family, shape, momentum):
    part = cn.Participation(*shape)
    mechanism = FAMILIES[family](cn.workloads.sgd(shape[0], momentum=momentum), part)
    reasons = cn.samplings.objections(mechanism, part)
    assert {name: not reason for name, reason in reasons.items()} == verdicts(mechanism, part)
    for name, reason in reasons.items():
        sampling = cn.samplings.get(name)
        assert sampling.objection(mechanism, part) == reason
        if not reason:
            cn.samplings.require(sampling, mechanism, part)
            continue
        assert "\n" not in reason
        for call in (
            lambda s=sampling: cn.samplings.require(s, mechanism, part),
            lambda s=name: cn.calibrate(mechanism, part, epsilon=1, delta=1e-5, sampling=s),
            lambda s=name: cn.account(mechanism, part, noise_multiplier=1, delta=1e-5, sampling=s),
        ):
            with pytest.raises(ValueError, match=f"sampling='{name}' cannot be priced") as caught:
                call()
            assert reason in str(caught.value)
            valid = ", ".join(other for other, why in reasons.items() if not why)
            assert str(caught.value).endswith(f"valid here: {valid}")


def test_a_sampling_is_a_value():
    for name in cn.samplings.names():
        sampling = cn.samplings.get(name)
        assert sampling == cn.samplings.get(name)
        assert len({sampling, cn.samplings.get(name)}) == 1
        assert sampling.name == str(sampling) == name
        assert sampling.sentence
        assert sampling.accountant
        with pytest.raises(dataclasses.FrozenInstanceError):
            sampling.name = "other"
    assert len({cn.samplings.get(name) for name in cn.samplings.names()}) == 5
    assert cn.samplings.get(cn.samplings.ASSUMED).name == "fixed"
    assert cn.samplings.get(cn.samplings.DRAWN).name == "balls-in-bins"
    assert [s for s in cn.samplings.names() if cn.samplings.get(s).certified] == ["balls-in-bins"]
    assert [s for s in cn.samplings.names() if cn.samplings.get(s).partial_epoch] == ["fixed"]


TAKES_PART = {
    "fixed": "at most 5 times (k), at least 6 steps (b) apart",
    "balls-in-bins": "in a random one of the first 6 steps (b) and in every b-th step after it, "
    "so at most 5 times (k)",
    "poisson": "in each step with probability 1/6 (1/b), any number of times",
    "random-allocation": "at most once in each epoch of 6 steps (b), in a random one that is drawn "
    "afresh, so at most 5 times (k), with no least distance",
    "cyclic-poisson": "in every p-th step from a random one of the first 2 steps (p) on, each time "
    "with probability 2/6 (p/b), so at most 14 times",
}


@pytest.mark.parametrize("name", cn.samplings.names())
def test_what_a_statement_says_of_participation_holds_for_the_batches(name):
    n, b, size = 27, 6, 2000
    groups = 2 if name == "cyclic-poisson" else 1
    part, how = cn.Participation(n, b, 5), cn.samplings.get(name)
    mechanism = cn.mechanisms.bsr(cn.workloads.prefix_sum(n), num_bands=groups)
    words = how.takes_part(mechanism, part)
    assert words == TAKES_PART[name]
    found = batches(size, n, b, name, num_groups=groups)
    taken = np.zeros((n, size), bool)
    for step in range(n):
        taken[step, found.indices(step)] = True
    times = taken.sum(axis=0)
    gaps = [np.diff(np.flatnonzero(column)).min(initial=n) for column in taken.T]
    # k and b are stated where the batches keep to them, and nowhere else.
    assert (times.max() <= 5) == ("at most 5 times (k)" in words)
    assert (min(gaps) >= b) == ("(b) apart" in words or "every b-th step" in words)
    if name == "cyclic-poisson":
        assert min(gaps) >= groups
        assert times.max() <= 14
    assert how.by_sensitivity == (name == "fixed")


def test_a_single_participation_has_no_distance():
    part = cn.Participation(6, 6, 1)
    mechanism = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(6))
    for name in ("fixed", "balls-in-bins", "random-allocation"):
        words = cn.samplings.get(name).takes_part(mechanism, part)
        assert "apart" not in words
        assert "1 times" not in words
    assert cn.Participation(3, 1, 3).words == "at most 3 times (k), at least 1 step (b) apart"


def test_a_new_sampling_claims_nothing_of_participation():
    class Plain(Sampling):
        def objection(self, mechanism, participation):
            return ""

        def delta(self, mechanism, participation, noise_multiplier, epsilon, num_steps):
            return 1.0

        def batches(self, num_examples, participation, mechanism, key, *, shuffled=False):
            raise NotImplementedError

    part = cn.Participation(6, 3, 2)
    mechanism = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(6))
    assert Plain().takes_part(mechanism, part) == "as its batches are drawn"
    assert not Plain().by_sensitivity


@pytest.mark.parametrize("name", cn.samplings.names())
def test_a_name_and_its_object_give_the_same_price(name):
    part = cn.Participation(24, 6, 4)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(24))
    budget = {"epsilon": 1.0, "delta": 1e-5, "samples": 2000}
    by_name = cn.calibrate(m, part, sampling=name, **budget)
    by_object = cn.calibrate(m, part, sampling=cn.samplings.get(name), **budget)
    assert by_name == by_object
    assert by_name.sampling is not name
    assert by_name.sampling.name == name


@dataclass(frozen=True)
class Halves(Fixed):
    """Fixed batches that say how often the noise is doubled: a sampling with a parameter."""

    name: ClassVar[str] = "halves"
    times: int = 1

    def delta(self, mechanism, participation, noise_multiplier, epsilon, num_steps):
        noise = noise_multiplier / 2**self.times
        return super().delta(mechanism, participation, noise, epsilon, num_steps)

    # What follows from ``delta`` alone, not the shortcuts of fixed batches.
    noise, epsilon = Sampling.noise, Sampling.epsilon


@pytest.fixture
def halves(monkeypatch):
    monkeypatch.setattr(sampling_module, "_KNOWN", dict(sampling_module._KNOWN))
    cn.samplings.register(Halves())
    return Halves(times=2)


def test_a_new_sampling_needs_a_price_and_the_rest_follows(halves):
    part = cn.Participation(24, 6, 4)
    m = cn.mechanisms.bisr(cn.workloads.prefix_sum(24), num_bands=4)
    fixed = cn.calibrate(m, part, epsilon=2, delta=1e-6)
    c = cn.calibrate(m, part, epsilon=2, delta=1e-6, sampling=halves)
    assert fixed.noise_multiplier * 4 <= c.noise_multiplier
    assert c.noise_multiplier == pytest.approx(fixed.noise_multiplier * 4, rel=2e-5)
    back = cn.account(m, part, noise_multiplier=c.noise_multiplier, delta=1e-6, sampling=halves)
    assert back.epsilon <= 2
    assert back.epsilon == pytest.approx(2, rel=1e-4)
    for steps in (1, 7, 23):
        assert c.spent(steps) == pytest.approx(fixed.spent(steps), rel=1e-4)
    assert halves.estimate(m, part, 2, 1e-6, None) == c.noise_multiplier
    with pytest.raises(
        ValueError, match=r"sampling='poisson' cannot.*fixed, balls-in-bins, halves"
    ):
        cn.calibrate(m, part, epsilon=1, delta=1e-6, sampling="poisson")


def test_the_parameters_of_a_sampling_come_back(halves):
    assert halves.to_json() == {"name": "halves", "times": 2}
    assert cn.samplings.get(halves.to_json()) == halves
    assert cn.samplings.get("halves") == Halves(times=1) != halves
    part = cn.Participation(24, 6, 4)
    m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(24))
    c = cn.calibrate(m, part, epsilon=2, delta=1e-6, sampling=halves)
    plan = cn.Plan(num_examples=60, batch_size=10, calibration=c)
    assert cn.Plan.from_json(plan.to_json()) == plan
    assert cn.Plan.from_json(plan.to_json()).sampling.times == 2


@pytest.mark.parametrize("wrong", ["shuffle", {"name": "shuffle"}, {}, {"name": ["fixed"]}])
def test_an_unknown_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match="sampling must be one of fixed, balls-in-bins, poisson"):
        cn.samplings.get(wrong)


def test_an_estimate_sees_the_bound_where_bins_are_many():
    """Where means are nearly orthogonal, the bound is tight, and few draws certify less."""
    from corrnoise.accounting import Draws, certain, certificates

    part = cn.Participation(300, 300, 1)
    m = cn.mechanisms.lambda_cgd(cn.workloads.prefix_sum(300), rate=1e-6)
    draws = Draws.checked(1e-9, 1_000, 0, None)
    found = cn.samplings.get("balls-in-bins").estimate(m, part, 0.3, 1e-6, draws)
    proven = certain.noise(m.bins(300), 0.3, 1e-6)
    assert found == pytest.approx(proven, rel=0.02)
    assert certificates.estimate_noise(m.bins(300), 0.3, 1e-6, draws) > 1.05 * proven


def test_an_estimate_is_below_the_bound_where_means_overlap():
    """One epoch of 1000 steps: 7.8 is proven without draws, and about 3.9 is enough."""
    from corrnoise.accounting import Draws

    part = cn.Participation(1000, 1000, 1)
    m = cn.mechanisms.bisr(cn.workloads.prefix_sum(1000), num_bands=4)
    draws = Draws.checked(1e-9, None, 0, None)
    assert 3.6 < cn.samplings.get("balls-in-bins").estimate(m, part, 0.1, 1e-6, draws) < 4.2
