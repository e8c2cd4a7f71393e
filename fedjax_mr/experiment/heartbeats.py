"""Signs of life between the processes of a run, so that whoever is left ends with the remedy, whatever it waits for.

A transfer that breaks raises an error, which `processes` turns into one line. But a process that waits for another's
text, or in a transfer that hangs, hears of nothing: in the end JAX's service, which has its own heartbeats, aborts it
from C++ with pages of text and without the remedy. Here every process counts aloud, and ends itself, in one line, when
another has stopped counting, or when the store of texts does not answer (the machine of process 0 is gone). JAX's own
heartbeats are slower, for the case that all of Python stands still.
"""

import atexit
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from fedjax_mr.errors import LostError

BEAT_SECONDS = 1.0
SILENT_BEATS = 20  # by one's own count: a process that was suspended itself blames nobody
LAST_SECONDS = 2.0  # how much later than the others process 0 goes, which holds what they ask
FOLDER = "fedjax_mr/heartbeats"
LEFT = "left"  # in place of the count: has done its part


class Heartbeats:
    """The thread that counts for this process and listens to the others."""

    def __init__(self, client: Any, index: int, count: int, on_silence: Callable[[list[int]], None]) -> None:
        """Prepare it.

        Args:
          client: of JAX's coordination service, whose store of texts all processes share.
          index: this process's number.
          count: how many processes there are.
          on_silence: called once with those that fell silent.
        """
        self.client = client
        self.index = index
        self.others = [process for process in range(count) if process != index]
        self.on_silence = on_silence
        self._answers = 0  # of the store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Begin to count."""
        self._thread.start()
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def stop(self, *, left: bool) -> None:
        """Stop counting; ``left`` tells the others that nothing is missing, otherwise this process is soon lost."""
        self._stop.set()
        self._thread.join()
        if left:
            self._say(LEFT)

    def _beat(self) -> None:
        heard = dict.fromkeys(self.others, "")
        since = dict.fromkeys(self.others, 0)
        for beat in itertools.count(1):
            if not self._say(str(beat)):
                return  # the store is gone, and JAX ends this process
            for process in self.others:
                said = self._hear(process)
                if said != heard[process]:
                    heard[process], since[process] = said, beat
            silent = [each for each in self.others if heard[each] != LEFT and beat - since[each] >= SILENT_BEATS]
            if silent:
                self.on_silence(silent)
                return
            if self._stop.wait(BEAT_SECONDS):
                return

    def _watch_store(self) -> None:
        """Report process 0 as lost when the store, which is on its machine, does not answer at all."""
        answers = silent_beats = 0
        while self._thread.is_alive():
            silent_beats = silent_beats + 1 if answers == self._answers else 0
            answers = self._answers
            if silent_beats > SILENT_BEATS:
                self.on_silence([0])
                return
            time.sleep(BEAT_SECONDS)

    def _say(self, text: str) -> bool:
        try:
            self.client.key_value_set(f"{FOLDER}/{self.index}", text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return False
        self._answers += 1
        return True

    def _hear(self, process: int) -> str:
        try:
            return self.client.key_value_try_get(f"{FOLDER}/{process}")
        except jax.errors.JaxRuntimeError:  # has not begun
            return ""
        finally:
            self._answers += 1


def watch(client: Any, index: int, count: int) -> None:
    """Count, and end this process with code 4 when another falls silent, until Python ends.

    Args:
      client: of JAX's coordination service.
      index: this process's number.
      count: how many there are.
    """

    def end(silent: list[int]) -> None:
        newline = "\n" if sys.stderr.isatty() else ""  # after a bar of progress
        reason = f"no sign of life for {SILENT_BEATS * BEAT_SECONDS:.0f} s"
        os.write(2, f"{newline}fedjax-mr: {lost_line(silent, count, reason)}\n".encode())
        if index == 0:
            time.sleep(LAST_SECONDS)
        os._exit(LostError.exit_code)

    heartbeats = Heartbeats(client, index, count, end)
    heartbeats.start()
    # Called before JAX parts from its service. After an error that nobody caught, the others are to miss this process.
    atexit.register(lambda: heartbeats.stop(left=not hasattr(sys, "last_type")))


def lost_line(lost: Iterable[int], count: int, reason: str) -> str:
    """Return what a process says when others are lost: their numbers, the remedy and how it noticed."""
    named = " and ".join(f"process {process}" for process in lost)
    return f"lost {named} of {count}: go on with --resume ({reason})"
