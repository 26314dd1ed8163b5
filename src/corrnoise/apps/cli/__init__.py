"""The command line. Every command has a file of its own and is registered in ``app``."""

from __future__ import annotations

import sys

from corrnoise import _extras


def main(args: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success; 2 is bad input or a missing optional library, with exactly one line on standard
    error. Anything unexpected is raised.

    Args:
        args: the words after ``corrnoise``; those of the process by default.

    >>> main(["account", "--mechanism", "dp_sgd", "--num-steps", "10", "--epsilon", "1"])
    2
    """
    try:
        from corrnoise.apps.cli.app import run

        return run(sys.argv[1:] if args is None else args)
    except ModuleNotFoundError as missing:
        named = _extras.explained(missing)
        if named is missing:  # no extra has it: a defect, not bad input
            raise
        return _refuse(str(named))
    except ValueError as problem:
        return _refuse(str(problem))
    except OSError as problem:
        if problem.filename is None:
            raise
        return _refuse(f"{problem.filename}: {problem.strerror}")


def _refuse(message: str) -> int:
    print("corrnoise: " + " ".join(message.split()), file=sys.stderr)
    return 2
