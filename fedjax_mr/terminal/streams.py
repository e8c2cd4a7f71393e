"""Standard output and error of a command that are closed, full, or a pipe without a reader.

If standard error cannot be written, the command continues without messages. If standard output cannot be written, the
command fails with one line, because its output is the result.
"""

import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

CLOSED_PIPE = 141  # the shell's code for a program that writes to a closed pipe
UNWRITABLE = 2


class Unwritable(OSError):
    """Standard output cannot be written, for instance because the disk is full."""


class _Output(io.FileIO):
    """The file descriptor below standard output or standard error."""

    def write(self, data, /):
        """Write, and handle failures as the module says. A closed pipe raises BrokenPipeError."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self.fileno() == 2:
                return len(data)
            raise Unwritable(error.errno, error.strerror) from None


def prepare() -> None:
    """Open the closed standard streams, and handle failures of standard output and error.

    A file that is opened while a standard descriptor is closed would get its number, and then receive the messages of
    libraries.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    sys.stdout = _guarded(1, sys.stdout)
    sys.stderr = _guarded(2, sys.stderr)


def _guarded(number: int, stream: TextIO | None) -> TextIO:
    """A text stream on a descriptor with the settings of ``stream``, which is None if the descriptor was closed."""
    buffer = io.BufferedWriter(_Output(number, "w", closefd=False))
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace")
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,  # the latter with PYTHONUNBUFFERED
        write_through=stream.write_through,
    )


def run(main: Callable[[], int | None]) -> int | None:
    """Run the main function of a command and return its exit code.

    141: the reader of the output has exited. 2: the output cannot be written, or the current folder was deleted.
    """
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has exited, such as head
        _discard_output()
        return CLOSED_PIPE
    except Unwritable as error:
        _discard_output()
        sys.stderr.write(
            f"fedjax-mr: cannot write to standard output ({error.strerror}); files written before are complete\n"
        )
        return UNWRITABLE
    except FileNotFoundError:
        if _has_current_folder():
            raise
        sys.stderr.write("fedjax-mr: the current folder has been deleted; change to another one (cd) and try again\n")
        return UNWRITABLE
    return code


def _discard_output() -> None:
    """Discard the rest of standard output, so Python's last flush does not fail as well."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
