"""The privacy statement of a run."""

from __future__ import annotations

from corrnoise.noise.exact import ExactNoise
from corrnoise.records import Statement
from corrnoise.records.statement import STOCK
from corrnoise.torch.setup import Setup
from corrnoise.torch.without_noise import is_private


def statement(run: Setup, *, steps_taken: int, epsilon: float, delta: float) -> Statement:
    """The privacy statement of a run.

    Args:
        run: that has begun.
        steps_taken: how many steps were released.
        epsilon: of these steps.
        delta: δ.
    """
    if not is_private(run.plan.calibration):
        raise ValueError(
            "noise_multiplier must be above 0 for a privacy statement, got 0: the run is not "
            "private, ε = ∞; train with noise, or leave the statement out"
        )
    found = Statement.of(
        run.plan,
        clip_norm=run.step.sums.clip_norm,
        steps_taken=steps_taken,
        epsilon=epsilon,
        delta=delta,
        noise_source=None if run.noise else STOCK,
        key_fingerprint=run.key.fingerprint,
        run_id=run.header["run_id"],
        publishes=run.header["publishes"],
        num_parameters=run.step.sums.placement.num_parameters if run.noise else None,
        exact_release=isinstance(run.noise, ExactNoise),
    )
    # A part of a certified run is priced by a bound that holds with certainty.
    part = run.plan.calibration.kind == "certified" and epsilon != run.plan.epsilon
    return found.as_bound() if part else found
