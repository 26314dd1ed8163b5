"""Argument validation: every message names the argument, the rule, the value and the remedy.

The functions in the second half validate what was read from JSON, where every type is possible.
"""

import dataclasses
import json
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# The most steps that a run may have: vectors of this length take 80 MB and seconds, not hours.
MOST_STEPS = 10_000_000
# The longest value that a message quotes.
_MOST_QUOTED = 60


def integer(name: str, value: object, low: int, high: int | None = None, remedy: str = "") -> int:
    """Return ``value`` as an int in [low, high], or raise."""
    rule = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer {rule}, got {quoted(value)}{_tail(remedy)}")
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} must be {rule}, got {quoted(number)}{_tail(remedy)}")
    return number


def steps(name: str, value: object) -> int:
    """Return ``value`` as a number of steps, or raise before anything of that size is allocated."""
    found = integer(name, value, 1)
    if found > MOST_STEPS:
        raise ValueError(
            f"{name} must be at most {MOST_STEPS:,}, the most steps of a run, got {quoted(found)}; "
            "use fewer steps or epochs, or larger batches"
        )
    return found


def fraction(name: str, value: object, remedy: str = "") -> float:
    """Return ``value`` as a float in [0, 1], or raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number in [0, 1], got {quoted(value)}{_tail(remedy)}")
    number = _float(value)
    if not (math.isfinite(number) and 0.0 <= number <= 1.0):
        raise ValueError(f"{name} must be in [0, 1], got {number}{_tail(remedy)}")
    return number


def number(name: str, value: object, low: float, *, open_low: bool = False) -> float:
    """Return ``value`` as a finite float of at least (or above) ``low``, or raise."""
    rule = "a finite number"
    if low > -math.inf:
        rule += f" {'above' if open_low else 'at least'} {low:g}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be {rule}, got {quoted(value)}")
    found = _float(value)
    if not math.isfinite(found) or found < low or (open_low and found == low):
        raise ValueError(f"{name} must be {rule}, got {found}")
    return found


def probability(name: str, value: object) -> float:
    """Return ``value`` as a float strictly between 0 and 1, or raise."""
    if isinstance(value, numbers.Real):
        found = _float(value)
        if 0.0 < found < 1.0:
            return found
    raise ValueError(f"{name} must be strictly between 0 and 1, got {quoted(value)}")


def choice(name: str, value: object, options: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``options``, or raise and suggest the nearest one."""
    if value not in options:
        import difflib  # deferred for a quick import

        near = {_plain(option): option for option in options}
        found = difflib.get_close_matches(_plain(str(value)), near, n=1, cutoff=0.75)
        guess = f"; did you mean {near[found[0]]!r}?" if found else ""
        raise ValueError(f"{name} must be one of {', '.join(options)}, got {quoted(value)}{guess}")
    return str(value)


def _plain(name: str) -> str:
    """A name without case, hyphens, underscores and spaces, to compare spellings."""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")


def coefficients(name: str, values: npt.ArrayLike) -> Array:
    """Return a read-only float64 vector whose entries are finite and whose first is positive."""
    try:
        coef = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a vector of numbers, got {quoted(values)}") from None
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


def quoted(value: object) -> str:
    """``repr`` of a value for a message: one line, and short whatever the value is."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}…"


# Values that were read from JSON.


def parsed(what: str, text: str | bytes) -> Any:
    """The value of a JSON text; every failure is a ``ValueError``, repeated names included."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"a {what} must be JSON, got lists or objects nested too deeply") from None
    except (ValueError, TypeError) as problem:
        raise ValueError(f"a {what} must be JSON, got a text that is not: {problem}") from None


def fields(
    what: str, data: object, names: Iterable[str], optional: Iterable[str] = ()
) -> dict[str, Any]:
    """The fields of a JSON object: all of ``names``, perhaps some of ``optional``, no other."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} must be a JSON object, got {quoted(data)}")
    found = dict(cast(Mapping[str, Any], data))
    required = list(names)
    for name in required:
        if name not in found:
            raise ValueError(f"{what} must have the field {name!r}, got none")
    known = {*required, *optional}
    for name in found:
        if name not in known:
            raise ValueError(f"{what} must have no field {quoted(name)}; this version knows none")
    return found


def of_type(what: str, data: object, cls: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass from a JSON object, each of a type that its annotation names.

    The dataclass must annotate with the names below alone, as strings; a field that has a default
    may be missing.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}
    required = [name for name, field in known.items() if field.default is dataclasses.MISSING]
    found = fields(what, data, required, known)
    for name, value in found.items():
        wanted = str(known[name].type).split(" | ")
        if not any(_TYPES[each](value) for each in wanted):
            rule = " or ".join(_WORDS[each] for each in wanted)
            raise ValueError(f"{name} of a {what} must be {rule}, got {quoted(value)}")
    return found


_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "None": lambda value: value is None,
    "dict[str, str]": lambda value: (
        isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
    ),
}
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "None": "null",
    "dict[str, str]": "an object of strings",
}


def text(name: str, value: object) -> str:
    """Return ``value`` if it is a string, or raise."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {quoted(value)}")
    return value


def truth(name: str, value: object) -> bool:
    """Return ``value`` if it is true or false, or raise."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {quoted(value)}")
    return value


def listed(name: str, value: object) -> Sequence[Any]:
    """Return ``value`` if it is a list, or raise."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, got {quoted(value)}")
    return cast(Sequence[Any], value)


def vector(name: str, value: object) -> Array:
    """Return a list of finite numbers as a float64 vector, or raise."""
    found = listed(name, value)
    for each in found:
        if isinstance(each, bool) or not isinstance(each, (int, float)):
            raise ValueError(f"{name} must be a list of numbers, got {quoted(each)} in it")
        if not math.isfinite(_float(each)):
            raise ValueError(f"{name} must be a list of finite numbers, got {quoted(each)} in it")
    return np.array(found, dtype=np.float64)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. A field that is given twice is refused: other readers may take the other."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field {quoted(name)} is given twice")
        found[name] = value
    return found


def _float(value: Any) -> float:
    """A real number as a float; infinite where it is beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _tail(remedy: str) -> str:
    return f"; {remedy}" if remedy else ""
