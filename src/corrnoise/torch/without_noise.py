"""A run without noise, to debug a training loop: it is not private, and says so."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from corrnoise import _checks as checks
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation
from corrnoise.samplings import Calibration, Sampling


@dataclass(frozen=True, repr=False)
class NotPrivate(Calibration):
    """A calibration with no noise and ε = ∞.

    The batches, the clipping and the checks are those of a private run with the same arguments. It
    has no JSON that a plan can be read from: such a run cannot be planned on another machine.
    """

    def __post_init__(self) -> None:
        self.participation.check_steps(self.mechanism.num_steps, "mechanism")

    def spent(self, steps_taken: int, **options: Any) -> float:
        """∞, as soon as there is a step."""
        n = self.participation.num_steps
        return math.inf if checks.integer("steps_taken", steps_taken, 0, n) else 0.0

    @property
    def assurance(self) -> str:
        """What kind of number ε is, in a few words."""
        return "not private"

    def __repr__(self) -> str:
        return "NotPrivate(noise_multiplier=0, epsilon=inf)"


def not_private(
    mechanism: Mechanism, participation: Participation, sampling: Sampling, delta: float
) -> NotPrivate:
    """The calibration of a run with ``noise_multiplier=0``, with a warning."""
    warnings.warn(
        "noise_multiplier=0 adds no noise: the run is not private, ε = ∞; use it to debug alone",
        stacklevel=4,
    )
    return NotPrivate(mechanism, participation, sampling, 0.0, math.inf, delta, "exact")


def is_private(calibration: Calibration) -> bool:
    """Whether a run has noise."""
    return not isinstance(calibration, NotPrivate)
