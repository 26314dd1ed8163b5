"""Numbers that people copy, rounded toward privacy, and counts."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

# Relative. The accountants move every result by this much toward privacy; printing ignores the
# margin, so that 9 is printed as 9.
_MARGIN = 1e-12


def rounded_up(value: float, digits: int = 5) -> str:
    """``value`` in a few digits, never below it: for an ε, a δ or a noise multiplier.

    >>> rounded_up(3.141511), rounded_up(9.0), rounded_up(1e-05, 3)
    ('3.1416', '9', '1e-05')
    """
    value = float(value)
    near = f"{value:.{digits}g}"
    if float(near) >= value * (1.0 - _MARGIN):
        return near
    up = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))
    return f"{float(up):.{digits}g}"


def rounded_down(value: float, digits: int = 4) -> str:
    """``value`` in a few digits, never above it: for a lower bound.

    >>> rounded_down(2.99999), rounded_down(3.0)
    ('2.999', '3')
    """
    value = float(value)
    near = f"{value:.{digits}g}"
    if float(near) <= value * (1.0 + _MARGIN):
        return near
    down = Context(prec=digits, rounding=ROUND_FLOOR).create_decimal(repr(value))
    return f"{float(down):.{digits}g}"


def with_decimals(value: float, decimals: int) -> str:
    """``value`` with this many decimals, never below it: for a noise multiplier in a table.

    >>> with_decimals(5.683447, 3), with_decimals(1.5, 2)
    ('5.684', '1.50')
    """
    down = Decimal(repr(float(value) * (1.0 - _MARGIN)))
    return str(down.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING))


def counted(count: int, noun: str) -> str:
    """A count with its noun, in the plural unless the count is 1.

    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}" + "s" * (count != 1)
