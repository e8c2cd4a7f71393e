"""The process that trains the runs of a sweep, one after the other.

    python -m fedjax_mr.sweep.process DESCRIPTOR

reads jobs from standard input, one JSON object per line: a module with a function ``main``, its arguments, and the log
of the run. After each run that leaves the process fit for another one, it writes a line with the exit code to the file
descriptor; otherwise it exits with that code.

The process stops with its starter, which keeps the writing end of its standard input. The operating system closes it
when the starter exits, even if it is killed; then this process sends itself SIGTERM, so the run writes its checkpoint.
(The worker of a `concurrent.futures.ProcessPoolExecutor` would train on without its starter. It takes no signals, and
its end by a signal is an error without the signal's number.)
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedjax_mr.config import config as configuration
from fedjax_mr.engine.devices import cpu_devices
from fedjax_mr.errors import DivergedError, Interrupted, TakenError, UserError
from fedjax_mr.experiment.folder import is_leftover, run_state
from fedjax_mr.experiment.processes import leave
from fedjax_mr.results.locks import is_taken, lock_file
from fedjax_mr.sweep.plan import PlannedRun
from fedjax_mr.sweep.together import BETWEEN
from fedjax_mr.terminal import interrupts

SECONDS_PER_LOOK = 0.5  # how often the progress bar reads the metrics of the current run
ABORTED = 1  # the exit code of runs that a signal has killed
COMPLETE = (0, DivergedError.exit_code)  # exit codes after which a process trains the next run
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A worker is replaced before it reaches a limit of its process, or holds memory that the next run may need.
MOST_RUNS = 100
MOST_MAPS = 30_000  # memory maps, of which Linux allows 65,530; a compiled program takes hundreds
MOST_BYTES = 2 * 1024**3  # that stay in memory between two runs


class Worker:
    """A process that trains the runs of a sweep one after the other, so later runs need no imports and no compilation.

    It is started for the first run. It is replaced after a failure, for a run that needs another set-up of JAX, and
    before it reaches a limit (see `MOST_RUNS`).
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen | None = None
        self._codes = -1  # descriptor from which the exit codes are read
        self._set_up: Hashable = None

    def __enter__(self) -> "Worker":
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the process."""
        self.stop()

    def train(self, runs: Sequence[PlannedRun], look: Callable[[], None]) -> int:
        """Train a run, or several trials in one program, and return the exit code.

        A run that fails in a process that has trained others is tried again in a fresh one, so earlier runs have no
        influence on it. It resumes from its last checkpoint.

        Args:
          runs: the run, or the trials. They resume from their last checkpoint, if there is one.
          look: called twice a second while the process works.

        Raises:
          Interrupted: a stop signal was received; the run has written its checkpoint.
        """
        set_up = _set_up_of(runs)
        if set_up != self._set_up:
            self.stop()
        fresh = self._process is None
        first = runs[0]
        first.folder.parent.mkdir(parents=True, exist_ok=True)
        with log_of(first).open("a", encoding="utf-8") as log:
            log.truncate(0)
            code = self._train(runs, look, log)
            if code not in COMPLETE and not fresh:
                code = self._train(runs, look, log)
        self._set_up = set_up
        return code

    def _train(self, runs: Sequence[PlannedRun], look: Callable[[], None], log: TextIO) -> int:
        module, arguments = command_of(runs)
        job = {"module": module, "arguments": arguments, "log": str(log_of(runs[0]).absolute())}
        out_of_memory = _kills_for_memory()
        process = self._process or self._start(log)
        # From here on a stop signal is for the run, also while the process still imports.
        with interrupts.stop_signals(functools.partial(_forward, process), STOP_SIGNALS) as stopped:
            code = self._exit_code(process, job, look)
        if code < 0 and not stopped:
            with contextlib.suppress(OSError):  # the disk may be full
                os.write(log.fileno(), f"fedjax-mr: {_killed(-code, out_of_memory)}\n".encode())
        if stopped:
            raise Interrupted("stopped; run the same command again to continue", 128 + stopped[0])
        return code if code >= 0 else ABORTED

    def _start(self, log: TextIO) -> subprocess.Popen:
        """Start the process. Its output before the first run is written to the log of that run."""
        self._codes, writing = os.pipe()
        try:
            # A process group of its own: Ctrl-C in a terminal reaches only the sweep, which forwards it once.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedjax_mr.sweep.process", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                process_group=0,
            )
        finally:
            os.close(writing)
        return self._process

    def _exit_code(self, process: subprocess.Popen, job: dict[str, Any], look: Callable[[], None]) -> int:
        """Give a job to the process and wait for its exit code: negative if a signal has killed it."""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; its code says why
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        while process.poll() is None and not select.select([self._codes], [], [], SECONDS_PER_LOOK)[0]:
            look()
        if process.poll() is None and (line := os.read(self._codes, 100)):
            return int(line)
        code = process.wait()
        self.stop()
        return code

    def stop(self) -> None:
        """Stop the process and wait until it has ended. A run that it still trains writes its checkpoint."""
        if self._process is None:
            return
        process, self._process = self._process, None
        os.close(self._codes)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


def _set_up_of(runs: Sequence[PlannedRun]) -> Hashable:
    """The settings that a process cannot change: the number of JAX's CPU devices, and the imported methods."""
    config = runs[0].config
    return cpu_devices(config.devices, len(runs) * config.cohort), config.imports


def command_of(runs: Sequence[PlannedRun]) -> tuple[str, list[str]]:
    """The module and the arguments that train a run, or several trials in one program, or resume them."""
    if len(runs) == 1:
        return "fedjax_mr.main", _arguments(runs[0])
    return "fedjax_mr.sweep.together", functools.reduce(lambda a, b: [*a, BETWEEN, *b], map(_arguments, runs))


def _arguments(run: PlannedRun) -> list[str]:
    arguments = [*configuration.to_flags(run.config), "--noprogress", f"--run_dir={run.folder}"]
    if run_state(run.folder) != "new":
        arguments.append("--resume")
    elif (run.folder / "config.json").exists() or is_leftover(run.folder):
        arguments.append("--overwrite")
    return arguments


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
    try:
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
    try:
        lines = log_of(run).read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return "its process has ended before it began to train"
    words = [line.strip() for line in lines if line.strip()]
    return words[-1].removeprefix("fedjax-mr: ") if words else "its log is empty"


# --- The process -----------------------------------------------------------------------------------------------------


def _main(codes: int) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # from Slurm, which may send it to all processes: for the starter
    os.set_inheritable(codes, False)  # what a run starts does not keep it open
    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_read_jobs, args=(jobs, busy), daemon=True).start()
    number = 0
    while job := jobs.get():
        number += 1
        code = _run(**job)
        busy.clear()
        if code not in COMPLETE or is_worn(number):
            leave(code)
        with contextlib.suppress(BrokenPipeError):  # the starter is gone; its end of the jobs is closed, too
            os.write(codes, f"{code}\n".encode())


def _read_jobs(jobs: "queue.SimpleQueue[dict[str, Any] | None]", busy: threading.Event) -> None:
    for line in os.fdopen(0, closefd=False):
        busy.set()
        jobs.put(json.loads(line))
    jobs.put(None)
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _run(module: str, arguments: list[str], log: str) -> int:
    """Run the function ``main`` of a module and return its exit code. Its output is added to a log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the memory is that of this run
    with warnings.catch_warnings():  # warnings that are shown once are shown once per run
        code = interrupts.run(lambda: importlib.import_module(module).main(arguments)) or 0
    sys.stdout.flush()
    sys.stderr.flush()
    gc.collect()  # closes the files of the run, such as the lock of its folder
    return code


def is_worn(count: int) -> bool:
    """Whether this process should train no further run after ``count`` runs (see `MOST_RUNS`)."""
    try:
        maps = Path("/proc/self/maps").read_bytes().count(b"\n")
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # another system than Linux
        maps = resident = 0
    return count >= MOST_RUNS or maps > MOST_MAPS or resident > MOST_BYTES


if __name__ == "__main__":
    _main(int(sys.argv[1]))
