"""What a run promises, and everything that the promise assumes, as one value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from corrnoise.accounting import gaussian, poisson
from corrnoise.accounting.balls_in_bins import Estimate
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.mechanisms.mechanism import from_dict as mechanism_from_dict
from corrnoise.participation import Participation

Sampling = Literal["fixed", "balls-in-bins", "poisson", "cyclic-poisson"]

SAMPLINGS: tuple[Sampling, ...] = ("fixed", "balls-in-bins", "poisson", "cyclic-poisson")


@dataclass(frozen=True)
class Calibration:
    """What a run promises: noise, ε and δ, and everything that the promise assumes.

    The unit of privacy is one example; neighbouring datasets differ by adding or removing one.

    Attributes:
        mechanism: the factorization.
        participation: n, b, k.
        sampling: how examples come to steps.
        noise_multiplier: the standard deviation of Z over the clip norm.
        epsilon: ε.
        delta: δ.
        kind: "exact"; "bound" (proven, but perhaps not tight); or "certified" (proven up to
            ``failure_probability`` over the accountant's own random draws).
        failure_probability: 0 unless certified.
        epsilon_without_sampling: for balls-in-bins, an ε that holds at this noise with certainty.
        estimate: for balls-in-bins, the estimate of δ(ε) behind the certificate.
    """

    mechanism: Mechanism | DenseMechanism
    participation: Participation
    sampling: Sampling
    noise_multiplier: float
    epsilon: float
    delta: float
    kind: Literal["exact", "bound", "certified"]
    failure_probability: float = 0.0
    epsilon_without_sampling: float | None = None
    estimate: Estimate | None = None
    unit: str = field(default="example", init=False)
    neighbours: str = field(default="add or remove one example", init=False)

    @property
    def exact(self) -> bool:
        """Whether ε and δ are the exact cost of this noise."""
        return self.kind == "exact"

    @property
    def mu(self) -> float:
        """The μ of Gaussian DP, sensitivity/σ, which composes by adding squares. Fixed batches."""
        if self.sampling != "fixed":
            raise ValueError(
                f"mu is defined for sampling='fixed', got {self.sampling!r}; an amplified run is "
                "not a Gaussian mechanism"
            )
        return self.mechanism.sensitivity(self.participation).value / self.noise_multiplier

    @property
    def rho(self) -> float:
        """The ρ = μ²/2 of zero-concentrated DP. Fixed batches."""
        return gaussian.zcdp_rho(self.mu)

    def event(self) -> Any:
        """The run as a ``dp_accounting`` event, to compose with other releases."""
        if self.sampling == "fixed":
            import dp_accounting

            return dp_accounting.GaussianDpEvent(1.0 / self.mu)
        if self.sampling == "balls-in-bins":
            raise ValueError(
                "sampling='balls-in-bins' has no dp_accounting event; compose its (ε, δ), or use "
                "the event of sampling='fixed' with the same noise, which is weaker but valid"
            )
        return poisson.event(
            cast(Mechanism, self.mechanism), self.participation, self.noise_multiplier
        )

    def rmse(self) -> float:
        """The error of the calibrated run, per unit of clip norm: σ·‖B‖_F/√n."""
        return self.noise_multiplier * self.mechanism.decoder_rms

    def to_dict(self) -> dict[str, Any]:
        """What a reviewer needs, as plain values: with it the promise can be priced again."""
        return {
            "mechanism": self.mechanism.to_dict(),
            **self.participation.to_dict(),
            "sampling": self.sampling,
            "noise_multiplier": self.noise_multiplier,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "kind": self.kind,
            "failure_probability": self.failure_probability,
            "epsilon_without_sampling": self.epsilon_without_sampling,
            "estimate": asdict(self.estimate) if self.estimate else None,
            "unit": self.unit,
            "neighbours": self.neighbours,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Calibration:
        """The inverse of ``to_dict``."""
        given: dict[str, Any] = dict(data)
        del given["unit"], given["neighbours"]
        steps = ("num_steps", "min_sep", "max_participations")
        given["participation"] = Participation(*(given.pop(name) for name in steps))
        given["mechanism"] = mechanism_from_dict(data["mechanism"])
        given["estimate"] = Estimate(**data["estimate"]) if data["estimate"] else None
        return Calibration(**given)

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        how = self.kind
        if self.kind == "certified":
            how += f" but for probability {self.failure_probability:g}"
        return (
            f"Calibration(noise_multiplier={self.noise_multiplier:.5g}, "
            f"epsilon={self.epsilon:.5g}, delta={self.delta:.3g}, "
            f"sampling={self.sampling!r}, {how})"
        )
