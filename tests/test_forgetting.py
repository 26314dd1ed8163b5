"""The benchmarks of what training forgets and of batch sizes: formulas, against simulation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.linalg import toeplitz

import corrnoise as cn

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import batches
import forgetting


@pytest.mark.parametrize("count", [1, 3, 12])
def test_the_mean_of_the_last_outputs_is_that_of_the_matrix(count):
    coef = np.random.default_rng(0).normal(size=12)
    matrix = toeplitz(coef, np.zeros(12))
    expected = matrix[-count:].mean(axis=0)
    np.testing.assert_allclose(forgetting.mean_of_last(coef, count), expected, atol=1e-14)


@pytest.mark.parametrize("averaged", [False, True])
def test_signal_over_noise_is_that_of_sgd_with_momentum_and_decay(averaged):
    """With 20,000 coordinates a deviation is off by 0.5 %; 2.5 % is five times that: p < 1e-6."""
    plan = cn.plan(
        num_examples=320, batch_size=16, epochs=2, epsilon=4.0, delta=1e-5,
        momentum=forgetting.MOMENTUM, sampling="fixed", mechanisms=["bisr"],
    )  # fmt: skip
    n, part = plan.num_steps, 0.3
    noise = np.random.default_rng(1).normal(size=(n, 20_000)) * plan.noise_multiplier
    noise = toeplitz(plan.mechanism.noising_coef[:n], np.zeros(n)) @ noise
    means = []
    for inputs in (np.full((n, 1), float(plan.batch_size)), noise):
        weights, velocity, kept = 0.0, 0.0, []
        for gradient in inputs:
            velocity = forgetting.MOMENTUM * velocity + gradient
            weights = forgetting.decay_of(part, n) * weights + velocity
            kept.append(weights)
        means.append(np.mean(kept[-(n // 10) if averaged else -1 :], axis=0))
    expected = float(means[0][0]) / float(means[1].std())
    assert forgetting.ratio(plan, part, averaged=averaged) == pytest.approx(expected, rel=0.025)


def test_the_table_of_batches_is_what_the_script_computes_and_says(monkeypatch):
    monkeypatch.setattr(batches, "METHODS", {batches.BASE: batches.METHODS[batches.BASE]})
    found = json.loads((Path(batches.__file__).with_name("batches.json")).read_text())
    for row in found["rows"]:
        (ours,) = batches.row(row["epsilon"], row["batch"])["methods"].values()
        assert ours == pytest.approx(row["methods"][batches.BASE])
    gains = {}
    for row in found["rows"]:
        for name, method in row["methods"].items():
            gains.setdefault((row["epsilon"], name), []).append(method["signal_over_noise"])
    for epsilon in batches.EPSILONS:
        base, choice = (gains[epsilon, name] for name in (batches.BASE, batches.CHOICE))
        assert choice[-1] / choice[0] < base[-1] / base[0]  # needs large batches less
        assert all(a > b for a, b in zip(choice, base, strict=True))
    assert [line.split("|")[3].strip() for line in batches.table(found).splitlines()[2::2]] == [
        "1.00"
    ] * len(batches.EPSILONS)
