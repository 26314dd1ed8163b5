"""A calibration: noise, ε and δ of a run, and everything that they assume, in one object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from corrnoise import _checks as checks
from corrnoise._progress import Progress
from corrnoise._rounding import rounded_up
from corrnoise._threads import one_blas_thread
from corrnoise.accounting import Draws, Estimate
from corrnoise.accounting.draws import MOST_ATTEMPTS, check_samples
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation

if TYPE_CHECKING:
    from corrnoise.samplings.sampling import Sampling

# The failure probability of a certificate for the first steps of a run whose own ε needs none.
_FAILURE_PROBABILITY = 1e-9
_KINDS = ("exact", "bound", "certified")
_STEPS = ("num_steps", "min_sep", "max_participations")


@dataclass(frozen=True)
class Calibration:
    """The privacy cost of a run: noise, ε and δ, and everything that they assume.

    With this noise the run is (ε, δ)-DP: for all sets S of outputs and neighbouring datasets,
    P(S) ≤ e^ε·Q(S) + δ. The outputs are the noisy gradients of all steps. The batches must be drawn
    as ``sampling`` says.

    The unit of privacy is one example. Neighbouring datasets have the same number of examples, and
    differ in one that is replaced by an empty one, which contributes nothing to any gradient
    (zero-out neighbours). So the number of examples, and with it the steps of an epoch and the
    divisor of the sums, are public.

    Attributes:
        mechanism: the factorization.
        participation: n, b, k.
        sampling: how batches are drawn.
        noise_multiplier: the standard deviation of z over the clip norm.
        epsilon: ε.
        delta: δ.
        kind: "exact"; "bound" (proven, but perhaps not tight); or "certified" (proven up to
            ``failure_probability`` over the accountant's own random draws).
        failure_probability: the failure probability of the certificate; 0 unless certified.
        epsilon_without_sampling: if certified, an ε that holds at this noise with certainty.
        estimate: if certified, the estimate of δ(ε) behind the certificate.

    >>> import corrnoise as cn
    >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(100))
    >>> c = cn.calibrate(m, cn.Participation(100, 10, 10), epsilon=4, delta=1e-6)
    >>> c.kind, c.unit, Calibration.from_dict(c.to_dict()) == c
    ('exact', 'example', True)
    """

    mechanism: Mechanism
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
    neighbours: str = field(
        default="one example against an empty one; the number of examples is public", init=False
    )

    def __post_init__(self) -> None:
        self.participation.check_steps(self.mechanism.num_steps, "mechanism")
        checks.number("noise_multiplier", self.noise_multiplier, 0.0, open_low=True)
        checks.number("epsilon", self.epsilon, 0.0)
        if checks.number("delta", self.delta, 0.0, open_low=True) > 1.0:
            raise ValueError(f"delta must be at most 1, got {self.delta}")
        checks.choice("kind", self.kind, _KINDS)
        if self.epsilon_without_sampling is not None:
            checks.number("epsilon_without_sampling", self.epsilon_without_sampling, 0.0)
        if self.kind == "certified":
            checks.probability("failure_probability", self.failure_probability)
        elif self.failure_probability != 0.0:
            raise ValueError(
                f"failure_probability must be 0 unless kind is 'certified', got "
                f"{checks.quoted(self.failure_probability)} with kind={self.kind!r}"
            )
        if (self.estimate is not None) != (self.kind == "certified"):
            raise ValueError(
                f"estimate must be given if and only if kind is 'certified', got kind="
                f"{self.kind!r} {'with' if self.estimate else 'without'} an estimate"
            )

    @property
    def exact(self) -> bool:
        """Whether ε and δ are the exact cost of this noise."""
        return self.kind == "exact"

    @property
    def error(self) -> float:
        """The root mean squared error of the run per unit of clip norm: σ·‖B‖_F/√n."""
        return self.noise_multiplier * self.mechanism.decoder_rms

    @one_blas_thread()
    def spent(
        self,
        steps_taken: int,
        *,
        samples: int | None = None,
        seed: int = 0,
        progress: Progress | bool | None = None,
    ) -> float:
        """The ε that the first steps spent, at most that of the whole run.

        It is exact, a bound or certified, as the ε of the whole run (``kind``). If certified, it
        uses separate draws and has the same failure probability once more. It is valid if the
        number of steps was not chosen by looking at what the run released; a run that stops for
        such a reason must state the ε of the whole run.

        Args:
            steps_taken: in [0, num_steps].
            samples: as in ``account``.
            seed: as in ``account``.
            progress: as in ``account``.

        >>> import corrnoise as cn
        >>> part = cn.Participation(980, 98, 10)
        >>> m = cn.mechanisms.dp_sgd(cn.workloads.prefix_sum(980))
        >>> c = cn.calibrate(m, part, epsilon=9, delta=1e-5)
        >>> [round(c.spent(steps), 2) for steps in (0, 98, 490, 980)]
        [0.0, 2.36, 5.94, 9.0]
        """
        n = self.participation.num_steps
        taken = checks.integer("steps_taken", steps_taken, 0, n, "a plan ends with its last step")
        if taken in (0, n):
            return self.epsilon if taken else 0.0
        failure = self.failure_probability or _FAILURE_PROBABILITY
        draws = Draws.checked(failure, samples, seed, progress)
        return min(self.sampling.spent(self, taken, draws), self.epsilon)

    @property
    def mu(self) -> float:
        """The μ of Gaussian DP, sensitivity/σ, which composes by adding squares.

        Raises:
            ValueError: the run is amplified by its sampling, so it is not a Gaussian mechanism.
        """
        if self.sampling.secret:
            raise ValueError(
                f"mu is defined for batches that are not random, got sampling="
                f"{self.sampling.name!r}; an amplified run is not a Gaussian mechanism"
            )
        return self.mechanism.sensitivity(self.participation).value / self.noise_multiplier

    def event(self) -> Any:
        """The run as a ``dp_accounting`` event, to compose with other releases."""
        return self.sampling.event(self)

    @property
    def assurance(self) -> str:
        """Whether ε is exact, a bound or certified, in a few words."""
        if self.kind == "certified":
            return f"certified (failure probability {rounded_up(self.failure_probability, 3)})"
        return self.kind

    def to_dict(self) -> dict[str, Any]:
        """Plain values with everything that a reviewer needs to recompute the privacy cost."""
        return {
            "mechanism": self.mechanism.to_dict(),
            **self.participation.to_dict(),
            "sampling": self.sampling.to_json(),
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
        """The inverse of ``to_dict``.

        Every field is validated, and the sampling must have a valid analysis for the mechanism.
        It does not compute whether the noise gives this ε at this δ; ``Plan.verified`` does.

        Raises:
            ValueError: a field is missing, unknown or wrong; the message names it.
        """
        from corrnoise.samplings.sampling import require

        own = [f.name for f in fields(Calibration) if f.name != "participation"]
        given = checks.fields("calibration", data, (*own, *_STEPS))
        for name in ("unit", "neighbours"):
            expected = Calibration.__dataclass_fields__[name].default
            if given.pop(name) != expected:
                raise ValueError(f"{name} must be {expected!r}, got {checks.quoted(data[name])}")
        given["participation"] = Participation(*(given.pop(name) for name in _STEPS))
        given["mechanism"] = Mechanism.from_dict(given["mechanism"])
        given["sampling"] = _sampling(given["sampling"])
        if given["estimate"] is not None:
            given["estimate"] = _estimate(given["estimate"])
        found = Calibration(**given)
        require(found.sampling, found.mechanism, found.participation)
        return found

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def __repr__(self) -> str:
        return (
            f"Calibration(noise_multiplier={rounded_up(self.noise_multiplier)}, "
            f"epsilon={rounded_up(self.epsilon)}, delta={rounded_up(self.delta, 3)}, "
            f"sampling={self.sampling.name!r}, {self.assurance})"
        )


def _estimate(data: object) -> Estimate:
    """An estimate from JSON, field by field."""
    given = checks.fields("estimate", data, (f.name for f in fields(Estimate)))
    seed = given["seed"]
    return Estimate(
        mean=checks.number("mean", given["mean"], 0.0),
        standard_error=checks.number("standard_error", given["standard_error"], 0.0),
        failure_probability=checks.probability(
            "failure_probability of the estimate", given["failure_probability"]
        ),
        samples=check_samples(given["samples"]),
        largest=checks.number("largest", given["largest"], 0.0),
        direction=cast(
            Literal["remove", "add"],
            checks.choice("direction", given["direction"], ("remove", "add")),
        ),
        seed=None if seed is None else checks.integer("seed", seed, 0),
        attempt=checks.integer("attempt", given["attempt"], 0, MOST_ATTEMPTS),
    )


def _sampling(data: object) -> Sampling:
    """A sampling from JSON; its parameters must have the types of their defaults."""
    from corrnoise.samplings.sampling import get

    if not isinstance(data, Mapping):
        return get(checks.text("sampling", data))
    given = cast(Mapping[str, Any], data)
    default = get({"name": given.get("name")})
    usual = asdict(default)
    checks.fields("sampling", given, ("name", *usual))
    for name, value in usual.items():
        if type(given[name]) is not type(value):
            raise ValueError(
                f"{name} of sampling={default.name!r} must be like {value!r}, got "
                f"{checks.quoted(given[name])}"
            )
    return get(given)
