"""The parts of one run: its start or resumption, evaluations, metrics, checkpoints and result."""

import contextlib
import dataclasses
import functools
import platform
import resource
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_mr import plots
from fedjax_mr.clock import Events
from fedjax_mr.config import config as configuration
from fedjax_mr.config import titles
from fedjax_mr.config.config import Config
from fedjax_mr.data import FederatedData
from fedjax_mr.data.facts import Facts
from fedjax_mr.engine import program
from fedjax_mr.engine.devices import compiler_flags, settings_of_numbers
from fedjax_mr.engine.evaluation import Evaluation
from fedjax_mr.engine.personal import SPREADS, Clients, TestsOfClients
from fedjax_mr.engine.placement import HostMemory
from fedjax_mr.engine.round import Progress, Report
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.simulator import Simulator, normalised
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment import guarantee
from fedjax_mr.experiment.checkpoint import Checkpoints, frozen_digest
from fedjax_mr.experiment.folder import MetricsRow, RunFolder, read_rows, read_summary, require_same_data
from fedjax_mr.experiment.logs import Logs, OnRow
from fedjax_mr.experiment.processes import ALONE, Processes
from fedjax_mr.experiment.report import reaches, summarise
from fedjax_mr.experiment.trained import TrainedNetwork
from fedjax_mr.models import Model, Variables
from fedjax_mr.results.rows import best_row, without_better_loss

SECONDS_PER_CHECKPOINT = 2.0  # of training; writing a checkpoint takes 0.03 seconds and more
# The entries that every version has written into its checkpoints. `traffic` and `rows` were added later.
_META = ("data", "images", "train_seconds", "seconds", "compile_seconds")


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
      summary: the content of ``summary.json``.
      rows: the evaluations, as in ``metrics.jsonl``.
      folder: the run folder.
      model: the network.
      variables: the deployed model, or None if the strategy has none.
      state: the server's state.
      samples: shape, type and normalisation of the samples.
      writes: whether this process wrote the folder. Of several processes, only the first does.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]] = dataclasses.field(repr=False)
    folder: Path
    model: Model = dataclasses.field(repr=False)
    variables: Any = dataclasses.field(repr=False)
    state: Any = dataclasses.field(repr=False)
    samples: Facts = dataclasses.field(repr=False)
    writes: bool = True

    @property
    def deployed(self) -> TrainedNetwork:
        """The deployed model. Raises a UserError if the strategy has none."""
        name = self.summary["strategy"]
        if self.variables is None:
            remedy = f"fmr.load({str(self.folder)!r}).personal(client) is the model of a client"
            raise UserError(f"{name} deploys no model: {remedy}")
        origin = {"strategy": name, "round": self.summary["rounds"], "client": None}
        return TrainedNetwork.of(self.model, self.variables, self.samples, **origin)

    def predict(self, x: Any) -> np.ndarray:
        """Predictions of the deployed model for samples [B, ...]; see `TrainedNetwork.predict`."""
        return self.deployed.predict(x)


class Experiment:
    """One run: its counts so far, its evaluations and its folder. `run.RunLoop` calls these methods in order.

    Attributes:
      knows_cohorts: whether epsilon shall hold against those who know the cohorts, such as the server of real clients.
    """

    knows_cohorts = False

    def __init__(
        self,
        config: Config,
        simulator: Simulator,
        folder: RunFolder,
        processes: Processes = ALONE,
        *,
        events: Events | None = None,
        on_row: OnRow | None = None,
        record: bool = True,
        secret: np.ndarray | None = None,
    ) -> None:
        """Keep the parts. Nothing is computed yet.

        Args:
          config: the configuration.
          simulator: the simulator of the configuration.
          folder: the run folder.
          processes: the processes that share the run. Default: this process alone.
          events: the events in simulated time, for the column ``clock``. Default: there is none.
          on_row: see `run.run`.
          record: see `run.run`.
          secret: the secret of the simulator, which checkpoints contain (`guarantee.secret_of`).
        """
        self.config = config
        self.secret = secret
        self.federated = simulator.federated
        self.model = simulator.model
        self.rounds = simulator.rounds
        self.folder = folder
        self.compare_to = list(map(Path, config.compare_to))
        if on_row is not None:  # it may change the working directory
            self.folder.path = self.folder.path.absolute()
            self.compare_to = [each.absolute() for each in self.compare_to]
        self.processes = processes
        self.evaluation = simulator.evaluation
        self.personal: TestsOfClients | None = None
        if needs_tests_of_clients(config, self.rounds):
            self.personal = simulator.tests_of_clients
        elif keeps_validation(self.federated):
            self.personal = simulator.validation_of_clients
        self.checkpoints = Checkpoints(folder.path / "checkpoints", keep=config.keep_checkpoints, processes=processes)
        self.images = 0
        self.traffic = (0, 0, 0)  # bytes down, up and from client to client
        self.train_seconds = 0.0
        self.seconds = 0.0  # training and evaluation, without compilation
        self.saved_at = 0.0  # train_seconds of the newest checkpoint
        self.compile_seconds_before = 0.0  # seconds of interrupted processes
        self.sharing = 1  # number of experiments that train in the same calls, and share the seconds of compilation
        self._compiled_at_start = program.compile_seconds()
        self.epsilon = guarantee.epsilon_after(config, simulator.problem, public=self.knows_cohorts)
        self.attacked = simulator.attacked if config.attack == "replacement" else None
        self.events = events
        self.logs = Logs()
        self.on_row = on_row
        self.pictures = record and folder.writes
        self._tables: dict[str, list] | None = None  # of the last evaluation, by metric
        self.ended_before: dict[str, Any] | None = None  # the summary of a resumed run with nothing left to do

    @functools.cached_property
    def frozen(self) -> str | None:
        """A hash of the frozen variables, which checkpoints do not hold; None if all variables train."""
        return frozen_digest(self.model)

    def start(self) -> tuple[Progress, int]:
        """The initial progress (new, or from the newest intact checkpoint) and its number of completed rounds."""
        if not self.folder.resumed:
            self.processes.on_first(self._begin)
            self.processes.on_first(self._open_logs)
            progress = self.rounds.init()
            self._save(progress, 0)
            self.folder.to_keep = True
            return progress, 0
        round, notes = self.checkpoints.newest_intact()
        if self.processes.writes:
            for note in notes:
                print(f"fedjax-mr: {note}; continuing from round {round}", file=sys.stderr)
        template = self.rounds.shapes(kept=self.checkpoints.kept_memories(round))
        restore = functools.partial(self.checkpoints.restore_run, template, round, model=self.model)
        progress, meta = self.processes.together(restore)
        if missing := [name for name in _META if name not in meta]:
            raise UserError(f"the checkpoint of round {round} in {self.folder.path} has no {', '.join(missing)}")
        self.processes.together(lambda: require_same_data(self.folder.path, meta, self.federated))
        self.processes.on_first(lambda: self._require_same_numbers(meta))
        self.images, self.train_seconds, self.seconds = meta["images"], meta["train_seconds"], meta["seconds"]
        self.saved_at = self.train_seconds
        if "traffic" not in meta:
            raise UserError(
                f"{self.folder.path} comes from a version whose checkpoints contain no traffic: resume it with that "
                "version, or start again with --overwrite"
            )
        self.traffic = tuple(meta["traffic"])
        self.compile_seconds_before = meta["compile_seconds"]
        done = int(progress.round)
        self.processes.on_first(self._repair)
        self.ended_before = self.processes.on_first(lambda: self._summary_before(done))
        if self.ended_before is not None:
            return self.rounds.place(progress), done
        due = functools.partial(self._due, every=self.config.eval_every)
        self.processes.together(lambda: self.folder.cut(done, meta, due=due))
        self.processes.together(lambda: self.folder.extend(self.config.rounds))
        self.processes.on_first(self._open_logs)
        return self.rounds.place(progress), done

    def _require_same_numbers(self, meta: dict[str, Any]) -> None:
        """Check that JAX has the settings that the run was trained with. Name other packages and compiler flags.

        Raises:
          UserError: a setting differs that changes numbers, such as how JAX draws them.
        """

        def changes(kind: str) -> str:
            saved, now = meta.get("numbers", {}).get(kind, {}), facts_of_numbers()[kind]
            different = [name for name in now if saved.get(name, now[name]) != now[name]]
            return "; ".join(f"{name} was {saved[name] or 'empty'} and is {now[name] or 'empty'}" for name in different)

        if different := changes("jax"):
            raise UserError(
                f"{self.folder.path} was trained with other settings of JAX ({different}): set them back, in the "
                "environment or by jax.config.update"
            )
        if different := changes("packages"):
            print(
                f"fedjax-mr: {self.folder.path} goes on with other packages or flags, so its numbers may differ from "
                f"those of an uninterrupted run: {different}",
                file=sys.stderr,
            )

    def _summary_before(self, done: int) -> dict[str, Any] | None:
        """The summary of a run that has ended with these settings after ``done`` rounds, or None."""
        try:
            saved, summary = configuration.load(self.folder.path), read_summary(self.folder.path)
        except UserError:  # unfinished, or the summary is damaged and will be written again
            return None
        changed = configuration.different(saved, self.config)
        if summary["rounds"] != done or any(setting.info.at_end for setting in changed):
            return None
        longer = f" (a --rounds above {done} continues it)" if summary.get("ended_by") == "rounds" else ""
        print(f"{self.folder.path} is a finished run, so nothing was changed{longer}", file=sys.stderr)
        return summary

    def _open_logs(self) -> None:
        self.logs.open(self.config.logs, configuration.to_json(self.config), self.folder)

    def _begin(self) -> None:
        """Write the configuration and the partition into the run folder before the first round."""
        self.folder.begin(self.config)
        self.folder.write_data(self.federated)

    def _repair(self) -> None:
        if damaged := self.folder.repair(self.federated):
            print(
                f"fedjax-mr: damaged or missing files of {self.folder.path} are written again: {', '.join(damaged)}",
                file=sys.stderr,
            )

    def _save(self, progress: Progress, done: int) -> None:
        self.processes.on_first(self.folder.seal)  # a checkpoint is never newer than its metrics
        meta = {
            "rows": len(self.folder.rows()),
            "data": self.federated.hash(),
            "test_data": self.federated.test_hash,
            "frozen": self.frozen,
            "numbers": facts_of_numbers(),
            "images": self.images,
            "traffic": self.traffic,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds(),
        }
        if self.secret is not None:
            meta[guarantee.SECRET] = self.secret.tolist()
        if isinstance(progress.memory, HostMemory):
            meta["memories"] = len(progress.memory)
        best = best_row(self.folder.rows()) if self.config.keep_best else None
        self.checkpoints.save(done, progress, meta, also=() if best is None else (best["round"],))
        self.saved_at = self.train_seconds
        self.folder.keep_info(self.checkpoints.rounds())

    def _due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.config.rounds

    def next_event(self, done: int) -> int:
        """The round of the next evaluation or checkpoint."""
        periods = (self.config.eval_every, self.config.checkpoint_every or self.config.eval_every)
        return min(self.config.rounds, *((done // every + 1) * every for every in periods))

    def ended_by(self, done: int) -> str | None:
        """The flag that ends the run after ``done`` rounds (rounds, stop_at_accuracy or patience), or None."""
        config, rows = self.config, self.folder.rows()
        if done == config.rounds:
            return "rounds"
        metric = self.model.task.primary
        if rows and reaches(rows[-1][metric.name], config.stop_at_accuracy, metric):
            return "stop_at_accuracy"
        if config.patience is not None and without_better_loss(rows) >= config.patience:
            return "patience"
        return None

    def account(self, done: int, report: Report, seconds: float) -> None:
        """Add the counts and the seconds of a call that ended after ``done`` rounds.

        Raises:
          DivergedError: a loss or weight is not finite.
        """
        self.images += int(report.images)
        self.traffic = tuple(map(sum, zip(self.traffic, report.traffic.num_bytes(), strict=True)))
        self.train_seconds += seconds
        self.seconds += seconds
        if report.bad_client >= 0 and not self.config.allow_nonfinite:
            last = self.checkpoints.latest()
            error = DivergedError(
                f"round {done} diverged: client {int(report.bad_client)} met a loss or weight that is "
                f"not finite at its local step {int(report.bad_step)}; the checkpoint of round {last} in "
                f"{self.folder.path} is kept (a smaller --lr or --clip_norm may help; --allow_nonfinite continues)"
            )
            self.folder.note_divergence(str(error))
            raise error

    def record_due(self, progress: Progress, report: Report, done: int, *, stop: bool = False) -> None:
        """Evaluate and save a checkpoint if one is due after ``done`` rounds, or if the run stops."""
        tested = self._due(done, self.config.eval_every)
        if tested:
            self.folder.append(self._evaluate(progress, report, done))
        best = tested and self.config.keep_best and best_row(self.folder.rows()) is self.folder.last_row()
        due = self._checkpoint_due(done, tested) or stop or best
        try:
            if tested:
                self._publish(self.folder.rows()[-1])
        except BaseException:  # of the user's callback
            due = True
            raise
        finally:  # so an exception loses no rounds
            if due:
                self.folder.write_info(done, {name: value for name, value in report.info.items() if np.ndim(value)})
                self._save(progress, done)

    def _checkpoint_due(self, done: int, tested: bool) -> bool:
        """Whether a checkpoint is due: in all processes or in none, because their seconds are the same."""
        if self.config.checkpoint_every is not None:
            return self._due(done, self.config.checkpoint_every)
        soon = self.train_seconds - self.saved_at < SECONDS_PER_CHECKPOINT
        needed = done == self.config.rounds or self.config.keep_checkpoints > Config.keep_checkpoints
        return tested and (needed or not soon)

    def _publish(self, row: MetricsRow) -> None:
        """Pass an evaluation to the logs and to the user's callback."""
        if self.folder.writes:
            self.logs.write(row)
            if self.on_row is not None:
                self.on_row(dict(row))

    def _evaluate(self, progress: Progress, report: Report, done: int) -> dict[str, Any]:
        compiled, started = program.compile_seconds(), time.perf_counter()
        extra: dict[str, Any] = {name: float(value) for name, value in report.info.items() if np.ndim(value) == 0}
        if self.tests_clients:
            assert self.personal is not None
            clients = self.personal.test(progress)
            extra |= clients.columns() | self._architecture_counts(clients)
        variables = self.rounds.deployed(progress)
        task = self.model.task
        if variables is None:  # without a deployed model, the metrics are those of the personal models
            first = "personal_"
            named = {name.removeprefix(first): value for name, value in extra.items() if name.startswith(first)}
            metrics = {name: value for name, value in named.items() if name not in ("loss", *SPREADS)}
            loss = named["loss"]
        else:
            tested = self.evaluation.one(variables)
            metrics, loss = task.columns(tested.metrics), float(tested.loss)
            self._tables = task.tables(tested.metrics)
        individual = self.rounds.individual(progress)
        if individual is not None:
            tested = self.evaluation.each(individual)
            each = tested.metrics[task.primary.name]
            extra |= {"individual_mean": each.mean(), "individual_min": each.min(), "individual_max": each.max()}
        if self.config.eval_each and self.rounds.keeps_models:
            tested = self.evaluation.each(self.rounds.kept_models(progress)) if individual is None else tested
            values = tested.metrics[task.primary.name]
            for number, (value, its_loss) in enumerate(zip(values, tested.loss, strict=True)):
                extra |= {f"model_{number}_{task.primary.name}": value, f"model_{number}_loss": its_loss}
        if variables is not None and self.attacked is not None:
            attacked = self.attacked(progress, self.config.attack_target)
            extra["attacked_accuracy"] = attacked.accuracy
        if self.events is not None:
            extra["clock"] = self.events.times[done - 1]
        if self.epsilon is not None:
            extra["epsilon"] = self.epsilon(done)
        down, up, peer = self.traffic
        if peer:
            extra["bytes_peer"] = peer
        self.seconds += time.perf_counter() - started - (program.compile_seconds() - compiled)
        return {
            "round": done,
            **metrics,
            "loss": loss,
            "train_loss": float(report.train_loss),
            "similarity": float(report.similarity),
            "bytes_down": down,
            "bytes_up": up,
            "images": self.images,
            "seconds": self.seconds,
        } | {name: float(value) for name, value in extra.items()}

    @property
    def tests_clients(self) -> bool:
        """Whether every evaluation tests the clients' models on their test or validation samples."""
        requested = self.rounds.strategy.personal_model is not None or self.config.eval_clients
        return requested or keeps_validation(self.federated)

    def _architecture_counts(self, clients: Clients) -> dict[str, int]:
        """Number of clients per network of a zoo."""
        networks = self.model.networks
        if len(networks) == 1:
            return {}
        counts = np.bincount(clients.architecture, minlength=len(networks))
        return {f"network_{number}_{model.name}": counts[number] for number, model in enumerate(networks)}

    def finish(self, progress: Progress, done: int) -> Result:
        """Run the final tests, write the summary and the figures, and return the result.

        If the run has ended before, nothing is tested and written.
        """
        variables = self.rounds.deployed(progress)
        summary = self.ended_before or self._conclude(progress, done, variables)
        rows, path = self.folder.rows(), self.folder.path
        facts = Facts.of(self.federated.dataset)
        return Result(summary, rows, path, self.model, variables, progress.server, facts, writes=self.folder.writes)

    def _conclude(self, progress: Progress, done: int, variables: Variables | None) -> dict[str, Any]:
        """Run the final tests, write the summary and the figures, and return the summary."""
        config, rows = self.config, self.folder.rows()
        if self.checkpoints.latest() != done:
            self._save(progress, done)
        best = best_row(rows) if config.keep_best else None
        summary = summarise(rows, config.target_accuracy) | {
            "ended_by": self.ended_by(done),
            **({} if best is None else {"best_checkpoint": best["round"]}),
            "compile_seconds": self.compile_seconds(),
            "seconds_per_round": self.train_seconds / done,
            **self.rounds.seconds_per_round(),
            "images_per_second": self.images / self.train_seconds,
            "seconds": self.seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "strategy": config.strategy,
            "dataset": config.dataset,
            "model": config.model,
            "parameters": self.model.num_parameters(),
            "seed": config.seed,
            "partition_hash": self.federated.hash(),
            "devices": [device.device_kind for device in self.rounds.axis.mesh.devices.flat],
            "lanes": self.rounds.axis.lanes,
            "versions": versions(),
            "jax_settings": settings_of_numbers(),
            "xla_flags": compiler_flags(),
        }
        if variables is not None:
            tables = self._tables
            if tables is None:  # resumed after the last evaluation
                tables = self.model.task.tables(self.evaluation.one(variables).metrics)
            summary |= tables
        if variables is not None and (holdout := self.federated.holdout) is not None:
            test = normalised(holdout.dataset, holdout.dataset.x, holdout.dataset.y)
            model = self.rounds.constants.problem.model
            result = Evaluation(model, test, self.rounds.axis, code=self.rounds.trial.code).one(variables)
            summary |= self.model.task.columns(result.metrics | {"loss": result.loss}, "holdout_")
        if self.personal is not None:
            summary |= self._test_clients(self.personal, progress)
        if self.folder.writes:
            self.folder.write_summary(summary)
        self.draw()
        return summary

    def _picture(self, name: str) -> Path:
        return self.folder.path / f"{name}.{self.config.picture_format}"

    def _partition_counts(self) -> np.ndarray:
        """Number of samples per client and class [N, C], for the figure of the partition."""
        return self.federated.label_counts()

    def draw(self) -> None:
        """Draw the partition and the evaluations, together with those of the runs in ``compare_to``."""
        if not self.pictures:
            return
        name, division = titles.dataset(self.federated.dataset.name), titles.division(titles.facts(self.config))
        title = f"{name}, {division}, {self.federated.num_clients} clients"
        group = self.federated.dataset.task.group
        plots.partition(self._partition_counts(), self._picture("partition"), title=title, group=group)
        if rows := self.folder.rows():
            self._draw_curves(rows)

    def _draw_curves(self, rows: list[MetricsRow]) -> None:
        configs, unknown = [self.config], {}
        histories = [rows]
        for folder in self.compare_to:
            try:
                configs.append(configuration.load(folder))
                histories.append(read_rows(folder))
            except UserError:  # for example of another version; its evaluations can still be drawn
                unknown[folder.name] = read_rows(folder)
        names = titles.runs(configs) if self.config.compare_to else [titles.run(self.config)]
        methods = {name: titles.key(titles.facts(each)) for name, each in zip(names, configs, strict=True)}
        shown = dict(zip(names, histories, strict=True)) | unknown
        metric = self.model.task.primary
        plots.curves(shown, self._picture("curves"), methods=methods, metric=(metric.name, metric.title))

    def _test_clients(self, personal: TestsOfClients, progress: Progress) -> dict[str, float]:
        """Test the clients' final models, also fine-tuned if requested. Write ``clients.csv`` and a figure."""
        config, last = self.config, personal.test(progress)
        summary, results = last.columns(), {"personal": last}
        if config.finetune_epochs:
            results["finetuned"] = personal.finetuned(progress, config.finetune_epochs)
            summary |= results["finetuned"].columns("finetuned")
        networks = [network.name for network in self.model.networks]
        if not last.count.any():  # the clients have only validation samples
            return summary
        if self.folder.writes:
            names = self.federated.names or [str(client) for client in range(self.federated.num_clients)]
            table = (
                {
                    "client": list(range(self.federated.num_clients)),
                    "name": list(names),
                    "architecture": last.architecture.tolist(),
                    "network": [networks[number] for number in last.architecture],
                    "samples": self.federated.sizes.tolist(),
                    "test_samples": last.count.astype(int).tolist(),
                }
                | _of_clients(last.validation, "validation_")
                | _of_clients(last.metrics, "")
            )
            if config.finetune_epochs:
                table |= _of_clients(results["finetuned"].metrics, "finetuned_")
            self.folder.write_clients(table)
        if self.pictures:
            metric = self.model.task.primary
            words = {"personal": "as trained", "finetuned": "fine-tuned"}
            several = enumerate(networks if len(networks) > 1 else ())
            plots.personal(
                self.folder.rows(),
                {
                    words[name]: clients.primary[~np.isnan(clients.primary)].tolist()
                    for name, clients in results.items()
                },
                self._picture("personal"),
                method=titles.key(titles.facts(config)),
                metric=(metric.name, metric.title),
                fraction=metric.unit == "fraction",
                networks={f"network_{number}_{name}": titles.network(name) for number, name in several},
            )
        return summary

    def compile_seconds(self) -> float:
        """Seconds that the run has spent in tracing and compilation."""
        return self.compile_seconds_before + (program.compile_seconds() - self._compiled_at_start) / self.sharing


def _of_clients(metrics: dict[str, np.ndarray], prefix: str) -> dict[str, list[float]]:
    """The columns of a table of clients, from metrics [N] or [N, C]."""
    columns: dict[str, list[float]] = {}
    for name, values in metrics.items():
        if values.ndim == 1:
            columns[prefix + name] = values.tolist()
        elif values.ndim == 2:
            columns |= {f"{prefix}{name}_{number}": column.tolist() for number, column in enumerate(values.T)}
    return columns


def keeps_validation(federated: FederatedData) -> bool:
    """Whether clients have validation samples."""
    return federated.validation is not None and len(federated.validation.index) > 0


def needs_tests_of_clients(config: Config, rounds: Rounds) -> bool:
    """Whether a run tests the clients' models on their test samples, at evaluations or at its end."""
    return bool(rounds.strategy.personal_model or config.eval_clients or config.finetune_epochs)


def peak_memory_bytes() -> int:
    """Peak memory in bytes: of all accelerators together, or of this process if there are none."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    if all(each and "peak_bytes_in_use" in each for each in statistics):
        return sum(each["peak_bytes_in_use"] for each in statistics)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def facts_of_numbers() -> dict[str, dict[str, str]]:
    """The facts about this process that can change the numbers of a run, by kind and name."""
    return {"jax": settings_of_numbers(), "packages": versions() | {"XLA_FLAGS": compiler_flags()}}


@functools.cache  # reading them takes milliseconds, and a process does not change them
def versions() -> dict[str, str]:
    """The versions of Python and of all packages that can change results."""
    packages = ("fedjax_mr", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    installed = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return {"python": platform.python_version()} | installed
