"""The command ``python -m fedjax_mr.analysis COMMAND RUN ... [--option]``.

A new command is a file in this folder and a row of `COMMANDS`.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_mr.analysis import best, clients, command, curves, mixing, report, seconds, spread, table, timeline
from fedjax_mr.errors import unknown_name
from fedjax_mr.terminal import interrupts
from fedjax_mr.terminal.commands import exit_code

PROGRAM = "python -m fedjax_mr.analysis"
COMMANDS: dict[str, Any] = {
    "best": best,
    "clients": clients,
    "curves": curves,
    "mixing": mixing,
    "report": report,
    "seconds": seconds,
    "spread": spread,
    "table": table,
    "timeline": timeline,
}  # modules that are a `command.Command`


def main(
    arguments: Sequence[str] | None = None, *, commands: Mapping[str, Any] = COMMANDS, program: str = PROGRAM
) -> int:
    """Run a command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: the command line without the name of the program. Default: that of the process.
      commands: modules that are a `command.Command`, by name.
      program: what users type before the name of a command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def work() -> int:
        if not words or words[0] in ("-h", "-help", "--help"):
            print(_usage(commands, program))
            return 0 if words else 2
        name, *options = words
        if name not in commands:
            raise unknown_name("command", name, commands)
        command.execute(commands[name], options, program=f"{program} {name}")
        return 0

    return exit_code(work)


def _usage(commands: Mapping[str, Any], program: str) -> str:
    width = max(map(len, commands))
    return "\n".join(
        [
            f"usage: {program} COMMAND RUN ... [--option=value ...]",
            "       COMMAND --help describes one command; RUN is a run folder or TABLE/RUN",
            "",
            *(f"  {name.ljust(width)}  {each.__doc__.splitlines()[0]}" for name, each in commands.items()),
        ]
    )


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
