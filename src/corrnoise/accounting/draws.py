"""The random draws of a certificate: how many, from which seed, at which failure probability."""

from __future__ import annotations

from dataclasses import dataclass

from corrnoise import _checks as checks
from corrnoise import _progress
from corrnoise._progress import Progress
from corrnoise.accounting.balls_in_bins import Estimate

MOST_ATTEMPTS = 30
# The value of ``attempt`` for a computation that uses no random draws.
NO_ATTEMPT = -1
# The limits of the number of draws; with the largest one a certificate takes minutes.
_LEAST_SAMPLES, _MOST_SAMPLES = 1_000, 100_000_000


@dataclass(frozen=True)
class Draws:
    """Settings of a certificate: the number of random draws, their seed, the failure probability.

    The same settings give the same certificate, up to rounding. ``Sampling.calibrate`` and
    ``Sampling.account`` take them.

    Attributes:
        failure_probability: the failure probability of the whole certificate.
        samples: the number of draws; ``None`` to choose it from the number of bins.
        seed: the seed of the draws.
        progress: called with (draws done, total draws) during a certificate.
        attempt: the confirmation whose draws ``certified_delta`` uses, or ``NO_ATTEMPT``.
        enough: ``certified_delta`` computes no δ below this; 0 except for verification.

    >>> Draws.checked(1e-9, samples=50_000, seed=0, progress=None).samples
    50000
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
        """The settings that repeat a recorded certificate at its noise, ε and δ."""
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
