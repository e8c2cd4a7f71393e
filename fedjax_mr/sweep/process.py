"""One run of a sweep, or several seeds in one program, as a process of its own.

    python -m fedjax_mr.sweep.process MODULE [ARGUMENT ...]

runs a module as ``python -m MODULE`` does, but stops with the process that started it. The starter keeps the writing
end of this process's standard input. The operating system closes it when the starter exits, even if it is killed; then
this process sends itself SIGTERM, so the run writes its checkpoint.
"""

import contextlib
import functools
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedjax_mr.errors import TakenError, UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import interrupts
from fedjax_mr.experiment.folder import is_leftover, run_state
from fedjax_mr.experiment.locks import is_taken, lock_file
from fedjax_mr.experiment.run import Interrupted
from fedjax_mr.sweep.plan import PlannedRun

SECONDS_PER_LOOK = 0.5  # how often the progress bar reads the metrics of the current run
ABORTED = 1  # the exit code of runs that a signal has killed
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_in_process(runs: Sequence[PlannedRun], look: Callable[[], None]) -> int:
    """Train a run, or several seeds in one program, in a process of its own, and return its exit code.

    Stop signals are forwarded, so the process can write checkpoints. It also stops if this process is killed.

    Args:
      runs: the run, or the seeds. They resume from their last checkpoint, if there is one.
      look: called twice a second while the process runs.

    Raises:
      Interrupted: a stop signal was received; the run has written its checkpoint.
    """
    first = runs[0]
    module = "fedjax_mr.main" if len(runs) == 1 else "fedjax_mr.sweep"
    command = [sys.executable, "-m", "fedjax_mr.sweep.process", module]
    command += [*configuration.to_flags(first.config), "--noprogress"]
    if len(runs) == 1:
        command.append(f"--run_dir={first.folder}")
    else:
        command.append("--seeds=" + ",".join(str(run.config.seed) for run in runs))
        command += [f"--together={run.folder}" for run in runs]
    if run_state(first.folder) != "new":
        command.append("--resume")
    elif any((run.folder / "config.json").exists() or is_leftover(run.folder) for run in runs):
        command.append("--overwrite")
    first.folder.parent.mkdir(parents=True, exist_ok=True)
    out_of_memory = _kills_for_memory()
    with (
        log_of(first).open("w", encoding="utf-8") as log,
        # A process group of its own: Ctrl-C in a terminal reaches only the sweep, which forwards it once.
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE, process_group=0) as process,
        interrupts.stop_signals(functools.partial(_forward, process), STOP_SIGNALS) as stopped,
    ):
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(SECONDS_PER_LOOK)
                break
            look()
        if code < 0 and not stopped:
            with contextlib.suppress(OSError):  # the disk may be full
                os.write(log.fileno(), f"fedjax-mr: {_killed(-code, out_of_memory)}\n".encode())
    if stopped:
        raise Interrupted("stopped; run the same command again to continue", 128 + stopped[0])
    return code if code >= 0 else ABORTED


def _killed(number: int, out_of_memory: int | None) -> str:
    """Describe the signal that ended a process, and whether memory was exhausted.

    Args:
      number: number of the signal.
      out_of_memory: `_kills_for_memory` at the start of the process.
    """
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    if number != signal.SIGKILL or out_of_memory is None or _kills_for_memory() == out_of_memory:
        return f"killed by {name}"
    return f"killed by {name}: the memory was exhausted; a smaller --batch_size, --cohort or --lanes needs less"


def _kills_for_memory() -> int | None:
    """Number of processes that Linux has killed because memory ran out, also outside of this container.

    None if the system does not report it.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _forward(process: subprocess.Popen, count: int) -> None:
    """Forward the first stop request as SIGTERM and the second as SIGKILL.

    SIGINT would not do: a shell's background jobs, and the processes that they start, ignore it.
    """
    process.send_signal(signal.SIGKILL if count > 1 else signal.SIGTERM)


@contextlib.contextmanager
def claimed(run: PlannedRun) -> Iterator[None]:
    """Reserve a run for this sweep by locking its log, because the run's process locks its folder only seconds later.

    Raises:
      UserError: the run's folder cannot be written.
      TakenError: another process uses the folder, or is about to.
    """
    try:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {run.folder.parent} ({error.strerror})") from None
    descriptor = lock_file(log_of(run))
    try:  # closing any descriptor of the log releases the lock; the first one is closed after the run
        if is_taken(run.folder):
            raise TakenError(f"another process uses {run.folder}")
        yield
    finally:
        os.close(descriptor)


def is_claimed(run: PlannedRun) -> bool:
    """Whether another process trains a run or is about to.

    Raises:
      UserError: the run's folder cannot be written.
    """
    try:
        with claimed(run):
            return False
    except TakenError:
        return True


def log_of(run: PlannedRun) -> Path:
    """The log of a run: the file beside its folder with all that its process prints."""
    return run.folder.with_name(f"{run.folder.name}.log")


def last_words(run: PlannedRun) -> str:
    """The last line of a run's log."""
    lines = log_of(run).read_text(encoding="utf-8", errors="replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    return words[-1].removeprefix("fedjax-mr: ") if words else "its log is empty"


# --- The process -----------------------------------------------------------------------------------------------------


def _main() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # from Slurm, which may send it to all processes: for the starter
    threading.Thread(target=_stop_with_starter, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _stop_with_starter() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _main()
