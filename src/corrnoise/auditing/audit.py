"""The result of an audit: a claim, a lower bound, and how the bound was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from corrnoise._rounding import counted, rounded_down, rounded_up
from corrnoise.auditing.bounds import Counts


@dataclass(frozen=True)
class Audit:
    """The result of an audit: a lower bound on ε from canaries, beside the claimed ε.

    With probability ``confidence`` the lower bound is at most the engine's true ε at ``delta``. So
    a bound above the claim refutes the claim at this confidence; a bound below it proves nothing.

    Attributes:
        claim: the claimed ε, at ``delta``.
        lower_bound: the lower bound on ε, at ``delta``.
        delta: δ of both.
        confidence: the probability, over noise, batches and coins, that the bound is at most ε.
        num_canaries: the number of canaries, in or out.
        statistic: the name of the statistic that the guesses used.
        guess: whether the counted guess was "in" or "out".
        counts: the counted guesses, from which the bound is computed.
        mechanism: the mechanism, in words.
        sampling: the name of the sampling.
        num_steps: n.
        noise_multiplier: σ.
    """

    claim: float
    lower_bound: float
    delta: float
    confidence: float
    num_canaries: int
    statistic: str
    guess: Literal["in", "out"]
    counts: Counts
    mechanism: str
    sampling: str
    num_steps: int
    noise_multiplier: float

    @property
    def violated(self) -> bool:
        """Whether the lower bound is above the claim."""
        return self.lower_bound > self.claim

    @property
    def ratio(self) -> float:
        """The bound over the claim: near 1 the audit is tight, above 1 the claim is violated."""
        return self.lower_bound / self.claim if self.claim > 0.0 else float(self.lower_bound > 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "violated": self.violated}

    def to_text(self) -> str:
        """The result in a few lines of text."""
        c = self.counts
        words = "MORE than claimed" if self.violated else "no more than claimed"
        return (
            f"claim        ε = {rounded_up(self.claim)} at δ = {rounded_up(self.delta, 3)}\n"
            f"lower bound  ε ≥ {rounded_down(self.lower_bound)} at the same δ, with confidence "
            f"{self.confidence:g}: {words}\n"
            f"mechanism    {self.mechanism}, noise multiplier {rounded_up(self.noise_multiplier)}, "
            f"{self.sampling}, {counted(self.num_steps, 'step')}\n"
            f"canaries     {self.num_canaries:,}, each in a direction of its own, in or out by a "
            "fair coin\n"
            f"guesses      “{self.guess}” by {self.statistic}: {c.hits:,} of {c.trials:,} right, "
            f"{c.alarms:,} of {c.others:,} wrong\n"
        )
