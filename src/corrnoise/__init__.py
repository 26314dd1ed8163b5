"""Differentially private training with correlated noise: the same guarantee, far less error."""

from corrnoise import accounting, bounds, mechanisms, noise, planning, sampling, workloads
from corrnoise.accounting import Calibration, account, calibrate, epsilon_of
from corrnoise.bounds import lower_bound
from corrnoise.participation import Participation
from corrnoise.planning import Plan, amplified_band_inv_mf, plan
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

__all__ = [
    "Calibration",
    "Participation",
    "Plan",
    "Sensitivity",
    "Workload",
    "account",
    "accounting",
    "amplified_band_inv_mf",
    "bounds",
    "calibrate",
    "epsilon_of",
    "lower_bound",
    "mechanisms",
    "noise",
    "plan",
    "planning",
    "sampling",
    "workloads",
]
