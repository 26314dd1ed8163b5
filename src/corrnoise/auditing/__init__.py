"""Audits: a lower bound on ε from what a run of canaries released."""

from corrnoise.auditing.audit import Audit
from corrnoise.auditing.bounds import Counts, epsilon_lower_bound
from corrnoise.auditing.judging import Canaries, judge

__all__ = ["Audit", "Canaries", "Counts", "epsilon_lower_bound", "judge"]
