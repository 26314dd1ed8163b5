"""The error of a mechanism under balls-in-bins, estimated from few draws: to search with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from corrnoise import _checks as checks
from corrnoise.accounting import Draws, bins, certificates
from corrnoise.mechanisms.toeplitz import ToeplitzMechanism
from corrnoise.participation import Participation
from corrnoise.workloads import Workload

# The failure probability of the certificate that the noise is estimated for.
_FAILURE_PROBABILITY = 1e-9


@dataclass(frozen=True)
class AmplifiedError:
    """σ·‖B‖_F/√n at the σ that a certificate of balls-in-bins is likely to need.

    It ranks mechanisms and certifies nothing.

    Attributes:
        participation: n, b, k, with every bin used in every round.
        epsilon: ε of the run.
        delta: δ of the run.
        seed: the seed of the draws.
    """

    participation: Participation
    epsilon: float
    delta: float
    seed: int

    @staticmethod
    def checked(
        workload: Workload, participation: Participation, epsilon: float, delta: float, seed: int
    ) -> AmplifiedError:
        """Validate the arguments of a search, or raise a ``ValueError``."""
        participation.check_steps(workload.num_steps, "workload")
        return AmplifiedError(
            participation,
            checks.number("epsilon", epsilon, 0.0, open_low=True),
            checks.probability("delta", delta),
            checks.integer("seed", seed, 0),
        )

    def __call__(self, mechanism: ToeplitzMechanism) -> float:
        """The error; infinite where balls-in-bins has no analysis."""
        try:
            if bins.objection(mechanism.least_entry, self.participation):
                return math.inf
            noise = certificates.estimate_noise(
                mechanism.bins(self.participation.min_sep),
                self.epsilon,
                self.delta,
                Draws.checked(_FAILURE_PROBABILITY, None, self.seed, None),
            )
            return noise * mechanism.decoder_rms
        except OverflowError:
            return math.inf

    def refuse(self, mechanism: ToeplitzMechanism) -> None:
        """Raise with the reason why balls-in-bins has no analysis for this mechanism, if any."""
        reason = bins.objection(mechanism.least_entry, self.participation)
        if reason:
            raise ValueError(f"participation must be valid for balls-in-bins, but {reason}")
