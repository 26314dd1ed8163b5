"""What a run costs in privacy: from (ε, δ) to noise and back, and whether that is exact."""

from corrnoise.accounting.calibration import (
    account,
    calibrate,
    epsilon_of,
    estimate_noise,
)
from corrnoise.accounting.guarantee import SAMPLINGS, Calibration, Sampling
from corrnoise.accounting.validity import valid_samplings

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
