"""Ctrl-C in a command: one line and exit code 130, from the first import to the end.

While a command imports, nothing needs to be saved and Ctrl-C ends the process on the spot. Later it is Python's
KeyboardInterrupt, which closes files on its way out. Where it meets a destructor or a callback (JAX has one in every
garbage collection), Python swallows it with a traceback; then it comes once more, a little later, and without one.
Whatever else swallows it, `check` raises it again. The loop of a run has its own handler, `asked_to_stop` in
experiment/run.py.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedjax_mr.experiment import streams

EXIT_CODE = 130
LINE = "fedjax-mr: interrupted\n"
SECONDS_TO_LEAVE = 0.05  # the callback in which Ctrl-C was swallowed
_received: list[int] = []  # the signals that became a KeyboardInterrupt


def begin() -> None:
    """Let Ctrl-C end the process at once if it is one of this package's commands, which is now being imported.

    Its standard streams become usable, whatever they are.

    Programs that import the package as a library keep their own handling.
    """
    if not _is_command():
        return
    streams.prepare()
    if _is_default():
        signal.signal(signal.SIGINT, _leave)
        atexit.register(leave_if_interrupted)  # the first to be registered is the last to be called


def run(main: Callable[[], int | None]) -> int | None:
    """Return what the main function of a command returns, 130 after Ctrl-C, or a code of `streams.run`."""
    if not _is_default(_leave):
        return streams.run(main)
    signal.signal(signal.SIGINT, _raise)
    sys.unraisablehook = _come_again
    try:
        return streams.run(main)
    except KeyboardInterrupt:
        sys.stderr.write(LINE)
        return EXIT_CODE
    finally:
        signal.signal(signal.SIGINT, _leave)  # all is saved and said; what is left is to close


def check() -> None:
    """Raise KeyboardInterrupt if one was raised before and has been swallowed."""
    if _received:
        raise KeyboardInterrupt


def _is_command() -> bool:
    """Return whether Python was started as ``python -m fedjax_mr.NAME`` or by the script ``fedjax-mr``."""
    first = sys.argv[0] if sys.argv else ""
    if first == "-m":  # what Python puts there while it looks for the module
        return any(word.removeprefix("-m").partition(".")[0] == "fedjax_mr" for word in sys.orig_argv)
    return Path(first).stem == "fedjax-mr"


def _is_default(*also: Any) -> bool:
    """Return whether this thread gets the signals and nobody has changed what Ctrl-C does, such as to ignore it."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, *also)


def _leave(number: int, frame: Any) -> None:
    os.write(2, LINE.encode())
    os._exit(EXIT_CODE)


def _come_again(swallowed: Any) -> None:
    """Report an error that Python cannot raise where it is; send Ctrl-C once more instead."""
    if swallowed.exc_type is KeyboardInterrupt:
        here = threading.get_ident(), signal.SIGINT  # to the main thread, where it came: so it also ends a wait
        threading.Timer(SECONDS_TO_LEAVE, signal.pthread_kill, here).start()
    else:
        sys.__unraisablehook__(swallowed)


def leave_if_interrupted() -> None:
    """After Ctrl-C, leave at once with its code.

    Python would kill this process by a second SIGINT if an exec() was hit, and it would wait for threads, such as those
    of a download.
    """
    if _received:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _raise(number: int, frame: Any) -> None:
    _received.append(number)
    raise KeyboardInterrupt
