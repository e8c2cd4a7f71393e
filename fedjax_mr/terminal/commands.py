"""What all commands of this package do alike: help, errors as one line, and exit codes."""

import sys
from collections.abc import Callable, Sequence

from fedjax_mr.config import config as configuration
from fedjax_mr.config.settings import help_of
from fedjax_mr.errors import Interrupted, UserError
from fedjax_mr.terminal import interrupts, manual


def exit_code(work: Callable[[], int | None]) -> int:
    """Do the work of a command and return its exit code: that of ``work`` (None is 0), or 130 after Ctrl-C.

    An error of the user, or a stop after a checkpoint, is printed as one line and has an exit code of its own.
    """
    try:
        return work() or 0
    except (UserError, Interrupted) as reason:
        print(f"fedjax-mr: {reason}", file=sys.stderr)
        return reason.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(interrupts.LINE)
        return interrupts.EXIT_CODE


def of_several_runs(
    work: Callable[[list[str]], int | None], arguments: Sequence[str] | None, *, usage: str, settings: type
) -> int:
    """Run a command that has flags of its own beside those of a run, and return the exit code as `exit_code`.

    Args:
      work: the work, a function of the command line.
      arguments: the command line without the name of the program. Default: that of this process.
      usage: the head of the short help.
      settings: the dataclass of the command's flags.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)

    def help_or_work() -> int | None:
        if (topic := manual.help_topic(words)) is None:
            return work(words)
        configuration.read_imports(words)
        print(manual.page(topic) if topic else usage + help_of(settings))
        return None

    return exit_code(help_or_work)
