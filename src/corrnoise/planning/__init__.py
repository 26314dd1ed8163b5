"""From a dataset and a budget to the mechanism, the noise and the promise of a run."""

from corrnoise.planning.amplified import amplified_band_inv_mf
from corrnoise.planning.result import Alternative, Plan
from corrnoise.planning.search import participation, plan
from corrnoise.planning.yardstick import least_error

__all__ = [
    "Alternative",
    "Plan",
    "amplified_band_inv_mf",
    "least_error",
    "participation",
    "plan",
]
