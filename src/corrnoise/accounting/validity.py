"""Which samplings have a valid analysis for a mechanism, and why the others do not."""

from __future__ import annotations

import numpy as np

from corrnoise import checks
from corrnoise.accounting import poisson
from corrnoise.accounting.guarantee import SAMPLINGS, Sampling
from corrnoise.mechanisms import DenseMechanism, Mechanism
from corrnoise.participation import Participation

# A coefficient this far below 0 is the rounding of an FFT, not a sign.
_ROUNDING = 1e-12


def valid_samplings(
    mechanism: Mechanism | DenseMechanism, participation: Participation
) -> dict[Sampling, str]:
    """For each sampling, why it has no valid analysis for this mechanism; "" where it has one."""
    n, b, k = participation.num_steps, participation.min_sep, participation.max_participations
    dense = isinstance(mechanism, DenseMechanism)
    coef = mechanism.strategy if isinstance(mechanism, DenseMechanism) else mechanism.strategy_coef
    reasons: dict[Sampling, str] = dict.fromkeys(SAMPLINGS, "")
    if float(np.min(coef)) < -_ROUNDING * float(np.max(np.abs(coef))):
        reasons["balls-in-bins"] = f"C has negative entries (down to {float(np.min(coef)):.3g})"
    elif k != -(-n // b):
        reasons["balls-in-bins"] = (
            f"every bin is used {-(-n // b)} times in {n} steps, but max_participations is {k}"
        )
    bands = n if isinstance(mechanism, DenseMechanism) else poisson.strategy_bands(mechanism)
    if dense or bands > 1:
        reasons["poisson"] = "C correlates the noise of different steps"
    if dense or bands > b:
        reasons["cyclic-poisson"] = f"C has {bands} bands, more than min_sep={b}"
    return reasons


def require(
    mechanism: Mechanism | DenseMechanism, participation: Participation, sampling: Sampling
) -> None:
    """Raise unless this sampling has a valid analysis for this mechanism."""
    checks.choice("sampling", sampling, SAMPLINGS)
    reasons = valid_samplings(mechanism, participation)
    if reasons[sampling]:
        valid = ", ".join(name for name, reason in reasons.items() if not reason)
        raise ValueError(
            f"sampling={sampling!r} cannot be priced for {mechanism!r}: {reasons[sampling]}; "
            f"valid here: {valid}"
        )
