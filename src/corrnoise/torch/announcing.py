"""What a noise multiplier costs here, said when a run starts.

A noise multiplier does not carry over from Opacus. With independent noise and Poisson batches it
prices one step; with correlated noise it is the scale of noise whose sensitivity counts an example
in all its steps, and the same number is far less private.
"""

from __future__ import annotations

import logging
import math
import warnings

from corrnoise import mechanisms, samplings
from corrnoise._rounding import rounded_up
from corrnoise.samplings import Calibration

_LOG = logging.getLogger(__name__)
# An ε beyond this is worth a warning, and so is one this many times that of DP-SGD.
_LARGE, _TIMES = 10.0, 2.0


def announce(found: Calibration) -> None:
    """Say the ε of a run with this noise, as a warning where users of Opacus do not expect it."""
    epsilon = f"ε = {rounded_up(found.epsilon, 3)} at δ = {rounded_up(found.delta, 3)}"
    noise = f"noise_multiplier={found.noise_multiplier:g}"
    _LOG.info("%s with %s: %s", noise, found.mechanism, epsilon)
    if found.mechanism.independent:
        return
    try:
        usual = _of_dp_sgd(found)
        beside = f", where DP-SGD with Poisson batches has ε = {rounded_up(usual, 3)}"
    except ModuleNotFoundError:  # the library that prices Poisson batches
        usual, beside = math.inf, ""
    if found.epsilon <= _LARGE and found.epsilon <= _TIMES * usual:
        return
    warnings.warn(
        f"{noise} is {epsilon} with {found.mechanism} and {found.sampling.name} batches{beside}: a "
        "noise multiplier does not carry over from Opacus; use make_private_with_epsilon, or "
        "mechanism='dp_sgd'",
        stacklevel=6,
    )


def _of_dp_sgd(found: Calibration) -> float:
    """The ε of DP-SGD with Poisson batches at the same noise, number of steps and δ."""
    part = found.participation
    plain = mechanisms.get("dp_sgd").build(found.mechanism.workload, part, None)
    sampling = samplings.POISSON
    return sampling.epsilon(plain, part, found.noise_multiplier, found.delta, part.num_steps)


def announce_delta(delta: float, num_examples: int) -> None:
    """Warn where a release that publishes an example at random would have such a δ."""
    if delta * num_examples >= 1.0:
        warnings.warn(
            f"target_delta={delta:g} is not below 1/{num_examples:,}, one over the number of "
            "examples: a release that publishes an example at random has such a delta; lower it",
            stacklevel=4,
        )
