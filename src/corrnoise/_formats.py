"""Format versions of everything that is written to disk, and the rule for reading them.

Each kind of file carries an integer ``format``. It is raised when a field changes its meaning, its
name or its type, or when a reader needs a field that older files do not have; a new field that
readers may ignore does not raise it. A reader accepts exactly the versions that are listed for its
kind. It refuses every other version, newer or older, with an error that names the running version
of corrnoise. So a privacy claim is never read from a file whose meaning is uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corrnoise._version import __version__

# The version that is written, for each kind of file.
FORMATS = {"plan": 1, "run": 1, "statement": 1, "ledger": 1, "noise state": 1}


def stamped(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a file of this kind, with its format version in front.

    >>> stamped("plan", {"num_examples": 100})
    {'format': 1, 'num_examples': 100}
    """
    return {"format": FORMATS[kind], **fields}


def opened(kind: str, data: Any) -> dict[str, Any]:
    """The fields of a file of this kind, without its format version.

    Raises:
        ValueError: ``data`` is not a mapping, or this version does not read its format.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"a {kind} must be a JSON object, got {type(data).__name__}")
    fields: dict[str, Any] = dict(data)
    found = fields.pop("format", None)
    if found != FORMATS[kind] or isinstance(found, bool):
        raise ValueError(
            f"the format of a {kind} must be {FORMATS[kind]}, which corrnoise {__version__} reads, "
            f"got {found!r}; read it with the version that wrote it"
        )
    return fields
