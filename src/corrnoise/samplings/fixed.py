"""Fixed batches: the dataset is cut once into b parts, and step i takes part i mod b."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from corrnoise import _extras
from corrnoise.accounting import gaussian
from corrnoise.bounds import lower_bound
from corrnoise.mechanisms import Mechanism
from corrnoise.noise import Key
from corrnoise.participation import Participation
from corrnoise.samplings.batches import Batches, Indices, random_words
from corrnoise.samplings.calibration import Calibration
from corrnoise.samplings.sampling import Array, Sampling, by_batch
from corrnoise.workloads import Workload


@dataclass(frozen=True)
class Fixed(Sampling):
    r"""Fixed batches, priced by the analytic Gaussian mechanism on the sensitivity of C.

    It is valid for every mechanism and participation. ε is exact if the sensitivity is exact, and a
    bound otherwise.

    ``least_error``: let L be the lower bound on the rmse of every factorization
    (``corrnoise.bounds``). An example may be in any part j. Its presence changes N(0, σ²) into
    N(CU_j, σ²), so (ε, δ)-DP requires ‖CU_j‖ ≤ μ(ε, δ)·σ for all j, and the error is at least
    L/μ(ε, δ).
    """

    name: ClassVar[str] = "fixed"
    sentence: ClassVar[str] = (
        "fixed batches: the dataset is cut once into b parts, which are visited in turn"
    )
    accountant: ClassVar[str] = "analytic Gaussian mechanism on the sensitivity of C"
    secret: ClassVar[bool] = False
    partial_epoch: ClassVar[bool] = True
    by_sensitivity: ClassVar[bool] = True
    about_least_error: ClassVar[str] = (
        "It holds for fixed batches; with amplification by sampling the error can be lower."
    )

    def objection(self, mechanism: Mechanism, participation: Participation) -> str:
        """There is none: the analysis covers every order with separation b."""
        return ""

    def takes_part(self, mechanism: Mechanism, participation: Participation) -> str:
        """At most k times, at least b steps apart: what the sensitivity assumes."""
        return participation.words

    def kind(self, mechanism: Mechanism, participation: Participation) -> Literal["exact", "bound"]:
        """Exact where the sensitivity is exact, else a bound."""
        return "exact" if mechanism.sensitivity(participation).exact else "bound"

    def delta(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        epsilon: float,
        num_steps: int,
    ) -> float:
        """δ(ε) of the Gaussian mechanism with the sensitivity of the first steps."""
        sens = _sensitivity(mechanism, participation, num_steps)
        return gaussian.delta(epsilon, sens / noise_multiplier)

    def epsilon(
        self,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        delta: float,
        num_steps: int,
    ) -> float:
        """The inverse of ``delta``."""
        if delta >= 1.0:  # the δ of far too little noise at a given ε
            return 0.0
        sens = _sensitivity(mechanism, participation, num_steps)
        return gaussian.epsilon(delta, sens / noise_multiplier)

    def noise(
        self, mechanism: Mechanism, participation: Participation, epsilon: float, delta: float
    ) -> float:
        """σ of the Gaussian mechanism."""
        sens = mechanism.sensitivity(participation).value
        return gaussian.noise_multiplier(epsilon, delta, sens)

    def least_error(
        self, workload: Workload, participation: Participation, epsilon: float, delta: float
    ) -> float:
        """The error that no factorization can beat."""
        return lower_bound(workload, participation) / gaussian.mu(epsilon, delta)

    def event(self, calibration: Calibration) -> Any:
        """The run as a Gaussian event."""
        return _extras.load("dp_accounting").GaussianDpEvent(1.0 / calibration.mu)

    def log_ratio(
        self,
        mechanism: Mechanism,
        participation: Participation,
        precision: Array,
        outputs: Array,
        taken: npt.NDArray[np.bool_],
        means: Array | None = None,
    ) -> Array:
        """The log-likelihood ratio given the example's part, which is public."""
        ratios = by_batch(participation, precision, outputs, means)
        part = np.argmax(taken[: participation.min_sep], axis=0)
        return ratios[part, np.arange(outputs.shape[1])]

    def batches(
        self,
        num_examples: int,
        participation: Participation,
        mechanism: Mechanism,
        key: Key,
        *,
        shuffled: bool = False,
    ) -> Batches:
        """Equal parts of the dataset's order, or of one random order, the same in every epoch."""
        b, times = participation.min_sep, -(-participation.num_steps // participation.min_sep)
        if participation.max_participations < times:
            raise ValueError(
                f"max_participations must be at least {times} for fixed batches, which use every "
                f"example {times} times in {participation.num_steps} steps, got "
                f"{participation.max_participations}; plan for {times} participations"
            )
        if b > num_examples:
            raise ValueError(
                f"min_sep must be at most num_examples={num_examples} for fixed batches, "
                f"got {b}; use larger batches"
            )
        order: Indices = np.arange(num_examples)
        if shuffled:
            order = np.argsort(random_words(key, num_examples), kind="stable")
        parts = np.array_split(order, b)
        return Batches(num_examples, participation, lambda step: parts[step % b])


def _sensitivity(mechanism: Mechanism, participation: Participation, num_steps: int) -> float:
    """The sensitivity of the first ``num_steps`` steps."""
    if num_steps == participation.num_steps:
        return mechanism.sensitivity(participation).value
    b = participation.min_sep
    k = min(participation.max_participations, -(-num_steps // b))
    part = Participation(num_steps, min(b, num_steps), k)
    return mechanism.first(num_steps).sensitivity(part).value


FIXED = Fixed()
