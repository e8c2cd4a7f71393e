"""The plan of a sweep: its settings and the resulting runs."""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import settings_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.folder import STATES, read_rows, read_summary, run_state, runs_by_settings
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.results import kept
from fedjax_mr.settings import field
from fedjax_mr.sweep import grids
from fedjax_mr.terminal.messages import flags_in_errors


@dataclasses.dataclass(frozen=True)
class Training:
    """How runs are trained: the settings that all commands with many runs share."""

    batch: bool = field(
        False,
        "Train runs of a method that differ only in seed, partition and numbers, such as --lr, in one compiled program "
        "where that pays: on accelerators, and on CPUs if one run leaves cores idle. Other runs train one by one",
    )
    launcher: str = field(
        "local",
        "Where the runs are trained: on this machine (local), or as jobs of a Slurm cluster (slurm), which needs the "
        "extra 'slurm'",
        choices=("local", "slurm"),
    )
    slurm_partition: str | None = field(None, "Slurm's partition. If omitted, the cluster's default")
    slurm_time: str | None = field(
        None,
        "Time limit of a job, as minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS. A run that needs longer is saved and "
        "continues in another turn. If omitted, the partition's default",
    )
    slurm_gpus: int | None = field(None, "GPUs of each run. If omitted, none are requested", unit="GPUs", low=0)
    slurm_cpus: int | None = field(None, "Cores of each run. If omitted, the cluster's default", unit="cores", low=1)
    slurm_memory: int | None = field(None, "Memory of each run. If omitted, the cluster's default", unit="GiB", low=1)
    slurm_option: tuple[str, ...] = field(
        (), "Any other option of Slurm's sbatch, such as account=NAME, qos=NAME or constraint=NAME"
    )


@dataclasses.dataclass(frozen=True)
class Sweep(Training):
    """The settings of a sweep, in addition to the configuration of its runs."""

    strategies: str | None = field(None, "Methods, separated by commas. If omitted, the one of --strategy")
    seeds: str | None = field(None, "Seeds, such as 0,1,5 or 0:3 (which is 0,1,2). If omitted, the one of --seed")
    grid: tuple[str, ...] = field(
        (),
        "A setting and its values, such as alpha=0.1,0.5. Several of these flags make the product of their values. A "
        "value may set others: partition=iid,dirichlet+alpha=0.1",
    )
    sweep_dir: str = field("runs/sweep", "Folder that holds the run folders", path=True)
    kept: str | None = field(
        None,
        "Table of kept runs (NAME.jsonl.gz), or folder that holds tables or run folders. Runs that have ended there "
        "are not trained again",
        path=True,
    )
    wait: bool = field(
        True, "slurm: show the progress until all jobs have ended. The jobs do not need this command: it can be stopped"
    )
    dry_run: bool = field(False, "Print the plan and train nothing")
    calibrate: bool = field(
        False, "With --dry_run, also estimate the time, from a few rounds of one run of each method and shape"
    )


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
      config: configuration of the run, without its folder.
      choice: values of the grid, by flag.
      folder: run folder.
    """

    config: Config
    choice: dict[str, Any]
    folder: Path

    @property
    def kind(self) -> str:
        """The settings that determine the time of a round: strategy, sizes and epochs, not rates or partition."""
        timeless = {each.flag for each in settings_of(configuration.Config) if each.info.group == "Partition"}
        coarse = [
            f"{name}={value}"
            for name, value in self.choice.items()
            if name in ("clients", "public_share") or not (isinstance(value, float) or name in timeless)
        ]
        return " ".join([self.config.strategy, *coarse])

    def state(self) -> str:
        """How far the run is. A run that has finished fewer rounds than planned has only ``started``."""
        state = run_state(self.folder)
        if state == "finished" and not kept.is_kept(self.folder):
            summary, saved = read_summary(self.folder), configuration.load(self.folder)
            if saved.rounds < self.config.rounds and summary.get("ended_by", "rounds") == "rounds":
                return "started"
        return state

    def done(self) -> int:
        """The number of rounds up to the last evaluation."""
        if not (self.folder / "metrics.jsonl").exists():
            return 0
        try:
            rows = read_rows(self.folder)
        except UserError:
            return 0  # the run's process reports what is wrong
        return rows[-1]["round"] if rows else 0


def plan(arguments: Sequence[str]) -> tuple[Sweep, list[PlannedRun]]:
    """Parse a sweep and its runs from command-line flags. The runs of a setting are ordered by seed.

    Settings that do not apply to a strategy (``--grid fedmr_unit=...`` for FedAvg) do not multiply its runs.

    Raises:
      UserError: a bad flag, or a bad value in any of the runs; no run was started.
    """
    config, sweep = configuration.parse_command(arguments, Sweep)
    if config.run_dir or config.overwrite:
        raise UserError("a sweep chooses its run folders inside --sweep_dir: remove --run_dir and --overwrite")
    strategies = grids.split("strategies", sweep.strategies, config.strategy)
    seeds = grids.seeds_of(sweep.seeds) or [config.seed]
    grid = grids.grid_of(sweep.grid, strategies)
    count = len(strategies) * len(seeds) * math.prod(map(len, grid))
    if count > grids.MOST_RUNS:
        raise UserError(f"--strategies, --seeds and --grid make {count:,} runs, more than {grids.MOST_RUNS:,}")
    runs: dict[str, PlannedRun] = {}
    for strategy, values, seed in itertools.product(strategies, itertools.product(*grid), seeds):
        chosen = dict(pair for pairs in values for pair in pairs)
        run = plan_run(arguments, Sweep, strategy=strategy, seed=seed, chosen=chosen, parent=sweep.sweep_dir)
        runs.setdefault(configuration.digest(run.config), run)
    begun = runs_by_settings(sweep.sweep_dir)  # also by older versions with fewer options, or in another grid
    elsewhere = _kept_runs(sweep.kept) if sweep.kept else {}
    for digest, run in runs.items():
        folders = [*elsewhere.get(configuration.digest(configuration.portable(run.config)), []), *begun.get(digest, [])]
        folders.sort(key=lambda folder: STATES.index(run_state(folder)))
        runs[digest] = dataclasses.replace(run, folder=[run.folder, *folders][-1])
        _require_whole(runs[digest])
    return sweep, list(runs.values())


def plan_run(
    arguments: Sequence[str], owner: type, *, strategy: str, seed: int, chosen: Mapping[str, str], parent: Path | str
) -> PlannedRun:
    """Plan one run.

    Args:
      arguments: the flags of a command.
      owner: the dataclass of the command's additional flags.
      strategy: the method.
      seed: the seed.
      chosen: values by flag that replace those of the command.
      parent: the folder that will hold the run folder.

    Raises:
      UserError: a bad value.
    """
    flags = [*arguments, "--noresume", f"--strategy={strategy}", f"--seed={seed}"]
    flags += [f"--{name}={value}" for name, value in chosen.items()]
    config = configuration.parse_command(flags, owner)[0]
    with flags_in_errors(strategy):
        config = resolve(config).config
    plain = configuration.to_json(config)
    choice = {name: plain[name] for name in chosen if name in plain}
    words = [strategy, *(f"{name}={value}" for name, value in choice.items()), f"seed={seed}"]
    name = "-".join([*words, configuration.digest(config)])
    return PlannedRun(config, choice, Path(parent) / re.sub(r"[^\w.=-]+", "_", name))


def _kept_runs(place: str) -> dict[str, list[Path]]:
    """The ended runs of --kept by the digest of their settings, whichever machine trained them.

    Raises:
      UserError: there is none, or a table is damaged.
    """
    paths = kept.find(place)
    if not paths:
        raise UserError(f"--kept={place} holds no kept run: name a table (NAME.jsonl.gz) or a folder of tables")
    runs: dict[str, list[Path]] = {}
    for path in paths:
        with contextlib.suppress(UserError):  # unreadable, or of a version with other options
            if run_state(path) not in ("finished", "diverged"):
                continue  # it belongs to another sweep
            runs.setdefault(configuration.digest(configuration.portable(configuration.load(path))), []).append(path)
    return runs


def _require_whole(run: PlannedRun) -> None:
    """Check the folder of a run that has ended and is therefore not trained again.

    Raises:
      UserError: its files are damaged, or belong to another run.
    """
    state = run_state(run.folder)
    if state in ("finished", "diverged"):
        saved = configuration.load(run.folder)
        if different := configuration.differences(configuration.portable(run.config), configuration.portable(saved)):
            raise UserError(f"{run.folder} holds a run with other settings: {'; '.join(different)}; move it elsewhere")
    if state == "finished":
        read_summary(run.folder)
