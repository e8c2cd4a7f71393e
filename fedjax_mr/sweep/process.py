"""One run of a sweep, or several seeds in one program, as a process that is attended to its end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.errors import TakenError, UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.folder import is_remains, run_state
from fedjax_mr.experiment.locks import is_taken, lock_file
from fedjax_mr.experiment.run import Interrupted
from fedjax_mr.sweep.plan import PlannedRun

SECONDS_PER_LOOK = 0.5  # how often the bar looks at the metrics of the run under way
ABORTED = 1  # the exit code for runs that ended in no foreseen way


def run_in_process(runs: Sequence[PlannedRun], look: Callable[[], None]) -> int:
    """Train a run, or several seeds in one program, in a process of its own to the end, and return its exit code.

    Signals to stop are passed on, so that the process can write checkpoints. It also stops if this process is killed.

    Args:
      runs: go on from their last checkpoint if they have one.
      look: called twice a second meanwhile.

    Raises:
      Interrupted: the user asked to stop; the run has written its checkpoint.
    """
    first = runs[0]
    module = "fedjax_mr.main" if len(runs) == 1 else "fedjax_mr.sweep"
    command = [sys.executable, "-m", "fedjax_mr.experiment.attended", module]
    command += [*configuration.to_flags(first.config), "--noprogress"]
    if len(runs) == 1:
        command.append(f"--run_dir={first.folder}")
    else:
        command.append("--seeds=" + ",".join(str(run.config.seed) for run in runs))
        command += [f"--together={run.folder}" for run in runs]
    if run_state(first.folder) != "new":
        command.append("--resume")
    elif any((run.folder / "config.json").exists() or is_remains(run.folder) for run in runs):
        command.append("--overwrite")
    first.folder.parent.mkdir(parents=True, exist_ok=True)
    out_of_memory = _kills_for_memory()
    with (
        log_of(first).open("w", encoding="utf-8") as log,
        # A process group of its own: Ctrl-C in a terminal reaches the sweep alone, and the run exactly once.
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE, process_group=0) as process,
        _passed_on(process) as stopped,
    ):
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(SECONDS_PER_LOOK)
                break
            look()
        if code < 0 and not stopped:
            with contextlib.suppress(OSError):  # the process cannot say it any more; nor can a full disk take it
                os.write(log.fileno(), f"fedjax-mr: {_killed(-code, out_of_memory)}\n".encode())
    if stopped:
        raise Interrupted("stopped; the same command goes on", 128 + stopped[0])
    return code if code >= 0 else ABORTED


def _killed(number: int, out_of_memory: int | None) -> str:
    """Say which signal ended a process, and whether it was for lack of memory.

    Args:
      number: of the signal.
      out_of_memory: `_kills_for_memory` when the process began.
    """
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    if number != signal.SIGKILL or out_of_memory is None or _kills_for_memory() == out_of_memory:
        return f"killed by {name}"
    return f"killed by {name}: the memory was exhausted; a smaller --batch_size, --cohort or --lanes needs less"


def _kills_for_memory() -> int | None:
    """Return how many processes Linux has killed because memory ran out, in a container also those outside it.

    None where the system does not tell.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen) -> Iterator[list[int]]:
    """Pass signals to stop on to a process, the second as a kill; yield the list that receives their numbers."""
    stopped: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        stopped.append(number)
        # Always SIGTERM: what a shell starts in the background, and what that starts, ignores SIGINT.
        process.send_signal(signal.SIGKILL if len(stopped) > 1 else signal.SIGTERM)
        print("\nstopping after the rounds under way (once more: at once) ...", file=sys.stderr)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def claimed(run: PlannedRun) -> Iterator[None]:
    """Keep other sweeps from a run, by its log: the run's process takes the folder only seconds after its start.

    Raises:
      UserError: its folder cannot be written.
      TakenError: another process is at work in it, or about to be.
    """
    try:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {run.folder.parent} ({error.strerror})") from None
    descriptor = lock_file(log_of(run))
    try:  # the lock goes with the first descriptor of the log that is closed, which is after the run
        if is_taken(run.folder):
            raise TakenError(f"another process is at work in {run.folder}")
        yield
    finally:
        os.close(descriptor)


def log_of(run: PlannedRun) -> Path:
    """Return the file with what a run says, beside its folder."""
    return run.folder.with_name(f"{run.folder.name}.log")


def last_words(run: PlannedRun) -> str:
    """Return the last line of a run's log."""
    lines = log_of(run).read_text(encoding="utf-8", errors="replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    return words[-1].removeprefix("fedjax-mr: ") if words else "it said nothing"
