"""Planning: choose the mechanism, the sampling and the noise for a dataset and a budget."""

from corrnoise.planning.planner import participation, plan
from corrnoise.planning.plans import Alternative, Plan

__all__ = ["Alternative", "Plan", "participation", "plan"]
