from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import corrnoise as cn
from corrnoise.noise import Key
from corrnoise.sampling import Batches

KEY = Key.from_bytes(bytes(range(32)))


def batches(num_examples, n, b, sampling, **options):
    part = cn.Participation(n, b, -(-n // b))
    return Batches(num_examples, part, sampling, options.pop("key", KEY), **options)


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
    group = found._groups
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
    for sampling in ("balls-in-bins", "poisson"):
        first, again = (batches(500, 20, 10, sampling) for _ in range(2))
        other = batches(500, 20, 10, sampling, key=Key.from_bytes(bytes(32)))
        for step in (19, 3, 11):
            assert (first.indices(step) == again.indices(step)).all()
        assert first.indices(3).tolist() != other.indices(3).tolist()


def test_sampling_and_noise_use_different_words():
    stream = cn.noise.NoiseStream(KEY)
    words = batches(100, 5, 5, "poisson")._words
    drawn = {int(w) for s in (2**32 - 1, 2**32 - 2) for w in words(s, 0)}
    noise = stream.words(0, 0, 200).reshape(-1, 2).view(np.uint64)[:, 0]
    assert not drawn & {int(w) for w in noise}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 5, "fixed"), "num_examples"),
        ((3, 10, 5, "fixed"), "min_sep must be at most num_examples=3"),
        ((10, 10, 5, "shuffle"), "sampling must be"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(*arguments)


def test_groups_belong_to_cyclic_poisson():
    with pytest.raises(ValueError, match="num_groups must be 1"):
        batches(10, 10, 5, "poisson", num_groups=2)
    with pytest.raises(ValueError, match="num_groups must be"):
        batches(10, 10, 5, "cyclic-poisson", num_groups=6)


def test_a_step_outside_the_run_raises():
    found = batches(10, 10, 5, "balls-in-bins")
    for step in (-1, 10):
        with pytest.raises(ValueError, match="planned for 10 steps"):
            found.indices(step)
