"""Checks of a run's ledger, against its run file and its key."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from corrnoise import _formats
from corrnoise._rounding import rounded_up
from corrnoise.evidence.findings import Findings
from corrnoise.noise import Key
from corrnoise.planning import Plan
from corrnoise.records import Run, read_entries
from corrnoise.records.header import FIELDS, OPTIONAL, planned
from corrnoise.records.ledger import first_wrong_code, read_lines

_LINE = re.compile(rb"\{.*\} [0-9a-f]{32}\n")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_TYPES = {
    "run_id": str,
    "key_fingerprint": str,
    "num_steps": int,
    "settings": dict,
    "publishes": str,
    "plan": str,
}


def check(book: Path, folder: Path, run: Run | None, keys: Sequence[Key], found: Findings) -> None:
    """Check the ledgers of all processes of a run."""
    others = sorted(book.parent.glob(f"{book.name}.rank*"))
    counts: list[int] = []
    for rank, path in enumerate([book, *others]):
        name = path.relative_to(folder).as_posix()
        entries = found.attempt(name, "format, lines and their order", lambda p=path: _entries(p))
        if entries is None:
            return
        counts.append(_released(entries))
        _check_header(name, entries[0], rank, 1 + len(others), run, found)
        _check_codes(name, path, entries[0], keys, found)
    if max(counts) - min(counts) > 1:
        found.differs(book.name, "the same steps on every rank", f"{counts}")
    name = book.relative_to(folder).as_posix()
    if run is not None:
        found.same(name, "steps released", max(counts), run.statement.steps_taken, f"{max(counts)}")


def fingerprints(books: Iterable[Path]) -> set[str]:
    """The fingerprints of the keys that the ledgers name."""
    named: set[str] = set()
    for book in books:
        try:
            named.add(str(read_entries(book)[0].get("key_fingerprint")))
        except (ValueError, IndexError):
            continue
    return named


def _entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a ledger; raises unless its lines are well formed and in order."""
    lines, rest = read_lines(path)
    for number, line in enumerate(lines, start=1):
        if not _LINE.fullmatch(line):
            raise ValueError(f"line {number} must be an entry and a code of 32 hex digits")
    entries = read_entries(path)
    if not entries or rest:
        raise ValueError("a ledger must begin with a header and end with a whole line")
    for number, (line, entry) in enumerate(zip(lines, entries, strict=True), start=1):
        if not line.startswith(json.dumps(entry).encode() + b" "):
            raise ValueError(f"line {number} must be as corrnoise writes it")
    _formats.opened("ledger", entries[0])
    needed = ("corrnoise", "format", *FIELDS)
    missing = [name for name in needed if name not in entries[0]]
    extra = [name for name in entries[0] if name not in (*needed, *OPTIONAL)]
    if missing or extra or entries[0]["corrnoise"] != "ledger":
        raise ValueError(f"the header must have {missing or needed[:3]}, and no {extra}")
    for name, kind in _TYPES.items():
        if type(entries[0][name]) is not kind:
            raise ValueError(f"{name} of the header must be of type {kind.__name__}")
    steps = published = 0
    whole = entries[0]["publishes"] == "checkpoints"
    for number, entry in enumerate(entries[1:], start=2):
        names = tuple(entry)
        if names == ("step", "gradient") and entry["step"] == steps:
            if not isinstance(entry["gradient"], str) or not _DIGEST.fullmatch(entry["gradient"]):
                raise ValueError(f"line {number} must have a digest of 16 hex digits")
            steps += 1
        elif names == ("published",) and whole and published < entry["published"] == steps:
            published = steps
        elif names == ("resumed",) and whole and entry["resumed"] == published:
            steps = published
        else:
            raise ValueError(f"line {number} must be step {steps}, got {entry!r:.60}")
    if steps > entries[0]["num_steps"]:
        raise ValueError(f"{steps} steps were released, more than the plan's")
    return entries


def _released(entries: Sequence[dict[str, Any]]) -> int:
    """How many steps were released, without steps that a resume dropped."""
    steps = 0
    for entry in entries[1:]:
        steps = entry.get("resumed", steps + ("step" in entry))
    return steps


def _check_header(
    name: str, header: dict[str, Any], rank: int, ranks: int, run: Run | None, found: Findings
) -> None:
    """Compare a header with the plan that it carries, and with the run file."""
    plan = found.attempt(name, "the plan in the header", lambda: Plan.from_json(header["plan"]))
    if plan is None:
        return
    if run is not None:
        # Compared as text, with every digit and the fields that readers skip.
        found.same(name, "the plan of the run file", json.loads(header["plan"]), run.plan.to_dict())
    else:
        c = plan.calibration
        detail = f"ε = {rounded_up(c.epsilon)} at δ = {rounded_up(c.delta, 3)}, {c.assurance}"
        copy = dataclasses.replace(plan)
        found.attempt(name, "plan: noise gives ε at δ", copy.verified, detail)
    expected: dict[str, Any] = {
        **planned(plan),
        "rank": rank,
        "world_size": ranks,
    }
    if run is not None:
        own = header["settings"]
        stream = run.statement.num_parameters is not None
        exact = "exact-" if run.statement.exact_release else ""
        expected |= {
            "run_id": run.statement.run_id,
            "key_fingerprint": run.statement.key_fingerprint,
            "max_grad_norm": run.statement.clip_norm,
            "publishes": run.statement.publishes,
            "noise": f"{exact}chacha{plan.rounds}" if stream else "torch",
            "settings": {k: run.settings[k] for k in own if k in run.settings},
        }
        if isinstance(header["max_grad_norm"], list):  # one per layer: C is their Euclidean norm
            norm = sum(float(c) ** 2 for c in header["max_grad_norm"]) ** 0.5
            header = {**header, "max_grad_norm": norm}
    stated = {key: header[key] for key in expected}
    found.same(name, "header: what the plan and the run say", stated, expected, rel=1e-15)


def _check_codes(
    name: str, path: Path, header: dict[str, Any], keys: Sequence[Key], found: Findings
) -> None:
    key = next((k for k in keys if k.fingerprint == header["key_fingerprint"]), None)
    if key is None:
        found.unchecked(
            name,
            "codes of the lines",
            "digests of gradients, data and parameters are only known to be unchanged with --key",
        )
        return
    wrong = first_wrong_code(path, key.subkey("ledger"))
    if wrong is not None:
        found.differs(name, "codes of the lines", f"line {wrong} is not as the run wrote it")
    else:
        found.holds(name, "codes of the lines", "every line is as the run wrote it")
