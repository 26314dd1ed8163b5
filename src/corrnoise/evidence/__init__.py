"""Verification for reviewers: the files of a run are compared, and their numbers recomputed."""

from corrnoise.evidence.findings import Finding, Verdict
from corrnoise.evidence.questions import Answer, checklist, checklist_text
from corrnoise.evidence.verification import runs, verify

__all__ = ["Answer", "Finding", "Verdict", "checklist", "checklist_text", "runs", "verify"]
