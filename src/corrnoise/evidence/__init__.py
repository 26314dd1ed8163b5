"""Evidence for a reviewer: the files of a run, checked against each other and computed again."""

from corrnoise.evidence.findings import Finding, Verdict
from corrnoise.evidence.verification import verify

__all__ = ["Finding", "Verdict", "verify"]
