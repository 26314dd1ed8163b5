"""A plan: everything that a training run needs to know, and the alternatives considered."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

from corrnoise import _checks as checks
from corrnoise import _formats, _tables
from corrnoise._progress import Progress
from corrnoise._rounding import counted, rounded_down, rounded_up
from corrnoise.mechanisms import Mechanism
from corrnoise.noise import Key, Scheme
from corrnoise.noise.filtering.filters import Filter
from corrnoise.noise.filtering.scheme import choose
from corrnoise.noise.generator.stream import check_rounds
from corrnoise.participation import Participation
from corrnoise.samplings import Batches, Calibration, Sampling
from corrnoise.samplings import get as get_sampling

_KINDS = ("exact", "bound", "certified", "estimate")
_SCHEMES = ("regenerate", "lookahead", "ring", "recursion")
# Fields of the JSON that follow from the others and are not read.
_READERS_ONLY = ("error", "efficiency", "scheme")


@dataclass(frozen=True)
class Alternative:
    """One mechanism that the planner considered.

    Attributes:
        label: family, size and what it was tuned for.
        name: the name of the family.
        num_bands: p; ``None`` for families that have no bands.
        sampling: the name of the sampling.
        noise_multiplier: the noise that the budget needs; ``None`` if there is no analysis.
        error: the root mean squared error at that noise, per unit of clip norm.
        kind: "exact", "bound" or "certified" as in ``Calibration``, or "estimate", which guarantees
            nothing and is only for ranking.
        scheme: how its past noise is stored within the memory of the plan.
        step_cost: the time of its noise in a step, relative to independent noise (DP-SGD).
        reason: why it cannot be chosen; "" if it can.
    """

    label: str
    name: str
    num_bands: int | None
    sampling: str
    noise_multiplier: float | None = None
    error: float | None = None
    kind: Literal["exact", "bound", "certified", "estimate"] | None = None
    scheme: Scheme | None = None
    step_cost: float | None = None
    reason: str = ""

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Alternative:
        """The inverse of ``dataclasses.asdict``; a ``ValueError`` names what is wrong."""
        given = checks.fields("alternative", data, (f.name for f in fields(Alternative)))
        for name in ("label", "name", "sampling", "reason"):
            checks.text(f"{name} of an alternative", given[name])
        if given["num_bands"] is not None:
            checks.integer("num_bands", given["num_bands"], 1)
        for name in ("noise_multiplier", "error", "step_cost"):
            if given[name] is not None:
                checks.number(f"{name} of an alternative", given[name], 0.0)
        if given["kind"] is not None:
            checks.choice("kind of an alternative", given["kind"], _KINDS)
        if given["scheme"] is not None:
            given["scheme"] = _scheme(given["scheme"])
        return Alternative(**given)


@dataclass(frozen=True)
class Plan:
    """A mechanism, its calibrated noise, and the run that they are for.

    ``corrnoise.plan`` makes one; ``Plan(num_examples=…, batch_size=…, calibration=…)`` makes one by
    hand. It states the privacy of the run, exact, as a bound or certified (``calibration.kind``). A
    plan that was read from a file is a claim until ``verified`` has computed it again. Conversion
    to JSON and back is exact to the last bit.

    Attributes:
        num_examples: size of the dataset.
        batch_size: the batch size as declared; with ``num_examples`` it gives b, the steps of an
            epoch.
        calibration: mechanism, participation, sampling, noise, ε and δ, and how they are proven.
        lower_bound: no factorization has a smaller ``error`` at this budget and sampling
            (``Sampling.least_error``); ``None`` if no bound is known.
        alternatives: all mechanisms considered, least error first, including the chosen one.
        choice: the index of the chosen one in ``alternatives``; ``None`` if there are none.
        num_parameters: the size of the model, if known.
        memory: model-sized float32 vectors that the noise may keep, as in ``CorrelatedNoise``.
        rounds: the number of ChaCha rounds.
        advice: what would lower the error most, in words; "" if nothing is known.
    """

    num_examples: int
    batch_size: int
    calibration: Calibration
    lower_bound: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    choice: int | None = None
    num_parameters: int | None = None
    memory: float = 0
    rounds: int = 20
    advice: str = ""

    def __post_init__(self) -> None:
        checks.integer("num_examples", self.num_examples, 1)
        checks.integer("batch_size", self.batch_size, 1, self.num_examples, "at most num_examples")
        if self.num_parameters is not None:
            checks.integer("num_parameters", self.num_parameters, 1)
        if self.lower_bound is not None:
            checks.number("lower_bound", self.lower_bound, 0.0)
        if self.choice is not None:
            checks.integer("choice", self.choice, 0, len(self.alternatives) - 1)
        checks.number("memory", self.memory, 0.0)
        checks.text("advice", self.advice)
        check_rounds(self.rounds)

    @property
    def mechanism(self) -> Mechanism:
        """The factorization, with the float32 coefficients that are run."""
        return self.calibration.mechanism

    @property
    def participation(self) -> Participation:
        """n, b, k."""
        return self.calibration.participation

    @property
    def sampling(self) -> Sampling:
        """How batches are drawn."""
        return self.calibration.sampling

    @property
    def num_steps(self) -> int:
        """Number of steps, n."""
        return self.participation.num_steps

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of z over the clip norm."""
        return self.calibration.noise_multiplier

    @property
    def expected_batch(self) -> float:
        """The expected number of examples in a batch: num_examples/b for most samplings."""
        return float(self.num_examples * self.sampling.rate(self.participation))

    @property
    def divisor(self) -> int:
        """The divisor of gradient sums: ``expected_batch``, rounded down, at least 1."""
        return max(1, math.floor(self.num_examples * self.sampling.rate(self.participation)))

    def batches(self, key: Key, *, shuffled: bool = False) -> Batches:
        """The batches that the plan was priced for, drawn from a key; see ``Sampling.batches``."""
        return self.sampling.batches(
            self.num_examples, self.participation, self.mechanism, key, shuffled=shuffled
        )

    @property
    def chosen(self) -> Alternative | None:
        """The alternative that was chosen; ``None`` for a plan without alternatives."""
        return None if self.choice is None else self.alternatives[self.choice]

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
        """The root mean squared error of the iterates by the noise, per unit of clip norm."""
        return self.calibration.error

    @property
    def efficiency(self) -> float | None:
        """``lower_bound / error``, at most 1; ``None`` where no bound is known."""
        return None if self.lower_bound is None else self.lower_bound / self.error

    @property
    def scheme(self) -> Scheme:
        """How past noise is stored: the fastest scheme within ``memory``."""
        return choose(Filter.of(self.mechanism), self.memory, self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; "error", "efficiency" and "scheme" are for readers only."""
        fields = {
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
            "choice": self.choice,
            "advice": self.advice,
        }
        return _formats.stamped("plan", fields)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """The inverse of ``to_dict``.

        Every field is validated; the fields for readers only are ignored. Whether the noise gives
        the stated ε is not computed here: ``verified`` does, and an engine calls it.

        Raises:
            ValueError: a field is missing, unknown or wrong; the message names it.
        """
        names = [f.name for f in fields(Plan)]
        given = checks.fields("plan", _formats.opened("plan", data), names, _READERS_ONLY)
        given["calibration"] = Calibration.from_dict(given["calibration"])
        considered = checks.listed("alternatives", given["alternatives"])
        given["alternatives"] = tuple(map(Alternative.from_dict, considered))
        return Plan(**{name: given[name] for name in names})

    def verified(self, progress: Progress | bool | None = None) -> Plan:
        """Return this plan if its noise gives the ε that it states, by computing δ again.

        Exact values and bounds take milliseconds. A certificate is repeated with the seed and the
        number of draws that the plan records, which takes as long as the certificate did. A plan
        that this process made needs no draws.

        Args:
            progress: True for a bar on the terminal, or a function of (done, total).

        Raises:
            ValueError: the plan guarantees less than it states; the message says what and where.

        >>> import corrnoise as cn
        >>> text = cn.plan(num_examples=100, batch_size=10, epochs=2, epsilon=4, delta=1e-6,
        ...                sampling="fixed", mechanisms=["dp_sgd"]).to_json()
        >>> cn.Plan.from_json(text).verified().epsilon
        4.0
        >>> edited = cn.Plan.from_json(text.replace('"epsilon": 4.0', '"epsilon": 0.5'))
        >>> edited.verified()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: epsilon must be what noise_multiplier=1.68789 gives at delta=1e-06, ...
        """
        from corrnoise.planning.verification import verify

        verify(self, progress)
        return self

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    @staticmethod
    def from_json(text: str) -> Plan:
        """The inverse of ``to_json``: an equal plan, to the last bit."""
        return Plan.from_dict(checks.parsed("plan", text))

    def __repr__(self) -> str:
        return (
            f"Plan({self.mechanism!r}, num_examples={self.num_examples}, "
            f"batch_size={self.batch_size}, {self.calibration!r}, error={self.error:.4g})"
        )

    def __str__(self) -> str:
        table = self.table()
        return f"{self.summary}\n\n{table}" if table else self.summary

    @property
    def summary(self) -> str:
        """The plan's guarantee, its cost, and the advice, in a few lines."""
        c, scheme = self.calibration, self.scheme
        kept = scheme.num_vectors
        state = f"{counted(kept, 'model-sized vector')} kept" if kept else "no state"
        draws = "draw" if scheme.draws_per_step == 1 else "draws"
        if kept and self.num_parameters:
            state += f" ({scheme.state_bytes(self.num_parameters) / 2**20:,.1f} MiB)"
        budget = f"({rounded_up(c.epsilon)}, {rounded_up(c.delta, 3)})"
        lines = [
            f"mechanism   {self.mechanism!r}",
            f"privacy     {budget}-DP, {c.assurance}; unit: one {c.unit}, {c.neighbours}",
            f"sampling    {c.sampling}: {counted(self.num_steps, 'step')}, each example "
            f"{c.sampling.takes_part(c.mechanism, c.participation)}; {self.expected_batch:.4g} of "
            f"{self.num_examples:,} examples expected in a batch",
            f"noise       multiplier {rounded_up(c.noise_multiplier)}; {scheme.kind}, "
            f"{scheme.draws_per_step:g} {draws} a step, {state}",
            f"error       {self.error:.4g} per unit of clip norm",
        ]
        if self.lower_bound is not None:
            lines[-1] += f"; no factorization can be below {rounded_down(self.lower_bound)} here"
        if self.advice:
            lines.append(f"advice      {self.advice}")
        return "\n".join(lines)

    @property
    def shown(self) -> tuple[Alternative, ...]:
        """The alternatives of the table: the best of each sampling, and all of the chosen one."""
        own = self.sampling.name
        best: dict[str, Alternative] = {}
        for each in sorted(self.alternatives, key=lambda a: (bool(a.reason), a.error is None)):
            best.setdefault(each.sampling, each)
        return tuple(
            each
            for each in self.alternatives
            if each.sampling == own or each is best[each.sampling]
        )

    def table(self) -> str:
        """The alternatives considered, as a table; "" if there were none."""
        if not self.alternatives:
            return ""
        columns = ["alternatives", "sampling", "error", "noise", "kind", "vectors", "time", ""]
        rows = [
            [
                a.label + (" (chosen)" if a is self.chosen else ""),
                a.sampling,
                "" if a.error is None else f"{a.error:.4g}",
                "" if a.noise_multiplier is None else rounded_up(a.noise_multiplier, 4),
                a.kind or "",
                "" if a.scheme is None else str(a.scheme.num_vectors),
                "" if a.step_cost is None else f"{a.step_cost:.1f}",
                a.reason,
            ]
            for a in self.shown
        ]
        lines = [_tables.text(columns, rows, left=(0, 1, 4, 7))]
        names = {a.sampling: None for a in self.alternatives}
        secret = [name for name in names if get_sampling(name).secret]
        if secret:
            lines.append(f"Batches must be random and secret with {', '.join(secret)}.")
        return "\n".join(lines)


def _scheme(data: object) -> Scheme:
    """A scheme from JSON, field by field."""
    given = checks.fields("scheme", data, (f.name for f in fields(Scheme)))
    return Scheme(
        kind=cast(Any, checks.choice("kind of a scheme", given["kind"], _SCHEMES)),
        num_vectors=checks.integer("num_vectors", given["num_vectors"], 0),
        draws_per_step=checks.number("draws_per_step", given["draws_per_step"], 0.0),
        lookahead=checks.integer("lookahead", given["lookahead"], 1),
    )
