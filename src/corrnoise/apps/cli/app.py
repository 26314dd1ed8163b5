"""The commands, and how a call becomes an exit status."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from corrnoise._version import __version__
from corrnoise.apps.cli import options, words
from corrnoise.apps.cli.account import account
from corrnoise.apps.cli.audit import audit
from corrnoise.apps.cli.bench import bench
from corrnoise.apps.cli.compare import compare
from corrnoise.apps.cli.plan import plan
from corrnoise.apps.cli.reproduce import reproduce
from corrnoise.apps.cli.train import train
from corrnoise.apps.cli.verify import verify

# Plain help is fast and the same on a terminal and in a pipe, and its examples can be copied.
app = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
app.command()(plan)
app.command()(compare)
app.command()(account)
app.command()(train)
app.command()(verify)
app.command()(audit)
app.command()(reproduce)
app.command()(bench)

# The base class of all usage errors, which Typer does not export.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
# The class name of the error for a missing required option, which Typer does not export either.
_MISSING = "MissingParameter"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"corrnoise {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Differentially private training with correlated noise: the same guarantee, far less error.

    Every command has --json for machines and --help with examples.
    """


def run(args: list[str]) -> int:
    """Run a command; a usage error becomes a ``ValueError`` of one line."""
    try:
        status = _command().main(args or ["--help"], prog_name="corrnoise", standalone_mode=False)
    except _USAGE_ERROR as problem:
        context = getattr(problem, "ctx", None)
        path = context.command_path if context is not None else "corrnoise"
        message = problem.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"{words.sentence(message)} Try: {path} --help") from None
    return status if isinstance(status, int) else 0


def _command() -> Any:
    """The commands; the help of an option for registered names lists all of these names."""
    command: Any = typer.main.get_command(app)
    for each in command.commands.values():
        for option in each.params:
            if option.name in options.REGISTRIES:
                option.help += f" One of: {', '.join(options.REGISTRIES[option.name]())}."
            option.process_value = partial(_processed, option, option.process_value)
    return command


def _processed(option: Any, process: Callable[[Any, Any], Any], context: Any, given: Any) -> Any:
    """The value of an option, with better messages than Typer's for missing options and numbers.

    Typer's messages do not have the value, and name only one missing option.
    """
    try:
        return process(context, given)
    except _USAGE_ERROR as problem:
        name = option.opts[0] if option.opts[0].startswith("-") else option.name
        if type(problem).__name__ == _MISSING:
            # The given options are processed first.
            missing = [
                each for each in context.command.params
                if each.required and each.name not in context.params
            ]  # fmt: skip
            if len(missing) > 1:
                names = ", ".join(each.opts[0] for each in missing)
                raise ValueError(
                    f"these options must be given: {names}. Try: {context.command_path} --help"
                ) from None
        said = words.of_number(name, given, str(problem))
        if said is None:
            raise
        raise ValueError(said) from None
