"""The command line. Every command has a file of its own and is registered in ``app``."""

from __future__ import annotations

import sys

# What to install where a command needs more than NumPy and SciPy.
_EXTRAS = {
    "typer": "cli",
    "rich": "cli",
    "matplotlib": "plots",
    "dp_accounting": "accounting",
    "torch": "torch",
    "opacus": "torch",
}


def main(args: list[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success; 2 is bad input, with exactly one line on standard error. Anything unexpected is
    raised.

    Args:
        args: the words after ``corrnoise``; those of the process by default.

    >>> main(["account", "--mechanism", "dp_sgd", "--num-steps", "10", "--epsilon", "1"])
    2
    """
    try:
        from corrnoise.cli.app import run

        return run(sys.argv[1:] if args is None else args)
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        return _refuse(
            f"{name} is needed and not installed: pip install 'corrnoise[{_EXTRAS[name]}]'"
        )
    except ValueError as problem:
        return _refuse(str(problem))
    except OSError as problem:
        if problem.filename is None:
            raise
        return _refuse(f"{problem.filename}: {problem.strerror}")


def _refuse(message: str) -> int:
    print("corrnoise: " + " ".join(message.split()), file=sys.stderr)
    return 2
