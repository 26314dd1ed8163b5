"""The random draws of a certificate: how many, from which seed, at which failure probability."""

from __future__ import annotations

from dataclasses import dataclass

from corrnoise import _checks as checks
from corrnoise import _progress
from corrnoise._progress import Progress
from corrnoise.accounting.balls_in_bins import Estimate

MOST_ATTEMPTS = 30
# The attempt of an account that takes no draws.
NO_ATTEMPT = -1
# The limits of the number of draws; with the largest one a certificate takes minutes.
_LEAST_SAMPLES, _MOST_SAMPLES = 1_000, 100_000_000


@dataclass(frozen=True)
class Draws:
    """How many draws to take, from which seed, at which failure probability.

    Attributes:
        failure_probability: that of the whole certificate.
        samples: the number of draws; ``None`` to choose it from the number of bins.
        seed: their seed.
        progress: called during a certificate.
        attempt: the confirmation whose draws ``certified_delta`` takes, or ``NO_ATTEMPT``.
        enough: a δ below which ``certified_delta`` looks for no smaller one; 0 except to verify.
    """

    failure_probability: float
    samples: int | None
    seed: int
    progress: Progress | None
    attempt: int = 1
    enough: float = 0.0

    @staticmethod
    def checked(
        failure_probability: float,
        samples: int | None,
        seed: int,
        progress: Progress | bool | None,
    ) -> Draws:
        """Validate the arguments and build the settings, or raise a ``ValueError``."""
        return Draws(
            checks.probability("failure_probability", failure_probability),
            None if samples is None else check_samples(samples),
            checks.integer("seed", seed, 0),
            _progress.resolve(progress),
        )

    @staticmethod
    def repeating(recorded: Estimate, delta: float, progress: Progress | None) -> Draws:
        """The draws of a certificate that was recorded, to repeat it at its noise, ε and δ."""
        if recorded.seed is None:
            raise ValueError("seed must be recorded to repeat the draws of a certificate, got none")
        return Draws(
            2.0 * recorded.failure_probability,
            recorded.samples,
            recorded.seed,
            progress,
            max(recorded.attempt, 1),
            delta,
        )


def check_samples(samples: object) -> int:
    """Return ``samples`` as a number of draws, or raise."""
    found = checks.integer("samples", samples, _LEAST_SAMPLES)
    return checks.integer("samples", found, _LEAST_SAMPLES, _MOST_SAMPLES)
