"""A report on a plan or a run: one HTML file that opens from disk and loads nothing."""

from corrnoise.report.page import html, read, write

__all__ = ["html", "read", "write"]
