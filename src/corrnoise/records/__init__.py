"""Records of a run: the ledger of released steps, the privacy statement, the training record."""

from corrnoise.records.ledger import Ledger, read_entries
from corrnoise.records.run import Record, Run
from corrnoise.records.statement import Statement

__all__ = ["Ledger", "Record", "Run", "Statement", "read_entries"]
