"""Read run folders: settings, evaluations, and the models of a checkpoint."""

import argparse
import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_mr import files, plots
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.data import FederatedData
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model, simulator_of
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import RUNS, MetricsRow, read_rows, read_summary, require_same_data, run_state
from fedjax_mr.models import Model, Variables
from fedjax_mr.results import kept
from fedjax_mr.results.rows import metric_of
from fedjax_mr.tasks import Metric


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run folder, or one run of a table of kept runs.

    Attributes:
      path: the folder, or ``TABLE/RUN``.
      name: name in tables and plots: that of the folder, or its path if two folders have the same name.
      config: its configuration.
    """

    path: Path
    name: str
    config: Config

    @property
    def state(self) -> str:
        """How far the run is: ``new``, ``started``, ``diverged`` or ``finished``."""
        return run_state(self.path)

    def rows(self) -> list[MetricsRow]:
        """Evaluations in ascending order; numbers that were not finite are None.

        Raises:
          UserError: there is none, or they are damaged.
        """
        rows = read_rows(self.path)
        if not rows:
            raise UserError(f"{self.path} has no evaluation yet")
        return rows

    def rows_so_far(self) -> list[MetricsRow]:
        """As `rows`, but empty for a run that was not evaluated yet, or that diverged before its first evaluation."""
        return read_rows(self.path) if kept.run(self.path) or (self.path / "metrics.jsonl").exists() else []

    def metric(self) -> Metric:
        """The first metric of the run, by which it is judged, such as the accuracy."""
        return metric_of(self.rows_so_far())

    def summary(self) -> dict[str, Any]:
        """The results of the run.

        Raises:
          UserError: the run is not finished, or the file is damaged.
        """
        return read_summary(self.path)

    def checkpoints(self) -> list[int]:
        """The rounds that have a checkpoint, in ascending order."""
        return Checkpoints(self.path / "checkpoints").rounds()

    def method(self) -> str:
        """Name of the method that decides the colour and marker of the run's lines."""
        return titles.key(titles.facts(self.config))


class Trained(NamedTuple):
    """A run's models at a checkpoint."""

    round: int
    federated: FederatedData
    model: Model
    deployed: Variables | None
    models: Variables | None
    """The K models of the server, leaves [K, ...]. None if the server has a single model."""


def add_arguments(parser: argparse.ArgumentParser, *, several: bool = True) -> None:
    """Add the run folders to a command's arguments."""
    parser.add_argument(
        "runs",
        nargs="+" if several else 1,
        metavar="RUN",
        help="run folder, table of kept runs (NAME.jsonl.gz), or TABLE/PATTERN for some of its runs",
    )


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the datasets to the arguments of a command."""
    parser.add_argument("--data_dir", metavar="FOLDER", help="folder of the datasets. Default: as in the run")


def add_restore_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that restores models: the folder of the datasets, and trust in the runs' code."""
    add_data_argument(parser)
    help = "import the Python files that the runs used, or the copies in their folders. Default: no"
    parser.add_argument("--trust", action="store_true", help=help)


def read(paths: Sequence[str]) -> list[RunRecord]:
    """Read the runs at these paths, in order, each with a name of its own.

    Args:
      paths: run folders, tables of kept runs (all their runs), or ``TABLE/PATTERN``.

    Raises:
      UserError: a path is not a run folder, holds links, or is named twice; or a table has no such run.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        folders += kept.find(path) if kept.is_kept(path) else [path]
    for folder in folders:
        files.refuse_links(folder)
    return with_names([RunRecord(path, path.name, configuration.load(path)) for path in folders])


def with_names(chosen: Iterable[RunRecord]) -> list[RunRecord]:
    """Give each of some runs a name that no other of them has.

    Raises:
      UserError: a run is among them twice.
    """
    known = [(run, run.path.resolve()) for run in chosen]
    repeated = [path for path, count in collections.Counter(path for _, path in known).items() if count > 1]
    if repeated:
        raise UserError(f"the run {repeated[0]} is named twice")
    names = collections.Counter(path.name for _, path in known)
    return [dataclasses.replace(run, name=str(run.path) if names[path.name] > 1 else path.name) for run, path in known]


def bytes_sent(row: MetricsRow) -> int:
    """The bytes that were sent up to an evaluation, in all directions."""
    return row["bytes_down"] + row["bytes_up"] + row.get("bytes_peer", 0)


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and the format of the plots to the arguments of a command."""
    add_out_argument(parser)
    parser.add_argument("--format", choices=plots.FORMATS, default="png", help="file format of the plots. Default: png")


def add_out_argument(parser: argparse.ArgumentParser) -> None:
    """Add the folder of the results to the arguments of a command."""
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help=f"folder of the results. Default: analysis/ in the run folder, or in the folder that holds several runs "
        f"or a table; {RUNS}/analysis/ if that is the current folder",
    )


@contextlib.contextmanager
def output_folder(out: str | None, runs: Sequence[RunRecord]) -> Iterator[Path]:
    """Yield the folder of the results. If the block fails, folders that were created for it are removed.

    Args:
      out: the requested folder. Default: ``analysis`` in the run folder, or in the deepest folder that holds all runs,
        or in `RUNS` if the current folder is in that folder, too.
      runs: the runs that the results describe.

    Raises:
      UserError: the folder cannot be created.
    """
    # Beside a table, as nothing can be written into it.
    places = list(dict.fromkeys(run.path.parents[1] if kept.is_kept(run.path) else run.path for run in runs))
    if out is not None:
        folder = Path(out)
    elif len(places) == 1:
        folder = places[0] / "analysis"
    else:
        common = Path(os.path.commonpath(list(map(os.path.abspath, places))))
        if Path.cwd().is_relative_to(common):
            common = Path(RUNS)
        elif not any(path.is_absolute() for path in places):
            common = Path(os.path.relpath(common))
        folder = common / "analysis"
    try:
        created = files.make_folder(folder)
    except OSError as error:
        raise UserError(f"cannot write into {folder} ({error.strerror}); --out names another folder") from None
    try:
        yield folder
    except BaseException:
        for path in created:
            with contextlib.suppress(OSError):  # something has come into it
                path.rmdir()
        raise


def with_data_dir(config: Config, data_dir: str | None) -> Config:
    """The configuration with its datasets in another folder. None changes nothing."""
    return config if data_dir is None else dataclasses.replace(config, data_dir=data_dir)


def problem_of(run: RunRecord, *, data_dir: str | None, trust: bool) -> tuple[Config, FederatedData, Model]:
    """The configuration, data and network of a run, on one device. The arguments are those of `rebuild`.

    Raises:
      UserError: the code is not trusted, a file of the run is missing, or objects of the run came from Python.
    """
    config = with_data_dir(configuration.load_code(run.path, trust=trust), data_dir)
    if needed := configuration.needed_objects(config):
        raise UserError(
            f"{run.path} was trained with {needed} from Python, which this command does not have: use "
            f"fmr.load({str(run.path)!r}, {needed})"
        )
    set_up_jax(devices=1, cohort_size=1)
    federated = federated_data(config)
    return config, federated, build_model(config, federated.dataset)


class Rebuilt(NamedTuple):
    """A run's data, network and rounds on one device."""

    config: Config
    federated: FederatedData
    model: Model
    rounds: Rounds


def rebuild(run: RunRecord, *, data_dir: str | None = None, trust: bool = False, **changes: Any) -> Rebuilt:
    """Rebuild the data, network and rounds of a run, which are needed to read its checkpoints. Nothing is computed.

    Args:
      run: the run.
      data_dir: folder of the datasets. Default: as in the run.
      trust: import the code that the run records, as in `config.load_code`.
      changes: settings of the `Layout` that replace those of the run, such as ``memory``.

    Raises:
      UserError: the run is a kept one, which has no models, or as `problem_of`.
    """
    if kept.is_kept(run.path):
        raise UserError(f"{run.path} has no models: a table of kept runs holds metrics alone; name a run folder")
    config, federated, model = problem_of(run, data_dir=data_dir, trust=trust)
    alone = dataclasses.replace(config, devices=1, lanes=1, **changes)
    return Rebuilt(config, federated, model, simulator_of(alone, federated, model).rounds)


def restore(run: RunRecord, *, round: int | None = None, data_dir: str | None = None, trust: bool = False) -> Trained:
    """Restore the models of a checkpoint (default: the newest) on the host. The other arguments are those of `rebuild`.

    Raises:
      UserError: the checkpoint is missing or damaged, the data differ from those of the run, or as `rebuild`.
    """
    _, federated, model, rounds = rebuild(run, data_dir=data_dir, trust=trust)
    checkpoints = Checkpoints(run.path / "checkpoints")
    template = rounds.shapes(kept=checkpoints.kept_memories(round))
    progress, meta = checkpoints.restore_run(template, round, model=model)
    require_same_data(run.path, meta, federated)
    server = getattr(progress.server, "inner", progress.server)  # the strategy's own beside a server's optimizer
    models: Any = getattr(server, "models", None)
    return Trained(int(progress.round), federated, model, rounds.deployed(progress), models)


def relative_spread(tensors: Sequence[Any]) -> float:
    """Root mean square distance of K models from their mean, divided by the norm of the mean.

    Args:
      tensors: the tensors of the models [K, ...].
    """
    flat = np.concatenate([np.asarray(each, np.float64).reshape(len(each), -1) for each in tensors], axis=1)
    mean = flat.mean(axis=0)
    distance, norm = np.sqrt(((flat - mean) ** 2).sum(axis=1).mean()), np.linalg.norm(mean)
    return float(distance / norm) if norm > 0 else float("nan" if distance > 0 else 0.0)
