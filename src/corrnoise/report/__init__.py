"""A report on a plan or on runs: one HTML file that opens from disk and loads no other file.

``kit`` draws and knows nothing about plans, ``evidence`` collects the numbers, and the other
modules are the sections of the page.
"""

from corrnoise import _extras

try:
    from corrnoise.report.page import html, read, write
except ModuleNotFoundError as missing:
    raise _extras.explained(missing) from None

__all__ = ["html", "read", "write"]
