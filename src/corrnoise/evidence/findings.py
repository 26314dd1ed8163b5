"""The result of a verification: one finding for each check, and a page that lists them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from corrnoise import _checks as checks

# The relative difference that rounding may make between two computations of the same number.
ROUNDING = 1e-9
# The most differences between two values that a finding names.
_MOST_NAMED = 3


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        file: the name of the checked file.
        check: what was checked, in a few words.
        status: "holds", "differs", or "unchecked" where the files at hand do not allow the check.
        detail: the numbers, or what differs, in one line.
    """

    file: str
    check: str
    status: Literal["holds", "differs", "unchecked"]
    detail: str = ""


@dataclass(frozen=True)
class Verdict:
    """The findings of a folder.

    Attributes:
        folder: the folder that was verified.
        findings: the findings, in the order of the checks.
    """

    folder: str
    findings: tuple[Finding, ...]

    @property
    def differences(self) -> tuple[Finding, ...]:
        """The checks that failed."""
        return tuple(each for each in self.findings if each.status == "differs")

    @property
    def holds(self) -> bool:
        """Whether no check failed."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        findings = [asdict(each) for each in self.findings]
        return {"folder": self.folder, "holds": self.holds, "findings": findings}

    def to_text(self) -> str:
        """The findings as one page of text."""
        unseen = sum(each.status == "unchecked" for each in self.findings)
        made, failed = len(self.findings) - unseen, len(self.differences)
        head = f"{self.folder}: " + (
            f"{failed} of {made} checks FAIL" if failed else f"all {made} checks hold"
        )
        head += f"; {unseen} could not be made (unseen)." if unseen else "."
        width = max((len(each.file) for each in self.findings), default=0)
        words = {"holds": "holds ", "differs": "FAILS ", "unchecked": "unseen"}
        lines = [
            f"  {words[each.status]}  {each.file:<{width}}  {each.check}"
            + (f": {each.detail}" if each.detail else "")
            for each in self.findings
        ]
        return "\n".join([head, "", *lines]) + "\n"


@dataclass
class Findings:
    """Collects the findings of a verification."""

    found: list[Finding] = field(default_factory=list[Finding])

    def holds(self, file: str, check: str, detail: str = "") -> None:
        """Record a check that passed."""
        self.found.append(Finding(file, check, "holds", detail))

    def differs(self, file: str, check: str, detail: str) -> None:
        """Record a check that failed."""
        self.found.append(Finding(file, check, "differs", " ".join(detail.split())))

    def unchecked(self, file: str, check: str, detail: str) -> None:
        """Record a check that could not be made, and why."""
        self.found.append(Finding(file, check, "unchecked", detail))

    def same(
        self, file: str, check: str, stated: Any, expected: Any, detail: str = "", rel: float = 0.0
    ) -> None:
        """Check that two plain values are equal, numbers up to a relative difference."""
        different = differences(stated, expected, rel)
        if not different:
            self.holds(file, check, detail)
            return
        more = len(different) - _MOST_NAMED
        words = "; ".join(different[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        self.differs(file, check, words)

    def attempt(self, file: str, check: str, make: Callable[[], Any], detail: str = "") -> Any:
        """The result of a computation; a ``ValueError`` is a failed check and gives ``None``."""
        found = None
        with self.guarded(file, check):
            found = make()
            self.holds(file, check, detail)
        return found

    @contextmanager
    def guarded(self, file: str, check: str) -> Generator[None]:
        """Record a ``ValueError`` within the block as a check that failed."""
        try:
            yield
        except (ValueError, ArithmeticError, OSError) as problem:
            self.differs(file, check, str(problem))


def differences(stated: Any, expected: Any, rel: float = 0.0, where: str = "") -> list[str]:
    """The differences of two plain values, each as "path: stated …, expected …"."""
    here = where or "value"
    if isinstance(stated, Mapping) and isinstance(expected, Mapping):
        one, other = cast(Mapping[str, Any], stated), cast(Mapping[str, Any], expected)
        found: list[str] = []
        for name in [*one, *(each for each in other if each not in one)]:
            path = f"{where}.{name}" if where else str(name)
            if name not in one or name not in other:
                found.append(f"{path} is {'missing' if name not in one else 'unexpected'}")
            else:
                found += differences(one[name], other[name], rel, path)
        return found
    if isinstance(stated, (list, tuple)) and isinstance(expected, (list, tuple)):
        first, second = cast(Sequence[Any], stated), cast(Sequence[Any], expected)
        if len(first) != len(second):
            return [f"{here} has {len(first)} entries, expected {len(second)}"]
        pairs = enumerate(zip(first, second, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, rel, f"{here}[{i}]")]
    if _equal(stated, expected, rel):
        return []
    return [f"{here} is {checks.quoted(stated)}, expected {checks.quoted(expected)}"]


def _equal(stated: Any, expected: Any, rel: float) -> bool:
    numbers = (int, float)
    if isinstance(stated, bool) or isinstance(expected, bool):
        return stated is expected
    if isinstance(stated, numbers) and isinstance(expected, numbers):
        if math.isnan(stated) or math.isnan(expected):
            return math.isnan(stated) and math.isnan(expected)
        return stated == expected or abs(stated - expected) <= rel * abs(expected)
    return type(stated) is type(expected) and stated == expected
