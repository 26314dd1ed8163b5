"""From a dataset and a budget to the mechanism and the noise of a run."""

from corrnoise.planning.planner import participation, plan
from corrnoise.planning.plans import Alternative, Plan

__all__ = ["Alternative", "Plan", "participation", "plan"]
