"""What a run costs in privacy: from (ε, δ) to noise and back, and whether that is exact."""

from corrnoise.accounting.calibration import (
    SAMPLINGS,
    Calibration,
    Sampling,
    account,
    calibrate,
    epsilon_of,
    valid_samplings,
)

__all__ = [
    "SAMPLINGS",
    "Calibration",
    "Sampling",
    "account",
    "calibrate",
    "epsilon_of",
    "valid_samplings",
]
