"""The command ``python -m fedjax_mr.analysis COMMAND RUN ... [--option]``; a new command is a file and a row here."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from fedjax_mr.analysis import (
    best,
    choices,
    clients,
    curves,
    landscape,
    origins,
    reassembly,
    record,
    results,
    seconds,
    similarity,
    spread,
    table,
    theorem1,
)
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment import imports, interrupts


class Command(Protocol):
    """A module of this folder; the first line of its docstring is its help."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def main(self, arguments: argparse.Namespace) -> None: ...


COMMANDS: dict[str, Any] = {
    "best": best,
    "choices": choices,
    "clients": clients,
    "curves": curves,
    "landscape": landscape,
    "origins": origins,
    "reassembly": reassembly,
    "record": record,
    "results": results,
    "seconds": seconds,
    "similarity": similarity,
    "spread": spread,
    "table": table,
    "theorem1": theorem1,
}  # modules that are Commands


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help tells more)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: without the program's name; None reads the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if not arguments or arguments[0] in ("-h", "-help", "--help"):
            print(usage())
            return 0 if arguments else 2
        name, *rest = arguments
        if name not in COMMANDS:
            raise unknown_name("analysis", name, COMMANDS)
        command: Command = COMMANDS[name]
        parser = _Parser(prog=f"python -m fedjax_mr.analysis {name}", description=command.__doc__, allow_abbrev=False)
        command.add_arguments(parser)
        parser.add_argument(
            "--import", dest="imports", action="append", default=[], metavar="FILE", help="Python file with own methods"
        )
        parsed = parser.parse_args(rest)
        imports.load(parsed.imports)
        command.main(parsed)
    except UserError as error:
        print(f"fedjax-mr: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(interrupts.LINE)
        return interrupts.EXIT_CODE
    return 0


def usage() -> str:
    """Return the list of the commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {(each.__doc__ or '').splitlines()[0]}" for name, each in COMMANDS.items()]
    head = "usage: python -m fedjax_mr.analysis COMMAND RUN ... [--option=value ...]"
    return "\n".join([head, "       COMMAND --help tells more; RUN is a run folder", "", *lines])


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
