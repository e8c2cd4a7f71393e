"""Signals of a command: Ctrl-C at any moment, and requests to stop a run.

Fills: Python drops a KeyboardInterrupt that arrives in a destructor or a callback, and JAX has a callback in every
garbage collection.

1. While a command imports, there is nothing to save: Ctrl-C exits at once with one line and code 130 (`begin`).
2. Later Ctrl-C is Python's KeyboardInterrupt, which closes files on its way out (`run`). If Python drops it, the signal
   is sent again. If a library catches it, `check` raises it again.
3. While a run trains, SIGINT and SIGTERM request a checkpoint and an end (`stop_signals`). A second Ctrl-C exits
   at once. A second SIGTERM does not, because job schedulers repeat it.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fedjax_mr.terminal import streams

EXIT_CODE = 130
LINE = "fedjax-mr: interrupted\n"
STOPPING = "\nstopping after the current rounds (press Ctrl-C again to stop at once) ..."
RESEND_SECONDS = 0.05  # by then the callback that dropped Ctrl-C has returned
_received: list[int] = []  # signals that became a KeyboardInterrupt


def begin() -> None:
    """Prepare a command of this package while it imports: Ctrl-C exits at once, and the standard streams work.

    The package calls it before its other imports, and only if it is imported for one of its commands.
    """
    streams.prepare()
    if _is_default():
        signal.signal(signal.SIGINT, _exit_at_once)
        atexit.register(leave_if_interrupted)  # registered first, so called last


def run(main: Callable[[], int | None]) -> int | None:
    """Run the main function of a command and return its exit code: 130 after Ctrl-C, or a code of `streams.run`."""
    sys.unraisablehook = _resend
    if not _is_default(_exit_at_once):
        return streams.run(main)
    signal.signal(signal.SIGINT, _raise)
    try:
        return streams.run(main)
    except KeyboardInterrupt:
        sys.stderr.write(LINE)
        return EXIT_CODE
    finally:
        signal.signal(signal.SIGINT, _exit_at_once)  # all results are saved and shown by now


def check() -> None:
    """Raise KeyboardInterrupt if an earlier one was dropped."""
    if _received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def stop_signals(
    react: Callable[[int], None] | None = None, numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[list[int]]:
    """Collect the signals that request a stop, and announce the stop on standard error.

    Args:
      react: called with the number of requests so far. Default: Ctrl-C as a second request raises KeyboardInterrupt.
      numbers: the signals.

    Yields:
      The list that receives the signals' numbers. It stays empty outside of the main thread, which gets no signals.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        if react is not None:
            react(len(received))
        elif number == signal.SIGINT and len(received) > 1:
            raise KeyboardInterrupt
        print(STOPPING, file=sys.stderr)

    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_default(*also: Any) -> bool:
    """Whether this is the main thread and the handler of Ctrl-C is Python's own, or one of ``also``."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, *also)


def _exit_at_once(number: int, frame: Any) -> None:
    os.write(2, LINE.encode())
    os._exit(EXIT_CODE)


def _resend(unraisable: Any) -> None:
    """Send Ctrl-C again if Python has dropped it, and report any other error that Python cannot raise.

    One kind is not reported: threads of TensorStore that end after a failed write, which the command reports itself.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        target = threading.get_ident(), signal.SIGINT  # the main thread, so the signal also ends a wait
        threading.Timer(RESEND_SECONDS, signal.pthread_kill, target).start()
    elif str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def leave_if_interrupted() -> None:
    """Exit at once with code 130 if Ctrl-C was received.

    Python would otherwise wait for threads, such as those of a download, and would end itself by a second SIGINT if
    Ctrl-C arrived in an exec().
    """
    if _received:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _raise(number: int, frame: Any) -> None:
    _received.append(number)
    raise KeyboardInterrupt
