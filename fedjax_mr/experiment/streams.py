"""Standard output and error of a command, whatever they are: closed, full, or a pipe whose reader has left.

Messages and progress matter less than the work: where standard error cannot be written, the command goes on in silence.
Where standard output cannot, the command says so and fails, because its output is what was asked for.
"""

import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

CLOSED_PIPE = 141  # as the shell has it for a program that writes to a closed pipe
UNWRITABLE = 2


class Unwritable(OSError):
    """Standard output cannot be written, for instance because the disk is full."""


class _Output(io.FileIO):
    """The file descriptor below standard output or standard error."""

    def write(self, data, /):
        """Write; see the module for what happens if that fails. A closed pipe raises its usual error."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            raise Unwritable(error.errno, error.strerror) from None


def prepare() -> None:
    """Open the standard streams that are closed, and guard those that are written.

    A file that is opened while a standard descriptor is closed would get its number, and then also the messages of
    libraries.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
    sys.stdout = _guarded(1, sys.stdout)
    sys.stderr = _guarded(2, sys.stderr)


def _guarded(number: int, stream: TextIO | None) -> TextIO:
    """Return a text stream on a descriptor that is like another one; Python has None for one that was closed."""
    buffer = io.BufferedWriter(_Output(number, "w", closefd=False))
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace")
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def run(main: Callable[[], int | None]) -> int | None:
    """Return what the main function of a command returns, or the code for output or a place that is not there.

    141: nobody reads the output any more. 2: the output cannot be written, or the current folder has been deleted.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left, such as head
        _to_nowhere()
        return CLOSED_PIPE
    except Unwritable as error:
        _to_nowhere()
        sys.stderr.write(
            f"fedjax-mr: cannot write to standard output ({error.strerror}); files that the command wrote are whole\n"
        )
        return UNWRITABLE
    except FileNotFoundError:
        if _has_current_folder():
            raise
        sys.stderr.write("fedjax-mr: the current folder has been deleted; change to another one (cd) and try again\n")
        return UNWRITABLE
    return code


def _to_nowhere() -> None:
    """Drop what is still to be written to standard output, so that Python's last flush does not fail, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
