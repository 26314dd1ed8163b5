"""Argument validation: every message names the argument, the rule, the value and the remedy."""

import math
import numbers
import operator

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def integer(name: str, value: object, low: int, high: int | None = None, remedy: str = "") -> int:
    """Return ``value`` as an int in [low, high], or raise."""
    rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer {rule}, got {value!r}{_tail(remedy)}")
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {rule}, got {number}{_tail(remedy)}")
    return number


def fraction(name: str, value: object, remedy: str = "") -> float:
    """Return ``value`` as a float in [0, 1], or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}{_tail(remedy)}")
    number = float(value)
    if not (math.isfinite(number) and 0.0 <= number <= 1.0):
        raise ValueError(f"{name} must be in [0, 1], got {number}{_tail(remedy)}")
    return number


def number(name: str, value: object, low: float, *, open_low: bool = False) -> float:
    """Return ``value`` as a finite float of at least (or above) ``low``, or raise."""
    rule = f"a finite number {'above' if open_low else 'at least'} {low:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be {rule}, got {value!r}")
    found = float(value)
    if not math.isfinite(found) or found < low or (open_low and found == low):
        raise ValueError(f"{name} must be {rule}, got {found}")
    return found


def probability(name: str, value: object) -> float:
    """Return ``value`` as a float strictly between 0 and 1, or raise."""
    if isinstance(value, numbers.Real):
        found = float(value)
        if 0.0 < found < 1.0:
            return found
    raise ValueError(f"{name} must be strictly between 0 and 1, got {value!r}")


def choice(name: str, value: object, options: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``options``, or raise."""
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {value!r}")
    return str(value)


def coefficients(name: str, values: npt.ArrayLike) -> Array:
    """Return a read-only float64 vector whose entries are finite and whose first is positive."""
    coef = np.array(values, dtype=np.float64)
    if coef.ndim != 1 or coef.size == 0:
        raise ValueError(
            f"{name} must be a non-empty vector of coefficients, got shape {coef.shape}; "
            "pass the first column of the Toeplitz matrix"
        )
    if not np.isfinite(coef).all():
        raise ValueError(
            f"{name} must be finite, got {coef[~np.isfinite(coef)][0]} "
            f"at index {int(np.argmin(np.isfinite(coef)))}; remove it"
        )
    if coef[0] <= 0:
        raise ValueError(
            f"{name}[0], the diagonal, must be positive, got {coef[0]}; "
            "rescale or shift the coefficients"
        )
    coef.flags.writeable = False
    return coef


def _tail(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""
