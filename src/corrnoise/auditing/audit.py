"""The result of an audit: a claim, a lower bound, and how the bound was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from corrnoise._rounding import counted, rounded_down, rounded_up
from corrnoise.auditing.bounds import Counts


@dataclass(frozen=True)
class Audit:
    """What the canaries of a run show about its ε.

    Attributes:
        claim: the ε that was claimed, at ``delta``.
        lower_bound: the ε that the outputs show, with this ``confidence``.
        delta: δ of both.
        confidence: the probability, over noise, batches and coins, that the bound is below ε.
        num_canaries: examples whose gradients were canaries, in or out.
        statistic: what the guesses were made from.
        guess: whether the counted guess was "in" or "out".
        counts: of the canaries that the bound was computed from.
        mechanism: in words.
        sampling: its name.
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
        """Whether the outputs show more than what was claimed."""
        return self.lower_bound > self.claim

    @property
    def ratio(self) -> float:
        """The bound over the claim; 1 is a tight audit, and more is a violation."""
        return self.lower_bound / self.claim if self.claim > 0.0 else float(self.lower_bound > 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "violated": self.violated}

    def to_text(self) -> str:
        """A few lines for a person."""
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
