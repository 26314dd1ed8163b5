"""Prices of Poisson batches: closed forms for one step, Google's accountant for many."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.special import ndtr

from corrnoise.accounting import gaussian, poisson

STEPS = [(0.5, 1.0), (0.25, 4.0), (1 / 98, 1.0), (1e-3, 0.5), (0.98, 2.0), (1 / 8, 0.1), (1e-4, 20)]


def one_step(q, sigma, epsilon):
    """δ(ε) of one step in both directions: P = (1-q)N(0, σ²) + qN(1, σ²) against Q = N(0, σ²)."""

    def direction(s, sign):
        # P/Q = s at x.
        inside = 1.0 + (s - 1.0) / q
        if inside <= 0.0:
            return 0.0 if sign > 0 else None
        x = sigma**2 * math.log(inside) + 0.5
        above_q, above_p = ndtr(-x / sigma), ndtr(-(x - 1.0) / sigma)
        if sign > 0:
            return q * above_p + (1.0 - q) * above_q - s * above_q
        return ndtr(x / sigma) - (q * ndtr((x - 1.0) / sigma) + (1 - q) * ndtr(x / sigma)) / s

    add = direction(math.exp(-epsilon), -1)
    return max(direction(math.exp(epsilon), 1), add if add is not None else 0.0)


@pytest.mark.parametrize(("q", "sigma"), STEPS)
def test_one_step_is_that_of_the_closed_form(q, sigma):
    for epsilon in (0.0, 0.01, 0.1, 1.0, 3.0):
        exact = one_step(q, sigma, epsilon)
        found = poisson.delta_bound(q, sigma, 1, epsilon)
        assert exact <= found
        if exact > 1e-15:
            assert found <= 1.005 * exact + 1e-17


def test_the_curves_are_expectations():
    step, h = poisson.Step(0.1, 0.49), 0.05
    z = np.linspace(-12.0, 12.0, 400_001)
    density, q = stats.norm.pdf(z) * (z[1] - z[0]), 0.1
    s = 1.0 + q * np.expm1(0.7 * z - 0.245)
    for m in range(8):
        call = density @ np.maximum(s - math.exp(m * h), 0.0)
        put = density @ np.maximum(math.exp(-m * h) - s, 0.0)
        assert step.calls(h)[m] == pytest.approx(call, rel=1e-6)
        if m * h < -math.log1p(-q):
            assert step.puts(h)[m] == pytest.approx(put, rel=1e-6)


def test_two_steps_are_a_double_integral():
    q, sigma, epsilon = 0.3, 1.2, 0.8

    def ratio(x):
        return 1.0 + q * math.expm1((x - 0.5) / sigma**2)

    def density(x):
        return stats.norm.pdf(x, 0.0, sigma)

    def inner(x):
        # E_Q over the second output of (S₁S₂ - e^ε)_+ is S₁ times a δ of one step at e^ε/S₁.
        wanted = math.exp(epsilon) / ratio(x)
        low = 1.0 + (wanted - 1.0) / q
        at = -np.inf if low <= 0.0 else sigma**2 * math.log(low) + 0.5
        above_q, above_p = ndtr(-at / sigma), ndtr(-(at - 1.0) / sigma)
        return ratio(x) * (q * above_p + (1.0 - q) * above_q - wanted * above_q)

    exact, error = integrate.quad(lambda x: density(x) * inner(x), -12, 14, epsabs=1e-12)
    found = poisson.delta_bound(q, sigma, 2, epsilon)
    assert exact - error <= found <= 1.003 * exact


@pytest.mark.parametrize(
    ("q", "sigma", "count", "epsilon"),
    [
        (1e-3, 4.17, 100_000, 0.3),  # a step says little: a grid must be finer than that
        (1 / 98, 5.0, 980, 0.2),
        (1 / 98, 1.0, 980, 2.0),
        (0.1, 8.0, 1000, 2.0),
        (0.5, 2.0, 100, 3.0),
        (1e-3, 0.5, 1000, 1.0),
        (1 / 8, 0.08, 8, 100.0),
    ],
)
def test_it_agrees_with_the_accountant_of_dp_accounting(q, sigma, count, epsilon):
    from dp_accounting.pld import privacy_loss_distribution

    width = q * math.sqrt(math.expm1(min(sigma**-2, 8.0))) / 40
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        value_discretization_interval=min(max(width, 5e-4 / sigma**2 / 40), 1e-3),
        use_connect_dots=True,
    ).self_compose(count)
    found = poisson.delta_bound(q, sigma, count, epsilon)
    # Both are upper bounds, each within half a percent of the truth.
    assert found == pytest.approx(theirs.get_delta_for_epsilon(epsilon), rel=5e-3)


def test_very_many_steps_approach_the_central_limit():
    q, count, sigma = 1e-4, 1_000_000, 2.0
    mu = q * math.sqrt(count * math.expm1(sigma**-2))
    found = poisson.delta_bound(q, sigma, count, 0.15)
    assert found == pytest.approx(gaussian.delta(0.15, mu), rel=0.1)


def test_a_small_delta_is_neither_negative_nor_lost_in_rounding():
    """Transforms without a tilt have errors of 1e-12 after a million steps."""
    for epsilon in (1.0, 2.0, 4.0):
        found = poisson.delta_bound(1e-4, 2.0, 10_000, epsilon)
        assert 0.0 < found < 1e-13


def test_without_sampling_and_beyond_the_limits_it_is_the_gaussian_mechanism():
    for q, sigma, count in [(1.0, 3.0, 7), (0.1, 1e-3, 24), (0.1, 1e5, 24)]:
        expected = gaussian.delta(1.0, math.sqrt(count) / sigma)
        assert poisson.delta_bound(q, sigma, count, 1.0) == expected


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1e-3, 0.9),
    st.floats(0.3, 20.0),
    st.integers(1, 2000),
    st.floats(0.0, 8.0),
    st.floats(1.02, 2.0),
)
def test_delta_falls_with_noise_and_epsilon_and_grows_with_rate_and_steps(q, sigma, count, eps, f):
    found = poisson.delta_bound(q, sigma, count, eps)
    slack = 1.01 * found + 1e-15
    assert poisson.delta_bound(q, sigma * f, count, eps) <= slack
    assert poisson.delta_bound(q, sigma, count, eps + 0.1 * f) <= slack
    assert poisson.delta_bound(q / f, sigma, count, eps) <= slack
    assert poisson.delta_bound(q, sigma, max(1, int(count / f)), eps) <= slack
    assert found <= gaussian.delta(eps, math.sqrt(count) / sigma)
