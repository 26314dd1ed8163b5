"""Prices of balls-in-bins with no random draws, as one curve for a run."""

from __future__ import annotations

import pytest

import corrnoise as cn
from corrnoise.accounting import allocation, certain

N, B = 200, 20


def mechanism(name):
    workload = cn.workloads.sgd(N, momentum=0.9)
    part = cn.Participation(N, B, N // B)
    return cn.mechanisms.build(name, workload, part, None if name == "dp_sgd" else 4)


@pytest.mark.parametrize("name", ["bisr", "dp_sgd"])
@pytest.mark.parametrize("sigma", [1.0, 5.0])
def test_a_curve_holds_and_is_close_to_a_search(name, sigma):
    found = mechanism(name)
    curve = certain.Curve(lambda steps: found.first(steps).bins(B), sigma)
    for steps, delta in ((20, 1e-5), (200, 1e-5), (60, 1e-3), (33, 1e-5)):
        bins = found.first(steps).bins(B)
        value, least = curve(steps, delta), certain.epsilon(bins, sigma, delta)
        assert certain.delta(bins, sigma, value) <= delta
        assert 0.98 * least <= value <= 1.25 * least


def test_later_prices_take_few_evaluations(monkeypatch):
    found = mechanism("bisr")
    curve = certain.Curve(lambda steps: found.first(steps).bins(B), 3.0)
    curve(200, 1e-5)

    def refuse(*given):
        raise AssertionError("a whole search")

    monkeypatch.setattr(certain, "epsilon", refuse)
    assert curve(20, 1e-5) < curve(100, 1e-5) < curve(200, 1e-6)


def test_nothing_is_spent_where_delta_covers_it():
    found = mechanism("dp_sgd")
    curve = certain.Curve(lambda steps: found.first(steps).bins(B), 50.0)
    assert curve(20, 0.5) == 0.0
    assert curve(200, 1e-5) > 0.0
    assert curve(20, 0.9) == 0.0


@pytest.mark.parametrize("name", ["bisr", "bsr"])
def test_the_closest_comparison_is_the_least_of_all(name):
    """Comparisons of which one direction is worse than another's both are not evaluated further."""
    for n, sigma, epsilon in ((200, 3.0, 1.0), (200, 8.0, 0.3), (60, 1.0, 4.0)):
        found = allocation.comparisons(mechanism(name).first(n).bins(B))
        least = min(each.coarse(sigma, epsilon) for each in found)
        assert certain._closest(found, sigma, epsilon).coarse(sigma, epsilon) == least


@pytest.mark.parametrize(
    ("n", "b", "epsilon", "delta"),
    [(279, 74, 0.00175, 2.3e-9), (13, 6, 0.0033, 7.6e-10), (213, 37, 0.0012, 1.4e-4)],
)
def test_delta_confirms_what_a_search_found(n, b, epsilon, delta):
    """At a small ε coarse grids mislead: plans were refused that another bound proves."""
    bins = cn.mechanisms.bsr(cn.workloads.prefix_sum(n), num_bands=n).bins(b)
    sigma = certain.noise(bins, epsilon, delta)
    assert certain.delta(bins, sigma, epsilon) <= delta * (1 + 1e-9)
    spent = certain.epsilon(bins, 1.3 * sigma, delta)
    assert certain.delta(bins, 1.3 * sigma, spent) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "epsilon"), [(0.02, 1.0), (0.02, 0.3), (0.5, 1.0)])
def test_a_bound_is_at_most_a_delta_where_the_best_one_is(rate, epsilon):
    """A little below the best bound's δ and far below it there is none; above it, there is one."""
    workload = cn.workloads.prefix_sum(200)
    bins = cn.mechanisms.lambda_cgd(workload, rate=rate).bins(200)
    for sigma in (0.8, 1.2, 3.0):
        value, bound = certain.best(bins, sigma, epsilon)
        assert certain.at_most(bins, sigma, epsilon, 1.01 * value) == bound
        assert certain.at_most(bins, sigma, epsilon, 0.99 * value) is None
        assert certain.at_most(bins, sigma, epsilon, 1e-3 * value) is None
