"""What products of matrices round away is counted, of their factors and in their sums."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch

from corrnoise.torch.clipping.parts import Norms
from corrnoise.torch.clipping.rounding import Rounding, _cut, sums_of_units, unit


@pytest.mark.parametrize("step", [2.0**-10, 2.0**-7])
def test_cut_factors_change_a_product_by_no_more_than_is_counted(step):
    """Every way to round both factors, in the norm and in the sum, of numbers near the steps."""
    numbers = 1.0 + step * np.concatenate([np.arange(5) / 4 + shift for shift in (-1e-4, 0, 1e-4)])

    def ways(x):  # to the nearest step, and towards 0
        return (np.round(x / step) * step, np.floor(x / step) * step)

    worst = 0.0
    for left, right, moved in itertools.product(numbers, numbers, numbers):
        clip = moved / left  # what is cut is the product with the clip factor
        for norm_way, sum_way in itertools.product((0, 1), repeat=2):
            in_norm = ways(left)[norm_way] * ways(right)[norm_way]
            in_sum = ways(moved)[sum_way] * ways(right)[sum_way] / clip
            worst = max(worst, abs(in_sum - in_norm) / in_norm)
    assert 2.4 * step < worst <= _cut(step)


@pytest.mark.parametrize("each", [2.0**-24, 3.0 * 2.0**-24])
def test_additions_count_at_their_worst(each):
    ones, way = torch.ones(1, 1), Rounding(2.0**-9, each)
    for terms in (0, 1, 1000, 2**20):
        found = Norms(ones, ones, way, terms).lost - way.factors
        assert terms * each <= found + 1e-15 <= 1e-15 + terms * each * (1.0 + 2.0 * terms * each)
    with pytest.raises(ValueError, match=rf"fewer than {int(0.25 / each):,} positions"):
        _ = Norms(ones, ones, way, int(0.5 / each) + 1).lost
    for inner in (0, 256, 4000):
        wanted = 2.0**-23 + inner * each
        found = Norms(ones, ones, way, 9, inner).missed
        assert wanted <= found <= wanted * (1.0 + 2.0 * inner * each)


# Products at a time and bits behind float32, of float16 or bfloat16 and of TF32.
UNITS = {7: [(4, 0)], 8: [(8, 1), (4, 1)], 9: [(16, 2), (8, 2)]}
UNITS[10] = UNITS[9]


def unit_of(major, monkeypatch):
    """How matrix units of a GPU add."""
    sums_of_units.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    found = sums_of_units(torch.device("cuda", 0))
    sums_of_units.cache_clear()
    return Rounding(2.0**-9, found)


@pytest.mark.parametrize("terms", [64, 1000, 4096])
@pytest.mark.parametrize("major", UNITS)
def test_sums_of_matrix_units_are_off_by_no_more_than_is_counted(major, terms, monkeypatch):
    """One large product and many that are just too small beside it, which are all lost."""
    way, rng = unit_of(major, monkeypatch), np.random.default_rng(0)
    for at_once, bits in UNITS[major]:
        lost = np.full(terms, (1.0 - 2.0**-11) ** 2 * 2.0 ** -(23 + bits))
        lost[0] = 1.0
        random = np.round(rng.standard_normal(terms) * 2.0**20) * 2.0**-20
        equal = np.full(terms, np.round(0.7 * 2.0**20) * 2.0**-20)
        wrong = [
            abs(oracles.matrix_unit_sum(each, at_once, bits) - math.fsum(each)) / abs(each).sum()
            for each in (lost, random, equal)
        ]
        assert max(wrong) <= way.added(terms)
        assert wrong[0] > 0.4 * way.added(terms)  # so that what is counted is needed


def test_matrix_units_that_are_not_known_count_as_the_oldest(monkeypatch):
    assert unit_of(7, monkeypatch) == unit_of(12, monkeypatch) == unit_of(99, monkeypatch)
    assert unit_of(7, monkeypatch).sums == sums_of_units(torch.device("cpu"))
    assert (
        unit_of(9, monkeypatch).sums < unit_of(8, monkeypatch).sums < unit_of(7, monkeypatch).sums
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")  # its capabilities are other numbers
    assert unit_of(9, monkeypatch) == unit_of(7, monkeypatch)


def test_sums_of_float16_in_float16_are_refused():
    factor = SimpleNamespace(is_cuda=True, dtype=torch.float16)
    assert unit(factor, "highest") == 2.0**-10
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        with pytest.raises(ValueError, match="allow_fp16_accumulation must be False"):
            unit(factor, "highest")
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
