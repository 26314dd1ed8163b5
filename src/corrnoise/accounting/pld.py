r"""Steps with Poisson sampling, priced by Google's ``dp_accounting`` (its PLD accountant).

A run has ``count`` steps; each takes an example with probability q and adds Gaussian noise of
standard deviation σ times the sensitivity to one example. The accountant rounds privacy losses up:
its results are upper bounds, with no random draws.
"""

from __future__ import annotations

from typing import Any

from corrnoise import _extras

# Coarser than the library's default, and therefore faster. The rounding remains pessimistic, and
# the library's connect-the-dots method keeps the loss small.
_INTERVAL = 1e-3


def event(probability: float, noise_multiplier: float, count: int) -> Any:
    """The run as a ``dp_accounting`` event, to price or to compose with others."""
    dp_accounting = _extras.load("dp_accounting")
    step = dp_accounting.PoissonSampledDpEvent(
        sampling_probability=probability, event=dp_accounting.GaussianDpEvent(noise_multiplier)
    )
    return dp_accounting.SelfComposedDpEvent(step, count)


def delta(happened: Any, epsilon: float) -> float:
    """An upper bound of δ(ε)."""
    return float(_accountant(happened).get_delta(epsilon))


def epsilon(happened: Any, delta: float) -> float:
    """An upper bound of ε(δ)."""
    return float(_accountant(happened).get_epsilon(delta))


def _accountant(happened: Any) -> Any:
    pld = _extras.load("dp_accounting.pld")
    return pld.PLDAccountant(value_discretization_interval=_INTERVAL).compose(happened)
