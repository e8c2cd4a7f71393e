"""The command ``python -m fedjax_mr.analysis COMMAND RUN ... [--option]``.

A new command is a file in this folder and a row of `COMMANDS`.
"""

# ruff: noqa: E402
from fedjax_mr.experiment import interrupts

interrupts.begin(__name__)  # before the imports that take seconds

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from fedjax_mr.analysis import (
    best,
    clients,
    curves,
    landscape,
    leakage,
    reassembly,
    seconds,
    similarity,
    spread,
    table,
    theorem1,
    timeline,
)
from fedjax_mr.errors import UserError, unknown_name, usual_arithmetic
from fedjax_mr.experiment import imports
from fedjax_mr.experiment.messages import flags_in_errors

PROGRAM = "python -m fedjax_mr.analysis"


class Command(Protocol):
    """A module of this folder; the first line of its docstring is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def main(self, arguments: argparse.Namespace) -> None: ...


COMMANDS: dict[str, Any] = {
    "best": best,
    "clients": clients,
    "curves": curves,
    "landscape": landscape,
    "leakage": leakage,
    "reassembly": reassembly,
    "seconds": seconds,
    "similarity": similarity,
    "spread": spread,
    "table": table,
    "theorem1": theorem1,
    "timeline": timeline,
}  # modules that are Commands


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserError for a bad command line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def main(
    arguments: Sequence[str] | None = None, *, commands: Mapping[str, Any] = COMMANDS, program: str = PROGRAM
) -> int:
    """Run a command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: the command line without the name of the program. Default: that of the process.
      commands: modules that are `Command`, by name.
      program: what users type before the name of a command.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments or arguments[0] in ("-h", "-help", "--help"):
            print(usage(commands, program))
            return 0 if arguments else 2
        name, *options = arguments
        if name not in commands:
            raise unknown_name("command", name, commands)
        command: Command = commands[name]
        parser = _Parser(
            prog=f"{program} {name}",
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
        parsed = parser.parse_args(options)
        imports.load(parsed.imports)
        with imports.blamed(), flags_in_errors(), usual_arithmetic():
            command.main(parsed)
    except UserError as error:
        print(f"fedjax-mr: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(interrupts.LINE)
        return interrupts.EXIT_CODE
    return 0


def usage(commands: Mapping[str, Any] = COMMANDS, program: str = PROGRAM) -> str:
    """List the commands."""
    width = max(map(len, commands))
    lines = [f"  {name.ljust(width)}  {(each.__doc__ or '').splitlines()[0]}" for name, each in commands.items()]
    head = f"usage: {program} COMMAND RUN ... [--option=value ...]"
    return "\n".join(
        [head, "       COMMAND --help describes one command; RUN is a run folder or TABLE/RUN", "", *lines]
    )


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
