import math

import mpmath
import oracles
import pytest

from corrnoise.accounting import gaussian

EPSILONS = [1e-3, 1e-2, 0.1, 1, 9, 30, 100]
DELTAS = [0.5, 0.1, 1e-2, 1e-5, 1e-10, 1e-50, 1e-100, 1e-300]


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", DELTAS)
def test_inverses_against_high_precision_and_on_the_private_side(epsilon, delta):
    mu = gaussian.mu(epsilon, delta)
    truth = oracles.gaussian_delta(epsilon, mu)
    assert truth <= mpmath.mpf(delta)
    assert float(1 - truth / mpmath.mpf(delta)) < 1e-8
    assert gaussian.delta(epsilon, mu) == pytest.approx(float(truth), rel=1e-10, abs=1e-310)
    back = gaussian.epsilon(delta, mu)
    assert oracles.gaussian_delta(back, mu) <= mpmath.mpf(delta)
    assert back == pytest.approx(epsilon, rel=1e-8)


@pytest.mark.parametrize(("epsilon", "mu"), [(0, 1e-8), (0, 3), (1, 1e-3), (2000, 60), (0.1, 40)])
def test_delta_at_the_ends(epsilon, mu):
    assert gaussian.delta(epsilon, mu) == pytest.approx(
        float(oracles.gaussian_delta(epsilon, mu)), rel=1e-10, abs=1e-310
    )


def test_known_values():
    assert math.sqrt(10) / gaussian.mu(9, 1e-5) == pytest.approx(1.7226, abs=5e-5)
    assert gaussian.epsilon(0.5, 0.1) == 0.0  # δ(0) is already below
    assert gaussian.noise_multiplier(9, 1e-5, 2.0) == pytest.approx(2 / gaussian.mu(9, 1e-5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian.mu(0, 1e-5), "epsilon must be a finite number above 0, got 0"),
        (lambda: gaussian.mu(math.nan, 1e-5), "epsilon must be"),
        (lambda: gaussian.mu(1, 0), "delta must be strictly between 0 and 1, got 0"),
        (lambda: gaussian.mu(1, 1.0), "delta must be strictly between"),
        (lambda: gaussian.epsilon(1e-5, math.inf), "mu must be a finite number"),
        (lambda: gaussian.delta(-1, 1), "epsilon must be a finite number at least 0"),
        (lambda: gaussian.noise_multiplier(1, 1e-5, 0), "sensitivity must be"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
