"""Differentially private training with correlated noise: the same guarantee, far less error."""

from corrnoise import (
    accounting,
    bounds,
    mechanisms,
    noise,
    planning,
    records,
    samplings,
    workloads,
)
from corrnoise._version import __version__
from corrnoise.bounds import lower_bound
from corrnoise.mechanisms import Mechanism
from corrnoise.participation import Participation
from corrnoise.planning import Plan, plan
from corrnoise.samplings import Calibration, account, calibrate
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

__all__ = [
    "Calibration",
    "Mechanism",
    "Participation",
    "Plan",
    "Sensitivity",
    "Workload",
    "__version__",
    "account",
    "accounting",
    "bounds",
    "calibrate",
    "lower_bound",
    "mechanisms",
    "noise",
    "plan",
    "planning",
    "records",
    "samplings",
    "workloads",
]
