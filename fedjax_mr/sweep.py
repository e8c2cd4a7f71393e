"""Many runs by one command: the product of strategies, settings and seeds, one run folder each.

    python -m fedjax_mr.sweep --flagfile=exp/quickstart.flags --strategies=fedavg,fedmr --seeds=0:3 --grid alpha=0.1,0.5

Each run is a process of its own, ``python -m fedjax_mr.main``, which ends with the sweep: compiled programs take
hundreds of memory maps each, of which Linux allows a process 65,530, and a process that aborts takes no other run with
it. The compilation cache makes all but the first of a kind start quickly. The same command skips the runs that are
finished and goes on with those that are not, whatever was added to the sweep in between: a run is known by the settings
in its folder. (The digest in the folder's name keeps names apart.)
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fedjax_mr import config as configuration
from fedjax_mr import grids, interrupts, manual
from fedjax_mr.analysis import tables
from fedjax_mr.checks import complete, unequal_shares
from fedjax_mr.config import Config
from fedjax_mr.errors import DivergedError, TakenError, UserError
from fedjax_mr.experiment.folder import STATES, is_taken, lock_file, read_rows, run_state, runs_by_settings, saved_round
from fedjax_mr.experiment.run import Interrupted
from fedjax_mr.experiment.seeds import run_seeds
from fedjax_mr.settings import field, help_of, settings_of, values_of

COMMAND = "python -m fedjax_mr.sweep"
USAGE = f"""usage: {COMMAND} [--flag=value ...] [--flagfile=FILE ...]

Run the product of strategies, settings and seeds; the same command again skips the finished runs and goes on with the
others. All flags of {configuration.COMMAND} (its --help=all lists them) describe the runs, and these the sweep:
"""
SECONDS_PER_LOOK = 0.5  # how often the bar looks at the metrics of the run under way
CALIBRATION_ROUNDS = 2
ABORTED = 1  # the exit code for runs that ended in no foreseen way


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The settings of a sweep, beside the configuration of its runs."""

    strategies: str | None = field(None, "methods, separated by commas; none: the one of --strategy")
    seeds: str | None = field(None, "seeds, such as 0,1,5 or 0:3 (which is 0,1,2); none: the one of --seed")
    grid: tuple[str, ...] = field(
        (),
        "a setting and its values, such as alpha=0.1,0.5; repeat the flag for a product; a value may bring others "
        "along: partition=iid,dirichlet+alpha=0.1",
    )
    sweep_dir: str = field("runs/sweep", "folder of the run folders", path=True)
    batch_seeds: bool = field(
        False,
        "train the seeds of a setting in one compiled program; for accelerators (a CPU gains nothing, and needs "
        "--devices=1), and not for methods that work on the host between rounds",
    )
    together: tuple[str, ...] = field(
        (),
        "train in this process, in one program, the --seeds in these folders; --batch_seeds starts such processes",
        path=True,
    )
    dry_run: bool = field(False, "print the plan and train nothing")
    calibrate: bool = field(
        False, "with --dry_run: also estimate the time, from a few rounds of one run of each method and shape"
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
      config: the configuration of the run, without its folder.
      choice: the values of the grid, by flag.
      folder: its run folder.
    """

    config: Config
    choice: dict[str, Any]
    folder: Path

    @property
    def kind(self) -> str:
        """What decides about the run's time: method, shapes and epochs, but no rate, nor how the data are divided."""
        timeless = {each.flag for each in settings_of(configuration.Config) if each.info.group == "Partition"}
        coarse = [
            f"{name}={value}"
            for name, value in self.choice.items()
            if name in ("clients", "public_share") or not (isinstance(value, float) or name in timeless)
        ]
        return " ".join([self.config.strategy, *coarse])

    def done(self) -> int:
        """Return the rounds up to the last evaluation."""
        if not (self.folder / "metrics.jsonl").exists():
            return 0
        rows = read_rows(self.folder)
        return rows[-1]["round"] if rows else 0


# --- The plan --------------------------------------------------------------------------------------------------------


def plan(arguments: Sequence[str]) -> tuple[Sweep, list[Run]]:
    """Return the sweep that command-line flags describe and its runs, seed by seed within a setting.

    Settings that mean nothing to a strategy (``--grid fedmr_unit=...`` for FedAvg) do not multiply its runs.

    Raises:
      UserError: a bad flag, or a bad value in any of the runs; nothing was started.
    """
    config, sweep = configuration.parse_command(arguments, Sweep)
    for setting, value in values_of(sweep):
        setting.check(value)
    if config.run_dir or config.overwrite:
        raise UserError("a sweep names its run folders itself, in --sweep_dir; leave out --run_dir and --overwrite")
    strategies = grids.split("strategies", sweep.strategies, config.strategy)
    seeds = grids.seeds_of(sweep.seeds) or [config.seed]
    grid = grids.grid_of(sweep.grid, strategies)
    runs: dict[str, Run] = {}
    for strategy, values, seed in itertools.product(strategies, itertools.product(*grid), seeds):
        chosen = dict(pair for pairs in values for pair in pairs)
        flags = [*arguments, "--noresume", f"--strategy={strategy}", f"--seed={seed}"]
        flags += [f"--{name}={value}" for name, value in chosen.items()]
        one = complete(configuration.parse_command(flags, Sweep)[0])
        configuration.validate(one)
        plain, digest = configuration.to_json(one), configuration.digest(one)
        choice = {name: plain[name] for name in chosen if name in plain}
        words = [strategy, *(f"{name}={value}" for name, value in choice.items()), f"seed={seed}", digest]
        folder = Path(sweep.sweep_dir) / re.sub(r"[^\w.=-]+", "_", "-".join(words))
        runs.setdefault(digest, Run(one, choice, folder))
    begun = runs_by_settings(sweep.sweep_dir)  # perhaps by a version with fewer options, or in another grid
    for digest, run in runs.items():
        folders = sorted(begun.get(digest, []), key=lambda folder: STATES.index(run_state(folder)))
        runs[digest] = dataclasses.replace(run, folder=[run.folder, *folders][-1])
    return sweep, list(runs.values())


def describe(runs: Sequence[Run], costs: Mapping[str, "Cost"] | None = None) -> str:
    """Return the plan as lines: folder, state, rounds to go and, where the costs are known, the time that they take."""
    width = max(len(run.folder.name) for run in runs)
    lines, total, to_go = [], 0.0, 0
    for run in runs:
        state = run_state(run.folder)
        line = f"  {run.folder.name.ljust(width)}  {state:<8}"
        if state in ("new", "started"):
            rounds = run.config.rounds - run.done()
            line += f"  {rounds:>6,} rounds to go"
            to_go += rounds
            if costs is not None:
                seconds = costs[run.kind].of(run.config, rounds)
                total += seconds
                line += f", {duration(seconds)}"
        lines.append(line)
    if costs is None:
        return "\n".join([*lines, f"together {to_go:,} rounds; --calibrate estimates their time"])
    return "\n".join([*lines, f"together {duration(total)} on this machine as busy as it is now"])


def duration(seconds: float) -> str:
    """Return a time in words, such as ``about 2 h 05 min``."""
    minutes, hours = round(seconds / 60), int(seconds // 3600)
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 100 else f"about {hours} h {minutes - 60 * hours:02d} min"


# --- How long it will take -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of a kind of run, in seconds."""

    start: float  # until the first round: Python, data, compilation
    round: float
    evaluation: float

    def of(self, config: Config, rounds: int) -> float:
        """Return the time of some rounds of a run."""
        return self.start + rounds * self.round + -(-rounds // config.eval_every) * self.evaluation


def calibrate(run: Run) -> Cost:
    """Train a few rounds of a run in a folder that is thrown away, and return what they cost.

    Raises:
      UserError: the run cannot start.
    """
    rounds = min(CALIBRATION_ROUNDS, run.config.rounds)
    with tempfile.TemporaryDirectory() as temporary:
        short = dataclasses.replace(run.config, rounds=rounds, eval_every=rounds)
        run = dataclasses.replace(run, config=short, folder=Path(temporary) / "run")
        started = time.perf_counter()
        code = run_in_process([run], lambda: None)
        wall = time.perf_counter() - started
        if code:
            raise UserError(f"{run.kind} cannot be timed: {_last_words(run)}")
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    per_round = summary["seconds_per_round"]
    return Cost(wall - summary["seconds"], per_round, max(0.0, summary["seconds"] - rounds * per_round))


def estimate(runs: Sequence[Run]) -> dict[str, Cost]:
    """Return the costs of all kinds of runs that have rounds to go, from one calibration of each."""
    to_do = {run.kind: run for run in reversed(runs) if run_state(run.folder) in ("new", "started")}
    bar = tqdm(to_do.items(), desc="calibrating", leave=False, disable=not sys.stderr.isatty())
    return {kind: calibrate(run) for kind, run in bar}


# --- One run ---------------------------------------------------------------------------------------------------------


def run_in_process(runs: Sequence[Run], look: Callable[[], None]) -> int:
    """Train a run, or several seeds in one program, in a process of its own to the end, and return its exit code.

    Signals to stop are passed on, so that the process can write checkpoints. It also stops if this process is killed.

    Args:
      runs: go on from their last checkpoint if they have one.
      look: called twice a second meanwhile.
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
    elif any((run.folder / "config.json").exists() for run in runs):
        command.append("--overwrite")
    first.folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        _log_of(first).open("w", encoding="utf-8") as log,
        # A process group of its own: Ctrl-C in a terminal reaches the sweep alone, and the run exactly once.
        subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.PIPE, process_group=0) as process,
        _passed_on(process) as stopped,
    ):
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(SECONDS_PER_LOOK)
                break
            look()
    if stopped:
        raise Stopped(128 + stopped[0])
    return code if code >= 0 else ABORTED


class Stopped(Exception):
    """The user asked to stop; the run under way has written its checkpoint."""

    def __init__(self, exit_code: int) -> None:
        """Keep the code to exit with."""
        super().__init__("stopped; the same command goes on")
        self.exit_code = exit_code


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
def _claimed(run: Run) -> Iterator[None]:
    """Keep other sweeps from a run, by its log: the run's process takes the folder only seconds after its start.

    Raises:
      UserError: its folder cannot be written.
      TakenError: another process is at work in it, or about to be.
    """
    try:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write into {run.folder.parent} ({error.strerror})") from None
    descriptor = lock_file(_log_of(run))
    try:  # the lock goes with the first descriptor of the log that is closed, which is after the run
        if is_taken(run.folder):
            raise TakenError(f"another process is at work in {run.folder}")
        yield
    finally:
        os.close(descriptor)


def _log_of(run: Run) -> Path:
    return run.folder.with_name(f"{run.folder.name}.log")


def _last_words(run: Run) -> str:
    """Return the last line of a run's log."""
    lines = _log_of(run).read_text(encoding="utf-8", errors="replace").split("\n")
    words = [line.strip() for line in lines if line.strip()]
    return words[-1].removeprefix("fedjax-mr: ") if words else "it said nothing"


# --- All runs --------------------------------------------------------------------------------------------------------


def run_all(runs: Sequence[Run], *, batch_seeds: bool = False) -> int:
    """Train every run that is not finished, and return the exit code: 0, or that of the worst failure.

    Args:
      runs: as `plan` returns them.
      batch_seeds: train the seeds of a setting that are equally far in one program.

    Raises:
      Stopped: the user asked to stop.
    """
    codes = []
    bar = Bar(runs)
    try:
        for batch in batches(runs) if batch_seeds else [[run] for run in runs]:
            codes += _run_batch(batch, bar)
    finally:
        bar.close()
    return min((code for code in codes if code), default=0)


def _run_batch(batch: Sequence[Run], bar: "Bar") -> list[int]:
    """Train the runs of a batch that are to be trained in one process, and return their exit codes."""
    codes, todo = [], []
    with contextlib.ExitStack() as claims:
        for run in batch:
            if run_state(run.folder) == "diverged":
                codes.append(3)
                bar.say(f"{run.folder}: diverged before; remove its folder to try again")
            elif run_state(run.folder) != "finished":
                try:
                    claims.enter_context(_claimed(run))
                    todo.append(run)
                except TakenError:
                    codes.append(2)
                    bar.say(f"{run.folder}: another process is at work in it")
        if todo:
            code = run_in_process(todo, functools.partial(bar.show, todo))
            codes += [_code(run, code) for run in todo]
            for run in (run for run in todo if _code(run, code)):
                bar.say(f"{run.folder}: {_why(run, todo[0])} (exit code {_code(run, code)}; {_log_of(todo[0])})")
    for run in batch:
        bar.finish(run)
    return codes


def batches(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs, those together that differ in the seed alone and are equally far."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        without_seed = dataclasses.replace(run.config, seed=0, partition_seed=None)
        key = f"{configuration.digest(without_seed)} {run_state(run.folder)} {saved_round(run.folder)}"
        together.setdefault(key, []).append(run)
    return list(together.values())


def _code(run: Run, code: int) -> int:
    """Return the exit code of one run of a process that ended with ``code``."""
    return {"finished": 0, "diverged": 3}.get(run_state(run.folder), code or ABORTED)


def _why(run: Run, first: Run) -> str:
    """Return why a run did not finish; its process wrote the log of the ``first`` run."""
    note = run.folder / "diverged.txt"
    return note.read_text(encoding="utf-8").strip() if note.exists() else _last_words(first)


def run_together(config: Config, sweep: Sweep) -> int:
    """Train several seeds in this process and in one program; return the exit code.

    Raises:
      UserError: bad input, or what `run_seeds` refuses.
    """
    seeds = grids.seeds_of(sweep.seeds)
    if len(seeds) != len(sweep.together):
        raise UserError(f"--together names {len(sweep.together)} folders for {len(seeds)} --seeds")
    pairs = zip(seeds, sweep.together, strict=True)
    results = run_seeds([dataclasses.replace(config, seed=seed, run_dir=folder) for seed, folder in pairs])
    for folder, result in zip(sweep.together, results, strict=True):
        print(f"{folder}: {result if isinstance(result, DivergedError) else result.summary['accuracy_last']}")
    return max((result.exit_code for result in results if isinstance(result, DivergedError)), default=0)


class Bar:
    """A bar over the rounds of all runs on standard error, with the time left."""

    def __init__(self, runs: Sequence[Run]) -> None:
        """Show the bar where the runs are."""
        self._ended = 0
        self._runs = len(runs)
        over = {run.folder: run_state(run.folder) in ("finished", "diverged") for run in runs}
        self._done = {run.folder: run.config.rounds if over[run.folder] else run.done() for run in runs}
        self._bar = tqdm(
            total=sum(run.config.rounds for run in runs),
            initial=sum(self._done.values()),
            disable=not runs[0].config.progress,
            file=sys.stderr,
            dynamic_ncols=True,
            smoothing=0,
            mininterval=0.2 if sys.stderr.isatty() else 30.0,
            bar_format="{desc} |{bar}| {percentage:3.0f}%{postfix}, {remaining} left",
        )

    def show(self, runs: Sequence[Run]) -> None:
        """Move the bar to where the runs under way are."""
        for run in runs:
            self._move(run, run.done())
        first = runs[0].folder
        row = read_rows(first)[-1:] if (first / "metrics.jsonl").exists() else []
        accuracy = f": accuracy {row[0]['accuracy']:.4f}" if row and row[0]["accuracy"] is not None else ""
        others = f" (of {len(runs)} seeds together)" if len(runs) > 1 else ""
        self._bar.set_postfix_str(f"{first.name}{others}{accuracy}", refresh=sys.stderr.isatty())

    def finish(self, run: Run) -> None:
        """Count a run as ended, with all its rounds."""
        self._ended += 1
        self._move(run, run.config.rounds)

    def _move(self, run: Run, done: int) -> None:
        self._bar.set_description_str(f"{self._ended}/{self._runs} runs", refresh=False)
        self._bar.update(done - self._done[run.folder])
        self._done[run.folder] = done

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(f"fedjax-mr: {line}", file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        self._bar.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep and return the exit code.

    0: all runs are finished; 1: one aborted; 2: bad input, here or in a run; 3: one diverged; 128 + n: signal n.

    Args:
      arguments: the flags, without the program's name; None reads the command line.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if (topic := manual.asked(arguments)) is not None:
            configuration.read_imports(arguments)
            print(manual.page(topic) if topic else USAGE + help_of(Sweep))
            return 0
        config, sweep = configuration.parse_command(arguments, Sweep)
        if sweep.together:
            return run_together(config, sweep)
        sweep, runs = plan(arguments)
        if sweep.calibrate and not sweep.dry_run:
            raise UserError("--calibrate estimates the time of a plan: give --dry_run, too")
        for note in unequal_shares([run.config for run in runs]):
            print(note, file=sys.stderr)
        if sweep.dry_run:
            print(f"{len(runs)} runs in {sweep.sweep_dir}:")
            print(describe(runs, estimate(runs) if sweep.calibrate else None))
            return 0
        code = run_all(runs, batch_seeds=sweep.batch_seeds)
        begun = [run.folder for run in runs if (run.folder / "config.json").exists()]
        if begun:
            print(tables.accuracy_table(begun))
    except (UserError, Stopped, Interrupted) as reason:
        print(f"fedjax-mr: {reason}", file=sys.stderr)
        return reason.exit_code
    return code


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
