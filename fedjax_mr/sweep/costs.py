"""The remaining rounds of a plan's runs, and an estimate of their time."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from fedjax_mr.config.config import Config
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import read_summary, run_state
from fedjax_mr.sweep.plan import PlannedRun
from fedjax_mr.sweep.process import Worker, last_words

CALIBRATION_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of a kind of run, in seconds."""

    start: float  # until the first round: Python, data, compilation
    round: float
    evaluation: float

    def of(self, config: Config, rounds: int) -> float:
        """The time of some rounds of a run, in seconds."""
        return self.start + rounds * self.round + -(-rounds // config.eval_every) * self.evaluation


def calibrate(run: PlannedRun, worker: Worker) -> Cost:
    """Measure the costs of a run by training a few rounds in a temporary folder.

    Raises:
      UserError: the run cannot start.
    """
    rounds = min(CALIBRATION_ROUNDS, run.config.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        short = dataclasses.replace(run.config, rounds=rounds, eval_every=rounds)
        run = dataclasses.replace(run, config=short, folder=Path(temporary) / "run")
        started = time.perf_counter()
        code = worker.train([run], lambda: None)
        wall = time.perf_counter() - started
        if code:
            raise UserError(f"{run.kind} cannot be timed: {last_words(run)}")
        summary = read_summary(run.folder)
    per_round = summary["seconds_per_round"]
    return Cost(wall - summary["seconds"], per_round, max(0.0, summary["seconds"] - rounds * per_round))


def estimate(runs: Sequence[PlannedRun]) -> dict[str, Cost]:
    """Measure one run of each kind that has rounds left, and return the costs by kind."""
    unfinished = {run.kind: run for run in reversed(runs) if run_state(run.folder) in ("new", "started")}
    bar = tqdm(unfinished.items(), desc="calibrating", leave=False, disable=not sys.stderr.isatty())
    with Worker() as worker:
        return {kind: calibrate(run, worker) for kind, run in bar}


def describe(runs: Sequence[PlannedRun], costs: Mapping[str, Cost] | None = None) -> str:
    """The plan as text, one line per run: folder, state, remaining rounds and, if ``costs`` are known, their time."""
    width = max(len(run.folder.name) for run in runs)
    lines, total, remaining = [], 0.0, 0
    for run in runs:
        state = run_state(run.folder)
        line = f"  {run.folder.name.ljust(width)}  {state:<8}"
        if state in ("new", "started"):
            rounds = run.config.rounds - run.done()
            line += f"  {rounds:>6,} rounds left"
            remaining += rounds
            if costs is not None:
                seconds = costs[run.kind].of(run.config, rounds)
                total += seconds
                line += f", {duration(seconds)}"
        lines.append(line)
    if costs is None:
        return "\n".join([*lines, f"{remaining:,} rounds left in total; --calibrate estimates their time"])
    return "\n".join([*lines, f"{duration(total)} in total on this machine at its current load"])


def duration(seconds: float) -> str:
    """A time in words, such as ``about 2 h 05 min``."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 100 else f"about {minutes // 60} h {minutes % 60:02d} min"
