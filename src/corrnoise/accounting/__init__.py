"""What a run costs in privacy: from (ε, δ) to noise and back, and whether that is exact."""

from corrnoise.accounting.calibration import (
    account,
    calibrate,
    epsilon_of,
    estimate_noise,
    valid_samplings,
)
from corrnoise.accounting.guarantee import SAMPLINGS, Calibration, Sampling

__all__ = [
    "SAMPLINGS",
    "Calibration",
    "Sampling",
    "account",
    "calibrate",
    "epsilon_of",
    "estimate_noise",
    "valid_samplings",
]
