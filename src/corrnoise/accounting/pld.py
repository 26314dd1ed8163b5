r"""Steps with Poisson sampling, priced by Google's ``dp_accounting`` (its PLD accountant).

A run has ``count`` steps; each takes an example with probability q and adds Gaussian noise of
standard deviation σ times the sensitivity to one example. The accountant rounds privacy losses up:
its results are upper bounds, with no random draws.
"""

from __future__ import annotations

import math
from typing import Any

from corrnoise import _extras
from corrnoise.accounting import gaussian

# The width of the grid of privacy losses: coarser than the library's default, and therefore
# faster. The rounding remains pessimistic, and the library's connect-the-dots method keeps the loss
# small.
_INTERVAL = 1e-3
# Little noise has large losses: the grid of one step, and that of the run, have at most about this
# many points. A wider grid is an upper bound too; its width is far below the ε of such noise.
_STEP_POINTS, _RUN_POINTS = 2.0**17, 2.0**21
# How far the losses of a step, and the number of steps that take an example, lie from their means.
_DEVIATIONS = 8.0
# Below this noise the library's exponentials overflow; sampling does not help there.
_LEAST_NOISE = 1e-2


def event(probability: float, noise_multiplier: float, count: int) -> Any:
    """The run as a ``dp_accounting`` event, to price or to compose with others."""
    dp_accounting = _extras.load("dp_accounting")
    step = dp_accounting.PoissonSampledDpEvent(
        sampling_probability=probability, event=dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(step, count)


def delta(happened: Any, epsilon: float) -> float:
    """An upper bound of δ(ε)."""
    plain = gaussian.delta(epsilon, _mu(happened))
    if _noise(happened) < _LEAST_NOISE:
        return plain
    return min(plain, float(_accountant(happened).get_delta(epsilon)))


def epsilon(happened: Any, delta: float) -> float:
    """An upper bound of ε(δ)."""
    plain = gaussian.epsilon(delta, _mu(happened))
    if _noise(happened) < _LEAST_NOISE:
        return plain
    return min(plain, float(_accountant(happened).get_epsilon(delta)))


def _noise(happened: Any) -> float:
    return float(happened.event.event.noise_multiplier)


def _mu(happened: Any) -> float:
    """The μ of a run that takes the example in every step, which costs no less."""
    return math.sqrt(happened.count) / _noise(happened)


def _accountant(happened: Any) -> Any:
    pld = _extras.load("dp_accounting.pld")
    return pld.PLDAccountant(value_discretization_interval=_interval(happened)).compose(happened)


def _interval(happened: Any) -> float:
    """The width of the grid: by the losses of a step that takes the example, and of the run."""
    sigma, times = _noise(happened), happened.count * happened.event.sampling_probability
    step = 0.5 / sigma**2 + _DEVIATIONS / sigma
    run = step * (times + _DEVIATIONS * math.sqrt(times) + _DEVIATIONS)
    return max(_INTERVAL, step / _STEP_POINTS, run / _RUN_POINTS)
