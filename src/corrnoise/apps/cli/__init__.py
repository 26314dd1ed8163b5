"""The command line. Every command has a file of its own and is registered in ``app``."""

from __future__ import annotations

import sys

from corrnoise import _extras
from corrnoise.apps.cli.terminal import StoppedError

# The exit status after Ctrl-C that shells use.
_CTRL_C = 130


def main(args: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success. 2 is bad input, a missing optional library, or too little memory or disk space; 130
    is Ctrl-C. Both print exactly one line on standard error. Unexpected errors are raised.

    Args:
        args: the words after ``corrnoise``; those of the process by default.

    >>> main(["account", "--mechanism", "dp_sgd", "--num-steps", "10", "--epsilon", "1"])
    2
    """
    try:
        from corrnoise.apps.cli.app import run

        status = run(sys.argv[1:] if args is None else args)
        return _refuse("interrupted", status) if status == _CTRL_C else status
    except StoppedError as stopped:
        return _refuse(str(stopped), _CTRL_C)
    except ModuleNotFoundError as missing:
        named = _extras.explained(missing)
        if named is missing:  # no extra installs it: a bug, not bad input
            raise
        return _refuse(str(named))
    except (ValueError, OverflowError) as problem:  # coefficients may exceed the range of floats
        return _refuse(str(problem))
    except MemoryError as problem:
        return _refuse(f"not enough memory for a run of this size: {problem}")
    except OSError as problem:
        where = "" if problem.filename is None else f"{problem.filename}: "
        return _refuse(where + (problem.strerror or str(problem)))


def _refuse(message: str, status: int = 2) -> int:
    print("corrnoise: " + " ".join(message.split()), file=sys.stderr)
    return status
