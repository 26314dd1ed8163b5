"""Evidence for a reviewer: the files of a run, checked against each other and computed again."""

from corrnoise.evidence.findings import Finding, Verdict
from corrnoise.evidence.questions import Answer, checklist, checklist_text
from corrnoise.evidence.verification import runs, verify

__all__ = ["Answer", "Finding", "Verdict", "checklist", "checklist_text", "runs", "verify"]
