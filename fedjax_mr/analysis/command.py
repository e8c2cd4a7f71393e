"""One command that reads runs: its arguments, bad input as one line, and its exit code."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from fedjax_mr.config import imports
from fedjax_mr.errors import UserError, usual_arithmetic
from fedjax_mr.terminal import commands
from fedjax_mr.terminal.messages import flags_in_errors


class Command(Protocol):
    """A module with these functions; the first line of its docstring is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def main(self, arguments: argparse.Namespace) -> None: ...


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserError for a bad command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def execute(command: Command, arguments: Sequence[str], *, program: str) -> None:
    """Parse the arguments of a command and call its main function.

    Args:
      command: the command.
      arguments: the command line after the name of the command.
      program: what users type before the arguments.

    Raises:
      UserError: an argument is wrong, or the command cannot do its work.
    """
    parser = _Parser(
        prog=program,
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file that registers your own methods",
    )
    parsed = parser.parse_args(arguments)
    imports.load(parsed.imports)
    with imports.blamed(), flags_in_errors(), usual_arithmetic():
        command.main(parsed)


def script(command: Any, arguments: Sequence[str] | None = None) -> int:
    """Run a command that is a script of its own, and return the exit code: 0, or 2 for bad input.

    Args:
      command: the module of the script, which is a `Command`.
      arguments: the command line without the name of the script. Default: that of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    return commands.exit_code(lambda: execute(command, words, program=f"python {sys.argv[0]}"))
