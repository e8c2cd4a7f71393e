"""The runs of a sweep, and the launcher that trains them on this machine.

`fedjax_mr.sweep.slurm` is the launcher that makes them jobs of a cluster.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from fedjax_mr.errors import TakenError
from fedjax_mr.experiment import trials
from fedjax_mr.experiment.folder import saved_round
from fedjax_mr.sweep.bar import Bar
from fedjax_mr.sweep.plan import PlannedRun
from fedjax_mr.sweep.process import ABORTED, Worker, claimed, last_words, log_of

Launcher = Callable[[Sequence[Sequence[PlannedRun]], Bar], dict[Path, int]]
"""Trains the runs of batches that have not ended (`code_if_ended`) and returns the exit codes by folder.

The runs of a batch are trained in one program where that pays. The launcher moves the bar, says what failed, and
raises `Interrupted` after a stop signal.
"""

MOST_TOGETHER = 16  # trials in one program


def run_all(runs: Sequence[PlannedRun], *, batch: bool = False, launch: Launcher | None = None) -> int:
    """Train every run that is not finished, and return the exit code: 0, or that of the worst failure.

    Args:
      runs: the runs of `plan`.
      batch: whether runs that differ only in arguments of their programs are trained together (`batches`).
      launch: trains them. Default: `one_by_one`.

    Raises:
      Interrupted: a stop signal was received.
      UserError: the launcher cannot work here.
    """
    bar = Bar(runs)
    try:
        codes = (launch or one_by_one)(batches(runs) if batch else [[run] for run in by_kind(runs)], bar)
    finally:
        bar.close()
    # Another process may have finished its runs by now.
    finished = {run.folder for run in runs if run.state() == "finished"}
    return min((code for folder, code in codes.items() if code and folder not in finished), default=0)


def code_if_ended(run: PlannedRun, bar: Bar) -> int | None:
    """The exit code of a run that has ended before: 0 finished, 3 diverged. None if it has not ended."""
    state = run.state()
    if state == "diverged":
        bar.say(f"{run.folder}: diverged before; remove its folder to train it again")
    return {"finished": 0, "diverged": 3}.get(state)


def one_by_one(batches: Sequence[Sequence[PlannedRun]], bar: Bar, *, worker: Worker | None = None) -> dict[Path, int]:
    """Train the batches in a process of this machine, one after the other, and return the exit codes by folder.

    Args:
      batches: the batches.
      bar: shows the progress.
      worker: the process, which is kept. Default: one that stops at the end.
    """
    codes: dict[Path, int] = {}
    with contextlib.ExitStack() as stack:
        worker = worker or stack.enter_context(Worker())
        for batch in batches:
            codes |= _run_batch(batch, worker, bar)
    return codes


def by_kind(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Order the runs so that those of a kind follow each other and share compiled programs."""
    kinds = list(dict.fromkeys(run.kind for run in runs))
    return sorted(runs, key=lambda run: kinds.index(run.kind))


def _run_batch(batch: Sequence[PlannedRun], worker: Worker, bar: Bar) -> dict[Path, int]:
    """Train the unfinished runs of a batch in one program, and return the exit codes by folder."""
    codes, unfinished = {}, []
    with contextlib.ExitStack() as claims:
        for run in batch:
            if (code := code_if_ended(run, bar)) is not None:
                codes[run.folder] = code
            else:
                try:
                    claims.enter_context(claimed(run))
                    unfinished.append(run)
                except TakenError:
                    codes[run.folder] = 2
                    bar.say(f"{run.folder}: another process uses it")
        if unfinished:
            code = worker.train(unfinished, functools.partial(bar.show, unfinished))
            codes |= {run.folder: code_of(run, code) for run in unfinished}
            log = log_of(unfinished[0])
            for run in (run for run in unfinished if codes[run.folder]):
                bar.say(f"{run.folder}: {why(run, unfinished[0])} (exit code {codes[run.folder]}; {log})")
    for run in batch:
        if run in unfinished:
            bar.finish(run)
        else:
            bar.leave(run)
    return codes


def batches(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """Group the runs that `trials.run_together` can train: equal `trials.kind`, equal number of completed rounds."""
    together: dict[str, list[PlannedRun]] = {}
    for run in runs:
        key = f"{trials.kind(run.config)} {run.state()} {saved_round(run.folder)}"
        together.setdefault(key, []).append(run)
    parts = lambda group: [group[first : first + MOST_TOGETHER] for first in range(0, len(group), MOST_TOGETHER)]
    return [part for group in together.values() for part in parts(group)]


def code_of(run: PlannedRun, code: int) -> int:
    """The exit code of one run of a process that exited with ``code``."""
    return {"finished": 0, "diverged": 3}.get(run.state(), code or ABORTED)


def why(run: PlannedRun, first: PlannedRun) -> str:
    """The reason why a run did not finish; its process wrote the log of the ``first`` run."""
    note = run.folder / "diverged.txt"
    return note.read_text(encoding="utf-8").strip() if note.exists() else last_words(first)
