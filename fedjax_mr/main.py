"""The command ``python -m fedjax_mr.main``: parse the flags, run the experiment, print the results."""

import sys
from collections.abc import Sequence

from fedjax_mr.config import config, imports
from fedjax_mr.experiment.processes import leave
from fedjax_mr.experiment.report import summary_table
from fedjax_mr.experiment.run import run
from fedjax_mr.terminal import commands, interrupts, manual
from fedjax_mr.terminal.messages import flags_in_errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one experiment and return the exit code.

    Codes: 0 success, 2 bad input, 3 diverged, 4 another process of the run is lost or missing, 130 Ctrl-C.

    Args:
      arguments: command-line arguments without the program name. Default: those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return commands.exit_code(lambda: _work(words))


def _work(arguments: Sequence[str]) -> None:
    if "--version" in arguments:
        print(manual.version())
        return
    if (topic := manual.help_topic(arguments)) is not None:
        config.read_imports(arguments)
        print(manual.page(topic))
        return
    with imports.blamed():
        settings = config.parse(arguments)
        with flags_in_errors(settings.strategy):
            result = run(settings)
    if result.writes:
        print(summary_table(result.summary))
        print(f"run folder: {result.folder}")


def console() -> None:
    """Run the command and exit with its code."""
    leave(interrupts.run(main) or 0)


if __name__ == "__main__":
    console()
