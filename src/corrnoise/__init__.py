"""Differentially private training with correlated noise: the same guarantee, far less error."""

from corrnoise import bounds, mechanisms, noise, workloads
from corrnoise.bounds import lower_bound
from corrnoise.participation import Participation
from corrnoise.sensitivity import Sensitivity
from corrnoise.workloads import Workload

__all__ = [
    "Participation",
    "Sensitivity",
    "Workload",
    "bounds",
    "lower_bound",
    "mechanisms",
    "noise",
    "workloads",
]
