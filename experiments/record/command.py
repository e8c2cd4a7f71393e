"""The command ``python experiments/record.py``."""

import sys

from fedjax_mr.analysis import __main__ as analysis
from record import channel, choices, keep, origins, pages, tasks

COMMANDS = {"pages": pages, "keep": keep, "choices": choices, "origins": origins, "channel": channel, "tasks": tasks}
PROGRAM = "python experiments/record.py"


def main(arguments: list[str] | None = None) -> int:
    """Run a command, ``pages`` if none is named, and return the exit code: 0, 1 for pages out of date, 2 for bad input.

    Args:
      arguments: the command line without the name of the program. Default: that of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "-help", "--help")):
        arguments = ["pages", *arguments]
    return analysis.main(arguments, commands=COMMANDS, program=PROGRAM)
