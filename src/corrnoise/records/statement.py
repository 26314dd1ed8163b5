"""The privacy statement of a run, on one page, which a reviewer can read and recompute."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from corrnoise import _checks as checks
from corrnoise import _formats
from corrnoise._rounding import rounded_down, rounded_up
from corrnoise._version import __version__
from corrnoise.noise.generator.normals import LARGEST_RADIUS, truncation
from corrnoise.planning import Plan

# The text for normals that come from the user's own generator.
STOCK = "torch.normal, not cryptographic; nor are the batches, unless a key was given"
# If the truncation of the normals adds more than this fraction of δ, the stated δ includes it.
_SMALL = 1e-3


@dataclass(frozen=True)
class Statement:
    """The privacy statement of a run, or of a plan without a run, as text or JSON.

    Attributes:
        epsilon: ε of what was released so far, at ``delta``.
        delta: δ; it includes ``truncation`` unless that is below 1e-3 of it.
        planned_epsilon: ε of the whole run. Quote it if the decision to stop depended on results.
        kind: "exact", "bound" or "certified", as in ``Calibration``.
        failure_probability: the failure probability of the certificate; 0 unless certified.
        steps_taken: the number of released steps; for a plan, all of its steps.
        clip_norm: the largest norm of one example's gradient; ``None`` for a plan without a run.
        noise_multiplier: the standard deviation of z over the clip norm.
        expected_batch: the expected number of examples in a batch.
        divisor: the divisor of the sums of gradients.
        publishes: what leaves the process: every step, or only checkpoints.
        participation: how often one example takes part, in words.
        min_sep: b of the plan. How often an example takes part is in ``participation``.
        max_participations: k of the plan, likewise.
        sensitivity: the sensitivity of the strategy matrix for b and k, exact or an upper bound.
        by_sensitivity: whether ε follows from the sensitivity.
        versions: the versions of the software that computed the numbers.
        num_parameters: the length of the noise; ``None`` if it is unknown, or if the normals are
            not those of the stream.
        truncation: the most that the truncation of the normals adds to δ, (1 + e^ε)·τ as in
            ``docs/noise-stream.md``; ``None`` without truncation.
        exact_release: whether sums and releases had no rounding, as in secure mode.

    >>> import corrnoise as cn
    >>> plan = cn.plan(num_examples=1000, batch_size=100, epochs=2, epsilon=4, delta=1e-6,
    ...                sampling="fixed", mechanisms="dp_sgd")
    >>> stated = Statement.of(plan)
    >>> stated.kind, stated.epsilon, stated.steps_taken
    ('exact', 4.0, 20)
    """

    epsilon: float
    delta: float
    planned_epsilon: float
    kind: str
    failure_probability: float
    epsilon_without_sampling: float | None
    unit: str
    neighbours: str
    mechanism: str
    num_steps: int
    steps_taken: int
    participation: str
    min_sep: int
    max_participations: int
    num_examples: int
    expected_batch: float
    divisor: int
    sampling: str
    accountant: str
    clip_norm: float | None
    noise_multiplier: float
    sensitivity: float
    sensitivity_exact: bool
    by_sensitivity: bool
    noise_source: str
    key_fingerprint: str | None
    run_id: str | None
    publishes: str
    versions: dict[str, str]
    num_parameters: int | None = None
    truncation: float | None = None
    exact_release: bool = False

    @staticmethod
    def of(
        plan: Plan,
        *,
        clip_norm: float | None = None,
        steps_taken: int | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_source: str | None = None,
        key_fingerprint: str | None = None,
        run_id: str | None = None,
        publishes: str = "steps",
        num_parameters: int | None = None,
        exact_release: bool = False,
    ) -> Statement:
        """The statement of a plan, or of a run of it that took some steps.

        Args:
            plan: the plan.
            clip_norm: C of the run; ``None`` for the statement of the plan itself.
            steps_taken: the number of released steps; all steps by default.
            epsilon: the ε that these steps spent; the whole run's by default.
            delta: the δ of ``epsilon``; the plan's by default.
            noise_source: the source of the normals in words; the plan's stream by default.
            key_fingerprint: the fingerprint of the key.
            run_id: the id of the run.
            publishes: what releases steps: "steps" (each by itself) or only "checkpoints".
            num_parameters: the size of the model, if the normals are those of the stream.
            exact_release: whether the run was in secure mode.
        """
        what, part = plan.calibration, plan.participation
        found = plan.mechanism.sensitivity(part)
        epsilon = what.epsilon if epsilon is None else epsilon
        delta = what.delta if delta is None else delta
        beyond = None
        if num_parameters is not None and not exact_release:
            largest = max(epsilon, what.epsilon)
            beyond = _remainder(largest, part.num_steps, num_parameters)
            if beyond > _SMALL * delta:
                delta = min(1.0, math.nextafter(delta + beyond, math.inf))
        return Statement(
            epsilon=epsilon,
            delta=delta,
            planned_epsilon=what.epsilon,
            kind=what.kind,
            failure_probability=what.failure_probability,
            epsilon_without_sampling=what.epsilon_without_sampling,
            unit=what.unit,
            neighbours=what.neighbours,
            mechanism=repr(plan.mechanism),
            num_steps=part.num_steps,
            steps_taken=part.num_steps if steps_taken is None else steps_taken,
            min_sep=part.min_sep,
            max_participations=part.max_participations,
            num_examples=plan.num_examples,
            expected_batch=plan.expected_batch,
            divisor=plan.divisor,
            sampling=what.sampling.sentence,
            accountant=what.sampling.accountant,
            clip_norm=clip_norm,
            noise_multiplier=what.noise_multiplier,
            sensitivity=found.value,
            sensitivity_exact=found.exact,
            noise_source=noise_source or stream(plan.rounds, exact=exact_release),
            key_fingerprint=key_fingerprint,
            run_id=run_id,
            publishes=publishes,
            versions=versions(),
            num_parameters=num_parameters,
            truncation=beyond,
            exact_release=exact_release,
            participation=what.sampling.takes_part(plan.mechanism, part),
            by_sensitivity=what.sampling.by_sensitivity,
        )

    def as_bound(self) -> Statement:
        """The same statement with the kind "bound", for an ε that needs no random draws."""
        return replace(self, kind="bound", failure_probability=0.0, epsilon_without_sampling=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return _formats.stamped("statement", asdict(self))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Statement:
        """The inverse of ``to_dict``; what it states is not computed again.

        Raises:
            ValueError: a field is missing, unknown or of a wrong type; the message names it.
        """
        given = checks.of_type("statement", _formats.opened("statement", data), Statement)
        checks.choice("kind of a statement", given["kind"], ("exact", "bound", "certified"))
        return Statement(**given)

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    @property
    def headline(self) -> str:
        """The guarantee in one sentence, its ε and δ rounded up."""
        what = "Training by this plan" if self.clip_norm is None else "This training"
        budget = f"({rounded_up(self.epsilon)}, {rounded_up(self.delta, 3)})"
        return f"{what} is {budget}-differentially private."

    @property
    def assurance(self) -> str:
        """Whether ε is exact, a bound or certified, in words."""
        return {
            "exact": "exact",
            "bound": "a proven upper bound",
            "certified": "an upper bound, certified by sampling; it fails with probability at "
            f"most {self.failure_probability:g}",
        }[self.kind]

    @property
    def caveats(self) -> str:
        """What the guarantee assumes, and what it does not cover."""
        exact = "arithmetic without rounding"
        if self.exact_release:
            exact = "a float64 logarithm, root and tangent within a relative 2^-44"
        elif self.truncation is None:
            exact += " and untruncated normals"
        return (
            f"It assumes {exact}, gradients of an example that do not depend on the others in its "
            "physical batch, a key that nobody else has, and a number of steps that was not chosen "
            "by looking at the results (else quote the whole run). It does not cover other uses of "
            "the data, such as a search for hyperparameters."
        )

    def rows(self) -> list[tuple[str, str]]:
        """The facts that the guarantee depends on, as pairs of a name and a value."""
        course = [
            ("Steps", f"{self.steps_taken} of {self.num_steps} released"),
            ("Whole run", f"ε = {rounded_up(self.planned_epsilon)} at the plan's δ"),
        ]
        if self.clip_norm is None:
            course = [("Steps", f"{self.num_steps}, none released yet")]
        rows = [
            ("Unit", f"one {self.unit}; neighbouring datasets: {self.neighbours}"),
            ("ε is", self.assurance),
            *course,
            ("Participation", self.participation),
            ("Sampling", self.sampling),
            (
                "Dataset",
                f"{self.num_examples:,} examples, {self.expected_batch:.4g} expected in a batch; "
                f"sums of gradients are divided by {self.divisor}",
            ),
            ("Mechanism", self.mechanism),
            ("Sensitivity of C", self._sensitivity),
            ("Clip norm", "left to the run" if self.clip_norm is None else f"{self.clip_norm:g}"),
            ("Noise", f"standard deviation {rounded_up(self.noise_multiplier, 6)} × clip norm"),
            ("Noise source", self.noise_source),
            ("Accountant", self.accountant),
        ]
        if self.exact_release:
            rows.append(
                (
                    "Arithmetic",
                    "exact: clipped gradients are rounded toward zero and summed as integers; the "
                    "release is the correctly rounded value of the continuous mechanism",
                )
            )
        if self.truncation is not None:
            included = ", which includes it" if self.truncation > _SMALL * self.delta else ""
            rows.append(
                (
                    "Normals",
                    f"untruncated to {rounded_down(LARGEST_RADIUS, 3)} standard deviations; what "
                    f"lies beyond adds at most {rounded_up(self.truncation, 2)} to δ{included}",
                )
            )
        if self.epsilon_without_sampling is not None:
            surely = rounded_up(self.epsilon_without_sampling)
            rows.append(("With certainty", f"ε = {surely} for the whole run"))
        if self.key_fingerprint:
            rows.append(("Key", f"fingerprint {self.key_fingerprint}"))
        if self.publishes == "checkpoints":
            rows.append(
                (
                    "Published",
                    "checkpoints alone; logs, metrics and weights of steps that a crash lost must "
                    "not leave the process",
                )
            )
        if self.run_id:
            rows.append(("Run", self.run_id))
        rows.append(("Versions", ", ".join(f"{k} {v}" for k, v in self.versions.items())))
        return [(name, value) for name, value in rows if value]

    @property
    def _sensitivity(self) -> str:
        """The sensitivity in words; "" if ε does not follow from it."""
        if not self.by_sensitivity:
            return ""
        kind = "exact" if self.sensitivity_exact else "upper bound"
        return f"{rounded_up(self.sensitivity, 6)}, {kind}"

    def to_text(self) -> str:
        """The statement as one page of text."""
        import textwrap  # deferred for a quick import

        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        body = "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
        return f"{self.headline}\n\n{body}\n\n{textwrap.fill(self.caveats, 88)}\n"


def stream(rounds: int, *, exact: bool = False) -> str:
    """Where the normals of a plan come from, in words."""
    how = "real normals by Box-Muller, rounded once" if exact else "Box-Muller"
    return f"ChaCha{rounds} keystream, {how}"


def _remainder(epsilon: float, num_steps: int, num_parameters: int) -> float:
    """The most that the truncation of the normals adds to δ: (1 + e^ε)·τ."""
    tau = truncation(num_steps, num_parameters)
    return min(1.0, (1.0 + math.exp(min(epsilon, 500.0))) * tau * (1.0 + 1e-15))


def versions() -> dict[str, str]:
    """The versions of Python, corrnoise and the imported libraries."""
    import platform  # deferred for a quick import
    from importlib import metadata

    found = {"python": platform.python_version(), "corrnoise": __version__}
    for name in ("numpy", "scipy", "torch", "opacus", "jax", "jaxlib", "dp_accounting"):
        if name in sys.modules:
            try:
                found[name] = metadata.version(name.replace("_", "-"))
            except metadata.PackageNotFoundError:
                found[name] = getattr(sys.modules[name], "__version__", "unknown")
    return found
