"""Messages for usage errors: the argument, the rule, the value and the remedy."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from corrnoise import _checks as checks

# What Typer and pydantic say if a text is not an integer, and (below) not a number.
_WHOLE = re.compile("valid integer|as an integer")
_REAL = re.compile("valid number|valid float|as a number")
# Numbers with separators of thousands: 50,000 and 50 000 and 50'000.
_GROUPED = re.compile(r"[+-]?\d{1,3}([,' ]\d{3})+")
_FACTORS = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
# The most digits of a number in a remedy.
_MOST_DIGITS = 20


def sentence(text: str) -> str:
    """A text that ends with exactly one punctuation mark."""
    text = text.rstrip(".")
    return text if text.endswith(("?", "!")) else f"{text}."


def of_number(name: str, given: object, problem: str) -> str | None:
    """A message about the value of an option that takes a number; ``None`` for other problems.

    >>> of_number("--epochs", "5e1", "Input should be a valid integer")
    "--epochs must be a whole number, got '5e1'; write 50"
    """
    whole = _WHOLE.search(problem) is not None
    if not (whole or _REAL.search(problem)):
        return None
    parts = given if isinstance(given, (list, tuple)) else [given]
    texts = [str(part) for part in parts if not _read(str(part), whole=whole)]
    if not texts:
        return None
    rule = "a whole number" if whole else "a number"
    return f"{name} must be {rule}, got {checks.quoted(texts[0])}; {_remedy(texts[0], whole=whole)}"


def _read(text: str, *, whole: bool) -> bool:
    try:
        int(text) if whole else float(text)
    except ValueError:
        return False
    return True


def _remedy(text: str, *, whole: bool) -> str:
    """The remedy: how to write the number that was probably meant."""
    meant = _meant(text.strip())
    if not meant:
        return "write digits alone, such as 50000" if whole else "write it as 0.5 or 1e-5"
    found: list[str] = []
    for value in meant:
        if not whole:
            found.append(f"{float(value):.15g}")
        elif value.denominator == 1:
            found.append(str(value.numerator))
        else:
            found += [str(math.floor(value)), str(math.ceil(value))]
    return f"write {' or '.join(dict.fromkeys(found))}"


def _meant(text: str) -> list[Fraction]:
    """The numbers that a text may mean; none if it is unclear."""
    if _GROUPED.fullmatch(text):
        return _fractions(re.sub("[,' ]", "", text))
    if text.endswith("%"):
        bare = _fractions(text[:-1].strip())
        return [*bare, *(each / 100 for each in bare)]
    factor = _FACTORS.get(text[-1:].lower())
    if factor is not None:
        return [each * factor for each in _fractions(text[:-1].strip())]
    if re.fullmatch(r"[+-]?\d+,\d+", text):
        return _fractions(text.replace(",", "."))
    return _fractions(text)


def _fractions(text: str) -> list[Fraction]:
    """The number of a text such as 5e4, 2.5 or 1/50000, if it has few digits."""
    exponent = re.search(r"e([+-]?\d+)$", text, re.IGNORECASE)
    if len(text) > _MOST_DIGITS or (exponent and abs(int(exponent[1])) > _MOST_DIGITS):
        return []
    try:
        return [Fraction(text)]
    except (ValueError, ZeroDivisionError):
        return []
