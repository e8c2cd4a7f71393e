"""The experiment: rounds, evaluations, records, checkpoints, and going on after an interruption."""

import contextlib
import dataclasses
import json
import platform
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_mr import config as configuration
from fedjax_mr import data, plots
from fedjax_mr.config import Config
from fedjax_mr.data import Dataset, FederatedData, plan
from fedjax_mr.engine import rounds
from fedjax_mr.engine.clients import ClientAxis, client_axis
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.evaluation import Evaluation
from fedjax_mr.engine.personal import Clients, PersonalEvaluation
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment.build import build_model, build_rounds, samples
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.folder import RunFolder, read_rows
from fedjax_mr.experiment.processes import ALONE, Processes, join_processes
from fedjax_mr.experiment.report import ProgressBar, TensorBoard, summarise
from fedjax_mr.models import Model

SECONDS_PER_CALL = 5.0  # a compiled call returns after about this long, so that progress and Ctrl-C stay alive


class Interrupted(Exception):
    """The user asked to stop; everything is saved."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the line to print and the code to exit with."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run leaves behind.

    Attributes:
      summary: the content of ``summary.json``.
      rows: the evaluations, as in ``metrics.jsonl``.
      folder: the run folder.
      model: the network.
      variables: the deployed model; None where a method has none.
      state: the server's state.
      writes: whether this process wrote the folder; of several processes only the first does.
    """

    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    folder: Path
    model: Model
    variables: Any
    state: Any
    writes: bool = True


def run(config: Config, *, dataset: Dataset | None = None) -> Result:
    """Run an experiment, or go on with one, and return its result.

    Args:
      config: everything that the run is told.
      dataset: one's own samples, in place of the data set that ``config`` names.

    Raises:
      UserError: bad input; nothing was changed.
      DivergedError: a loss or weight is not finite; the last good checkpoint stays.
      Interrupted: Ctrl-C or a termination signal; a checkpoint was written.
      LostError: another process of the run is out of reach.
    """
    configuration.validate(config)
    processes = join_processes(
        coordinator=config.coordinator, num_processes=config.num_processes, process_id=config.process_id
    )
    set_up_jax(devices=config.devices, cohort_size=config.cohort, num_processes=processes.count)
    federated = processes.together(lambda: data.prepare(config, dataset=dataset))
    processes.agree({"data": federated.hash()} | versions() | configuration.shared(config))
    with processes.lost_by_name():
        return prepare(config, federated, processes).run()


def prepare(config: Config, federated: FederatedData, processes: Processes) -> "Experiment":
    """Build the engine, take the run folder and return the experiment."""
    model = build_model(config, federated)
    axis = client_axis(devices=config.devices, lanes=config.lanes, cohort_size=config.cohort)
    engine = build_rounds(config, federated, model, axis)
    folder = open_folder(config, processes)
    if config.progress and processes.writes:
        notes = [*federated.notes]
        if federated.holdout is not None and engine.strategy.global_model is None:
            notes.append(
                f"the {federated.holdout.num_clients} clients that never train are not tested: {config.strategy} "
                "deploys no model that they could take"
            )
        print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
        print(headline(config, federated, axis), file=sys.stderr)
    return Experiment(config, federated, model, engine, folder, processes)


def open_folder(config: Config, processes: Processes) -> RunFolder:
    """Return the run folder; the first process chooses and keeps it, the others follow."""
    mine: list[RunFolder] = []

    def choose() -> tuple[str, bool]:
        mine.append(RunFolder.open(config))
        return str(mine[0].path), mine[0].resumed

    path, resumed = processes.on_first(choose)
    return mine[0] if mine else RunFolder(Path(path), resumed=resumed, writes=False)


def headline(config: Config, federated: FederatedData, axis: ClientAxis) -> str:
    """Return the line that opens a run."""
    kind = axis.mesh.devices.flat[0].device_kind
    return (
        f"{config.strategy}: {config.cohort} of {federated.num_clients} clients per round, "
        f"{config.dataset} ({config.partition}), {config.model}; "
        f"{axis.num_devices} x {kind}, {axis.lanes} lane{'s' if axis.lanes > 1 else ''}"
    )


class Experiment:
    """One run: what it has done so far and where it keeps it."""

    def __init__(
        self,
        config: Config,
        federated: FederatedData,
        model: Model,
        engine: rounds.Rounds,
        folder: RunFolder,
        processes: Processes = ALONE,
    ) -> None:
        """Gather the parts; nothing is computed yet."""
        self.config = config
        self.federated = federated
        self.model = model
        self.engine = engine
        self.folder = folder
        self.processes = processes
        dataset = federated.dataset
        self.evaluation = Evaluation(model, samples(federated, dataset.test_x, dataset.test_y), engine.axis)
        self.personal: PersonalEvaluation | None = None
        if engine.strategy.personal_model or config.eval_clients or config.finetune_epochs:
            own = federated.client_test
            self.personal = PersonalEvaluation(engine, federated, samples(federated, own.x, own.y))
        self.checkpoints = Checkpoints(folder.path / "checkpoints", keep=config.keep_checkpoints, processes=processes)
        self.images = 0
        self.traffic = (0, 0, 0)  # bytes down, up and from client to client
        self.train_seconds = 0.0
        self.seconds = 0.0  # training and evaluation, without compilation
        self.compile_seconds_before = 0.0  # of the processes that were interrupted

    def run(self) -> Result:
        """Train to the last round and return the result."""
        config = self.config
        with asked_to_stop() as asked:
            progress, done = self.start()
            writes = self.processes.writes
            bar = ProgressBar(config.rounds, done, quiet=not (config.progress and writes))
            board = TensorBoard(self.folder.path) if config.tensorboard and writes else None
            rounds_per_call = 1
            report = None
            try:
                while done < config.rounds and not self.reached_the_stop():
                    count = min(rounds_per_call, self.next_event(done) - done)
                    progress, report, seconds = self._train(progress, count)
                    seconds, stop = self._confer(seconds, asked)
                    done += count
                    rounds_per_call = max(1, int(SECONDS_PER_CALL * count / max(seconds, 1e-6)))
                    self.record_due(progress, report, done, board, stop=stop > 0)
                    bar.update(done, images_per_second=self.images / self.train_seconds, row=self.folder.last_row())
                    if stop and done < config.rounds:
                        raise self.interrupted(done, stop)
            finally:
                bar.close()
                if board:
                    board.close()
            return self.finish(progress, done)

    def record_due(
        self,
        progress: rounds.Progress,
        report: rounds.Report,
        done: int,
        board: TensorBoard | None = None,
        *,
        stop: bool = False,
    ) -> None:
        """Evaluate and save what is due after ``done`` rounds, or before the run stops."""
        if self._due(done, self.config.eval_every):
            row = self._evaluate(progress, report, done)
            self.folder.append(row)
            if board:
                board.write(row)
        if self._due(done, self.config.checkpoint_every or self.config.eval_every) or stop:
            self.folder.write_info(done, {name: value for name, value in report.info.items() if np.ndim(value)})
            self._save(progress, done)

    def _confer(self, seconds: float, asked: list[int]) -> tuple[float, int]:
        """Return the first process's seconds, and the stop signal that any process has received (0: none)."""
        everyone = [json.loads(text) for text in self.processes.exchange(json.dumps([seconds, *asked]))]
        return everyone[0][0], max(number for _, *numbers in everyone for number in (0, *numbers))

    def start(self) -> tuple[rounds.Progress, int]:
        """Return the progress to go on from, at round 0 or at the last checkpoint."""
        if not self.folder.resumed:
            self._keep_partition()
            progress = self.engine.init()
            self._save(progress, 0)
            return progress, 0
        progress, meta = self.checkpoints.restore(self.engine.shapes())
        if meta["data"] != self.federated.hash():
            raise UserError(f"{self.folder.path} was made with other data: its partition hash is {meta['data']}")
        self.images, self.train_seconds, self.seconds = meta["images"], meta["train_seconds"], meta["seconds"]
        self.traffic = tuple(meta["traffic"])
        self.compile_seconds_before = meta["compile_seconds"]
        done = int(progress.round)
        self.folder.cut(done)
        return self.engine.place(progress), done

    def _keep_partition(self) -> None:
        """Write ``partition.npz`` and ``partition.png`` into the run folder."""
        if not self.folder.writes:
            return
        if self.federated.plan is not None:
            plan.save(self.federated.plan, self.folder.path / "partition.npz")
        title = f"{self.federated.dataset.name}, {self.federated.num_clients} clients"
        plots.partition(self.federated.label_counts(), self.folder.path / "partition.png", title=title)

    def _save(self, progress: rounds.Progress, done: int) -> None:
        meta = {
            "data": self.federated.hash(),
            "images": self.images,
            "traffic": self.traffic,
            "train_seconds": self.train_seconds,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds(),
        }
        self.checkpoints.save(done, progress, meta)
        self.folder.keep_info(self.checkpoints.rounds())

    def _due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.config.rounds

    def next_event(self, done: int) -> int:
        """Return the round of the next evaluation or checkpoint."""
        periods = (self.config.eval_every, self.config.checkpoint_every or self.config.eval_every)
        return min(self.config.rounds, *((done // every + 1) * every for every in periods))

    def reached_the_stop(self) -> bool:
        goal, row = self.config.stop_at_accuracy, self.folder.last_row()
        return goal is not None and row is not None and (row["accuracy"] or 0.0) >= goal

    def _train(self, progress: rounds.Progress, count: int) -> tuple[rounds.Progress, rounds.Report, float]:
        """Run ``count`` rounds; return also the seconds they took, without compilation."""
        compiled, started = self.compile_seconds(), time.perf_counter()
        progress, report = self.engine.run(progress, count)
        report = jax.device_get(report)
        seconds = time.perf_counter() - started - (self.compile_seconds() - compiled)
        self.account(int(progress.round), report, seconds)
        return progress, report, seconds

    def account(self, done: int, report: rounds.Report, seconds: float) -> None:
        """Add up what a call of the engine, which ended after ``done`` rounds, has done and taken.

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
                f"{self.folder.path} stays (a smaller --lr or --clip_norm may help; --allow_nonfinite goes on)"
            )
            self.folder.note_divergence(str(error))
            raise error

    def _evaluate(self, progress: rounds.Progress, report: rounds.Report, done: int) -> dict[str, Any]:
        compiled, started = self.compile_seconds(), time.perf_counter()
        extra: dict[str, Any] = {name: float(value) for name, value in report.info.items() if np.ndim(value) == 0}
        if self.tests_clients:
            assert self.personal is not None
            clients = self.personal.test(progress)
            extra |= clients.columns() | self._architecture_counts(clients)
        variables = self.engine.deployed(progress)
        if variables is None:  # nothing is deployed: what counts is the clients' own models
            accuracy, loss = extra["personal_accuracy"], extra["personal_loss"]
        else:
            accuracy, loss = map(float, self.evaluation.one(variables))
        individual = self.engine.individual(progress)
        if individual is not None:
            each = self.evaluation.each(individual).accuracy
            extra |= {"individual_mean": each.mean(), "individual_min": each.min(), "individual_max": each.max()}
        down, up, peer = self.traffic
        if peer:
            extra["bytes_peer"] = peer
        self.seconds += time.perf_counter() - started - (self.compile_seconds() - compiled)
        return {
            "round": done,
            "accuracy": accuracy,
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
        """Whether every evaluation tests each client's own model."""
        return self.engine.strategy.personal_model is not None or self.config.eval_clients

    def _architecture_counts(self, clients: Clients) -> dict[str, int]:
        """Return how many clients have each network of a zoo."""
        networks = self.model.networks
        if len(networks) == 1:
            return {}
        counts = np.bincount(clients.architecture, minlength=len(networks))
        return {f"network_{number}_{model.name}": counts[number] for number, model in enumerate(networks)}

    def interrupted(self, done: int, number: int) -> Interrupted:
        command = f"{configuration.COMMAND} --flagfile={self.folder.path / 'run.flags'}"
        return Interrupted(
            f"stopped after round {done} of {self.config.rounds}, saved; go on with: "
            f"{command} --run_dir={self.folder.path} --resume",
            128 + number,
        )

    def finish(self, progress: rounds.Progress, done: int) -> Result:
        config, rows = self.config, self.folder.rows()
        if self.checkpoints.latest() != done:
            self._save(progress, done)
        summary = summarise(rows, config.target_accuracy) | {
            "compile_seconds": self.compile_seconds(),
            "seconds_per_round": self.train_seconds / done,
            **self.engine.seconds_per_round(),
            "images_per_second": self.images / self.train_seconds,
            "seconds": self.seconds,
            "peak_memory_bytes": peak_memory_bytes(),
            "strategy": config.strategy,
            "dataset": config.dataset,
            "model": config.model,
            "parameters": self.model.num_parameters(),
            "seed": config.seed,
            "partition_hash": self.federated.hash(),
            "devices": [device.device_kind for device in self.engine.axis.mesh.devices.flat],
            "lanes": self.engine.axis.lanes,
            "versions": versions(),
        }
        variables = self.engine.deployed(progress)
        if variables is not None and (holdout := self.federated.holdout) is not None:
            own = samples(holdout, holdout.dataset.x, holdout.dataset.y)
            result = Evaluation(self.model, own, self.engine.axis).one(variables)
            summary |= {"holdout_accuracy": float(result.accuracy), "holdout_loss": float(result.loss)}
        if self.personal is not None:
            summary |= self._test_clients(self.personal, progress)
        if self.folder.writes:
            self.folder.write_summary(summary)
            runs = {str(self.folder.path): rows} | {other: read_rows(other) for other in config.compare_to}
            plots.curves(runs, self.folder.path / "curves.png")
        return Result(
            summary, rows, self.folder.path, self.model, variables, progress.server, writes=self.folder.writes
        )

    def _test_clients(self, personal: PersonalEvaluation, progress: rounds.Progress) -> dict[str, float]:
        """Test every client's last model, fine-tuned too if wanted; keep ``clients.csv`` and a picture."""
        config, last = self.config, personal.test(progress)
        summary, results = last.columns(), {"personal": last}
        if config.finetune_epochs:
            results["finetuned"] = personal.finetuned(progress, config.finetune_epochs)
            summary |= results["finetuned"].columns("finetuned")
        if self.folder.writes:
            names = self.federated.names or [str(client) for client in range(self.federated.num_clients)]
            networks = [network.name for network in self.model.networks]
            table = {
                "client": list(range(self.federated.num_clients)),
                "name": list(names),
                "architecture": last.architecture.tolist(),
                "network": [networks[number] for number in last.architecture],
                "samples": self.federated.sizes.tolist(),
                "test_samples": last.count.astype(int).tolist(),
                "validation_accuracy": last.validation.tolist(),
                "accuracy": last.accuracy.tolist(),
            }
            if config.finetune_epochs:
                table["finetuned_accuracy"] = results["finetuned"].accuracy.tolist()
            self.folder.write_clients(table)
            plots.personal(
                self.folder.rows(),
                {name: clients.accuracy[clients.count > 0].tolist() for name, clients in results.items()},
                self.folder.path / "personal.png",
            )
        return summary

    def compile_seconds(self) -> float:
        """Return the seconds that the run has spent in tracing and compiling."""
        personal = self.personal.programs.values() if self.personal else ()
        programs = (*self.engine.programs.values(), *self.evaluation.programs.values(), *personal)
        return self.compile_seconds_before + sum(program.compile_seconds for program in programs)


@contextlib.contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """Yield a list that receives the number of the first stop signal; the second one stops at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals reach the main thread only
        return

    def note(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        print("\nstopping after the rounds under way (once more: at once) ...", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def peak_memory_bytes() -> int:
    """Return the largest memory in use so far: of the accelerators together, else of this process."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    if all(each and "peak_bytes_in_use" in each for each in statistics):
        return sum(each["peak_bytes_in_use"] for each in statistics)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def versions() -> dict[str, str]:
    """Return the versions of everything that can change numbers."""
    packages = ("fedjax_mr", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return {"python": platform.python_version()} | found
