"""A plan: everything that a training run has to know, and what it was chosen from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from corrnoise import checks
from corrnoise.accounting import Calibration, Sampling
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.noise.filters import Filter
from corrnoise.noise.scheme import Scheme, choose
from corrnoise.noise.stream import check_rounds
from corrnoise.participation import Participation


@dataclass(frozen=True)
class Alternative:
    """One mechanism that a plan looked at.

    Attributes:
        label: family, size and what it was tuned for.
        name: the family.
        num_bands: p; ``None`` for families that have no bands.
        noise_multiplier: that the budget asks for; ``None`` where the sampling has no analysis.
        error: expected, per unit of clip norm, at that noise.
        kind: what the noise is: "exact", "bound" or "certified" as in ``Calibration``, or
            "estimate", which promises nothing and only ranks.
        scheme: how its past noise is kept within the memory of the plan.
        step_cost: time of its noise in a step, relative to independent noise (DP-SGD).
        reason: why it cannot be chosen; "" where it can.
    """

    label: str
    name: str
    num_bands: int | None
    noise_multiplier: float | None
    error: float | None
    kind: Literal["exact", "bound", "certified", "estimate"] | None
    scheme: Scheme | None
    step_cost: float | None
    reason: str = ""

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Alternative:
        """The inverse of ``dataclasses.asdict``."""
        given: dict[str, Any] = dict(data)
        if given["scheme"]:
            given["scheme"] = Scheme(**given["scheme"])
        return Alternative(**given)


@dataclass(frozen=True)
class Plan:
    """A mechanism, its calibrated noise, and the run that they are for.

    ``Plan(num_examples=…, batch_size=…, calibration=…)`` is enough; ``corrnoise.plan`` fills in the
    rest. It turns into JSON and back to the last bit.

    Attributes:
        num_examples: size of the dataset.
        batch_size: as declared; with ``num_examples`` it gives b, the steps of an epoch.
        calibration: mechanism, participation, sampling, noise, ε and δ, and how they are proven.
        lower_bound: no factorization can have a smaller ``error`` at this budget and sampling
            (``corrnoise.planning.least_error``); ``None`` where no bound is known.
        alternatives: all that was looked at, least error first, the chosen one among them.
        num_parameters: of the model, if known.
        memory: model-sized float32 vectors that the noise may keep, as in ``CorrelatedNoise``.
        rounds: of ChaCha.
    """

    num_examples: int
    batch_size: int
    calibration: Calibration
    lower_bound: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    num_parameters: int | None = None
    memory: float = 0
    rounds: int = 20

    def __post_init__(self) -> None:
        checks.integer("num_examples", self.num_examples, 1)
        checks.integer("batch_size", self.batch_size, 1, self.num_examples, "at most num_examples")
        if self.num_parameters is not None:
            checks.integer("num_parameters", self.num_parameters, 1)
        checks.number("memory", self.memory, 0.0)
        check_rounds(self.rounds)

    @property
    def mechanism(self) -> Mechanism | DenseMechanism:
        """The factorization, with the float32 coefficients that run."""
        return self.calibration.mechanism

    @property
    def participation(self) -> Participation:
        """n, b, k."""
        return self.calibration.participation

    @property
    def sampling(self) -> Sampling:
        """How examples come to steps."""
        return self.calibration.sampling

    @property
    def num_steps(self) -> int:
        """Number of steps, n."""
        return self.participation.num_steps

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of Z over the clip norm."""
        return self.calibration.noise_multiplier

    @property
    def normaliser(self) -> int:
        """The expected batch size, ⌊num_examples/b⌋: what sums of gradients are divided by."""
        return self.num_examples // self.participation.min_sep

    @property
    def epsilon(self) -> float:
        """The ε of the whole run."""
        return self.calibration.epsilon

    @property
    def delta(self) -> float:
        """The δ of the whole run."""
        return self.calibration.delta

    @property
    def error(self) -> float:
        """Root mean squared error that the noise leaves in the iterates, per unit of clip norm."""
        return self.calibration.rmse()

    @property
    def efficiency(self) -> float | None:
        """``lower_bound / error``, at most 1; ``None`` where no bound is known."""
        return None if self.lower_bound is None else self.lower_bound / self.error

    @property
    def scheme(self) -> Scheme:
        """How past noise is kept: the fastest way within ``memory``."""
        return choose(Filter.of(self.mechanism), self.memory, self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; "error", "efficiency" and "scheme" are there to be read."""
        return {
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            "error": self.error,
            "lower_bound": self.lower_bound,
            "efficiency": self.efficiency,
            "scheme": asdict(self.scheme),
            "num_parameters": self.num_parameters,
            "memory": self.memory,
            "rounds": self.rounds,
            "calibration": self.calibration.to_dict(),
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_dict``."""
        given = {f.name: data[f.name] for f in fields(Plan)}
        given["calibration"] = Calibration.from_dict(data["calibration"])
        given["alternatives"] = tuple(map(Alternative.from_dict, data["alternatives"]))
        return Plan(**given)

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of ``to_json``: an equal plan, to the last bit."""
        return Plan.from_dict(json.loads(text))

    def __repr__(self) -> str:
        return (
            f"Plan({self.mechanism!r}, num_examples={self.num_examples}, "
            f"batch_size={self.batch_size}, {self.calibration!r}, error={self.error:.4g})"
        )

    def __str__(self) -> str:
        return "\n".join([self.summary, *self._table()])

    @property
    def summary(self) -> str:
        """What the plan promises and costs, in five lines."""
        c, scheme = self.calibration, self.scheme
        how = c.kind
        if c.kind == "certified":
            how += f" but for probability {c.failure_probability:g}"
        k, b = self.participation.max_participations, self.participation.min_sep
        kept = scheme.num_vectors
        state = f"{kept} model-sized vectors kept" if kept else "no state"
        if kept and self.num_parameters:
            state += f" ({scheme.state_bytes(self.num_parameters) / 2**20:,.1f} MiB)"
        lines = [
            f"mechanism   {self.mechanism!r}",
            f"privacy     ({c.epsilon:g}, {c.delta:g})-DP, {how}; unit: one {c.unit}, "
            f"{c.neighbours}",
            f"sampling    {c.sampling}: {self.num_steps} steps, each example at most {k} times, "
            f"{b} steps apart; batches of {self.batch_size} from {self.num_examples:,}",
            f"noise       multiplier {c.noise_multiplier:.5g}; {scheme.kind}, "
            f"{scheme.draws_per_step:g} draws a step, {state}",
            f"error       {self.error:.4g} per unit of clip norm",
        ]
        if self.lower_bound is not None:
            lines[-1] += f"; no factorization can be below {self.lower_bound:.4g} here"
        return "\n".join(lines)

    def _table(self) -> list[str]:
        if not self.alternatives:
            return []
        lines = ["", f"{'alternatives':<32} {'error':>9} {'noise':>9}  {'kind':<9} {'time':>6}"]
        for a in self.alternatives:
            if a.error is None or a.noise_multiplier is None or a.step_cost is None:
                lines.append(f"{a.label:<32} {'':>9} {'':>9}  {'':<9} {'':>6}  {a.reason}")
            else:
                lines.append(
                    f"{a.label:<32} {a.error:>9.4g} {a.noise_multiplier:>9.4g}  {a.kind:<9} "
                    f"{a.step_cost:>6.1f}  {a.reason}".rstrip()
                )
        return lines
