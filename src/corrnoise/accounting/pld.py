r"""Steps with Poisson sampling, priced by Google's ``dp_accounting`` (its PLD accountant).

A run of ``count`` steps that each take an example with probability q and add Gaussian noise of
standard deviation σ times what one example can change. The accountant rounds privacy losses up:
what it says is an upper bound, with no sampling.
"""

from __future__ import annotations

from typing import Any

from corrnoise import _extras

# Coarser than the library's default, and faster for it. Its rounding stays pessimistic, and
# connecting the dots keeps the loss small.
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
