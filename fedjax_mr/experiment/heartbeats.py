"""Heartbeats between the processes of a run, so that each of them notices the loss of another one and names it.

Fills: JAX (0.10 to 0.12) aborts the other processes from C++ when one is lost, with pages of text and no remedy.

A failed transfer raises an error, which `processes` turns into one line. But a process that waits for another one, or
hangs in a transfer, gets no error. So each process counts in the key-value store of JAX's coordination service. A
process whose count stops is lost; the others exit with one line. If the store itself does not answer, the machine of
process 0 is lost. JAX's own heartbeats are slower and act only if all Python threads stand still.
"""

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import jax

from fedjax_mr.errors import LostError

BEAT_SECONDS = 1.0
SILENT_BEATS = 20  # counted locally, so a process that was itself suspended does not report the others as lost
FAILED_BEATS = 5  # the same after a failed transfer
LAST_SECONDS = 2.0  # process 0 exits this much later, because it may keep the store that the others read
FOLDER = "fedjax_mr/heartbeats"
LEFT = "left"  # replaces the count of a process that has finished


class Heartbeats:
    """The threads that count for this process and watch the others."""

    def __init__(self, client: Any, index: int, count: int, on_loss: Callable[[list[int]], None]) -> None:
        """Prepare the threads.

        Args:
          client: client of JAX's coordination service.
          index: number of this process.
          count: number of processes.
          on_loss: called once with the numbers of the processes that are lost.
        """
        self.client = client
        self.index = index
        self.on_loss = on_loss
        self.lost: list[int] = []  # as found by `find_lost`
        self._silent_beats = {process: 0 for process in range(count) if process != index}
        self._answers = 0  # of the store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start to count and to watch."""
        self._thread.start()
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def stop(self, *, left: bool) -> None:
        """Stop counting. The others take this process for finished if ``left`` is set, and otherwise for lost."""
        self._stop.set()
        self._thread.join()
        if left:
            self._write(LEFT)

    def find_lost(self) -> list[int]:
        """Find out who is lost after a failed transfer: wait for `FAILED_BEATS`, and a little longer.

        Returns:
          The numbers of the lost processes; empty if all are alive.
        """
        for _ in range(2 * FAILED_BEATS):
            self.lost = self._silent(FAILED_BEATS) if self._thread.is_alive() else [0]  # without process 0, no store
            if self.lost:
                break
            time.sleep(BEAT_SECONDS)
        return self.lost

    def _silent(self, beats: int) -> list[int]:
        return [process for process, silent in self._silent_beats.items() if silent >= beats]

    def _beat(self) -> None:
        last = dict.fromkeys(self._silent_beats, "")
        for beat in itertools.count(1):
            if not self._write(str(beat)):
                return  # the store is gone, and JAX aborts this process
            for process in last:
                text = self._read(process)
                alive = text != last[process] or text == LEFT
                self._silent_beats[process] = 0 if alive else self._silent_beats[process] + 1
                last[process] = text
            if lost := self._silent(SILENT_BEATS):
                self.on_loss(lost)
                return
            if self._stop.wait(BEAT_SECONDS):
                return

    def _watch_store(self) -> None:
        """Report process 0 as lost if the store does not answer."""
        answers = silent_beats = 0
        while self._thread.is_alive():
            silent_beats = silent_beats + 1 if answers == self._answers else 0
            answers = self._answers
            if silent_beats > SILENT_BEATS:
                self.on_loss([0])
                return
            time.sleep(BEAT_SECONDS)

    def _write(self, text: str) -> bool:
        try:
            self.client.key_value_set(f"{FOLDER}/{self.index}", text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return False
        self._answers += 1
        return True

    def _read(self, process: int) -> str:
        try:
            return self.client.key_value_try_get(f"{FOLDER}/{process}")
        except jax.errors.JaxRuntimeError:  # it has not started to count
            return ""
        finally:
            self._answers += 1


def watch(client: Any, index: int, count: int) -> Heartbeats:
    """Start the heartbeats of this process, which run until Python ends.

    If another process is lost, this one exits with one line and code 4.

    Args:
      client: client of JAX's coordination service.
      index: number of this process.
      count: number of processes.
    """

    def end(lost: list[int]) -> None:
        newline = "\n" if sys.stderr.isatty() else ""  # ends the line of a progress bar
        reason = f"no sign of life for {SILENT_BEATS * BEAT_SECONDS:.0f} s"
        os.write(2, f"{newline}fedjax-mr: {lost_line(lost, count, reason)}\n".encode())
        exit_at_once(index, LostError.exit_code)

    def at_exit() -> None:
        """Called before JAX disconnects, which would wait for lost processes and then abort."""
        heartbeats.stop(left=not hasattr(sys, "last_type"))  # after an uncaught error the others must report a loss
        if heartbeats.lost:
            sys.stdout.flush()
            sys.stderr.flush()
            exit_at_once(index, LostError.exit_code)

    heartbeats = Heartbeats(client, index, count, end)
    heartbeats.start()
    atexit.register(at_exit)
    return heartbeats


def exit_at_once(index: int, code: int) -> NoReturn:
    """Exit without waiting for lost processes.

    Args:
      index: number of this process; process 0 gives the others time to read its store.
      code: the exit code.
    """
    if index == 0:
        time.sleep(LAST_SECONDS)
    os._exit(code)


def lost_line(lost: Iterable[int], count: int, reason: str) -> str:
    """The line that names the lost processes, the remedy and the reason."""
    named = " and ".join(f"process {process}" for process in lost)
    return f"lost {named} of {count}: go on with --resume ({reason})"
