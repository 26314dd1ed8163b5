"""Numbers as people write them: a few digits, true minus signs, and powers of ten."""

from __future__ import annotations

import math
import re

from corrnoise import _rounding

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Printed in place of an unknown number.
_UNKNOWN = "–"


def number(value: float | None, digits: int = 4) -> str:
    """A number to read, rounded to the nearest.

    >>> number(1e-05), number(-0.125), number(2.5e-7), number(1234567), number(None)
    ('10⁻⁵', '−0.125', '2.5·10⁻⁷', '1,234,567', '–')
    """
    if value is None:
        return _UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 10**digits and abs(value) < 1e15):
        return f"{round(value):,}".replace("-", "−")
    return _pretty(f"{value:.{digits}g}")


def rounded_up(value: float | None, digits: int = 5) -> str:
    """A number to copy, never below its value: an ε, a δ or a noise multiplier.

    >>> rounded_up(3.141511), rounded_up(1.00001e-6, 3), rounded_up(None)
    ('3.1416', '1.01·10⁻⁶', '–')
    """
    return _UNKNOWN if value is None else _pretty(_rounding.rounded_up(value, digits))


def percent(value: float | None, decimals: int = 1) -> str:
    """A share, in percent.

    >>> percent(0.8934), percent(0.8934, 0), percent(None)
    ('89.3%', '89%', '–')
    """
    return _UNKNOWN if value is None else f"{100 * value:.{decimals}f}%"


def powers(sentence: str) -> str:
    """A sentence with powers of ten as people write them.

    >>> powers("at most 1e-09 of (4, 2.5e-06)")
    'at most 10⁻⁹ of (4, 2.5·10⁻⁶)'
    """
    return re.sub(r"\b\d+(\.\d+)?e[-+]\d+\b", lambda found: _pretty(found[0]), sentence)


def _pretty(shown: str) -> str:
    mantissa, e, exponent = shown.partition("e")
    if e:
        power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
        shown = power if mantissa == "1" else f"{mantissa}·{power}"
    return shown.replace("-", "−")
