"""Prices of Poisson batches: the grid follows the noise, and stays an upper bound."""

from __future__ import annotations

import math
import time

import pytest

from corrnoise.accounting import gaussian, pld


def fine(happened, delta, interval):
    from dp_accounting.pld import PLDAccountant

    return (
        PLDAccountant(value_discretization_interval=interval).compose(happened).get_epsilon(delta)
    )


@pytest.mark.parametrize(
    ("probability", "sigma", "count"), [(1 / 8, 0.08, 8), (1 / 100, 0.12, 900)]
)
def test_a_wider_grid_gives_no_less_and_hardly_more(probability, sigma, count):
    happened = pld.event(probability, sigma, count)
    assert pld._interval(happened) > 1e-3
    least = fine(happened, 1e-5, 1e-3)
    assert least <= pld.epsilon(happened, 1e-5) <= 1.001 * least


def test_usual_noise_keeps_the_usual_grid():
    assert pld._interval(pld.event(1 / 938, 1.0, 9380)) == 1e-3


def test_little_noise_is_priced_at_once():
    start = time.process_time()
    found = pld.epsilon(pld.event(1 / 8, 0.01, 8), 1e-5)
    assert time.process_time() - start < 10.0  # a minute before
    # Not below what an example that takes part once costs, with the probability of that.
    once = 1.0 - (7 / 8) ** 8
    assert (
        gaussian.epsilon(1e-5 / once, 1 / 0.01) * 0.9
        < found
        < gaussian.epsilon(1e-5, 8**0.5 / 0.01)
    )


def test_noise_beyond_the_library_is_priced_without_amplification():
    happened = pld.event(1 / 8, 1e-4, 24)
    assert pld.epsilon(happened, 1e-5) == gaussian.epsilon(1e-5, math.sqrt(24) / 1e-4)
    assert pld.delta(happened, 10.0) == gaussian.delta(10.0, math.sqrt(24) / 1e-4)
