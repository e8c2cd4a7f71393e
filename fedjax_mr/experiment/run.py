"""A run: its setup, and its loop of compiled calls, evaluations, checkpoints and stop signals."""

import contextlib
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_mr import plots, registry
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.engine import program
from fedjax_mr.engine.clients import ClientAxis
from fedjax_mr.engine.devices import memory_errors, set_up_jax, settings_of_numbers
from fedjax_mr.engine.program import give_back_memory
from fedjax_mr.engine.round import Progress, Report
from fedjax_mr.errors import DivergedError, Interrupted, UserError, usual_arithmetic
from fedjax_mr.experiment import checkpoint, guarantee
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.experiment import Experiment, Result, versions
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import RunFolder
from fedjax_mr.experiment.logs import OnRow
from fedjax_mr.experiment.processes import Processes, connected, join_processes, lost_in_one_line
from fedjax_mr.experiment.report import ProgressBar
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.simulated_time import events_of, most_at_once
from fedjax_mr.models import Model
from fedjax_mr.terminal import interrupts

SECONDS_PER_CALL = 5.0  # approximate duration of a compiled call; between calls, progress is shown and Ctrl-C works


def run(
    config: Config,
    *,
    dataset: Dataset | None = None,
    model: Any = None,
    variables: Any = None,
    on_row: OnRow | None = None,
    record: bool = True,
) -> Result:
    """Run or resume an experiment.

    User-supplied samples and networks are recorded as ``given:NAME:HASH``. Resume such a run with
    ``fmr.load(FOLDER).resume(dataset=..., model=...)``.

    Args:
      config: all settings of the run.
      dataset: user-supplied samples (`from_arrays`). Default: the dataset that ``config`` names.
      model: user-supplied network, a Flax module from samples [B, ...] to logits [B, C], or a list of them if clients
        have different networks (see `models.user_module.bind`). Default: the network that ``config`` names.
      variables: values of all variables of the network, such as pretrained ones. Those that ``config.trainable`` or
        ``config.adapter`` freeze never change, the others start from them. Default: initialised from the seed.
      on_row: called with each evaluation (a row of ``metrics.jsonl`` as a dictionary) after it is written. Of several
        processes, only the first calls it. A resumed run repeats the rows after its last checkpoint. An exception of
        ``on_row`` ends the run, which can be resumed. ``on_row`` may change the working directory.
      record: whether to draw the figures of the run folder at the end, which takes about two seconds. Default: True.

    Returns:
      The result.

    Raises:
      UserError: bad input (nothing was changed), or out of memory.
      DivergedError: a loss or weight is not finite. The last good checkpoint is kept.
      Interrupted: Ctrl-C or a termination signal, after a checkpoint.
      LostError: another process of the run is lost.
    """
    config, user_objects, notes = resolve(config, dataset=dataset, model=model, variables=variables)
    if on_row is not None and not callable(on_row):
        raise UserError(f"on_row is {on_row!r}, but must be a function of one row")
    count = join_processes(
        coordinator=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
        join_timeout=config.join_timeout,
    )
    set_up_jax(devices=config.devices, cohort_size=most_at_once(config), num_processes=count)
    processes = connected()
    processes.on_first(lambda: RunFolder.check(config))  # before the samples are loaded, which may take a minute
    federated = processes.together(lambda: federated_data(config, dataset=user_objects.dataset))
    config, network = processes.together(lambda: user_objects.build(config, federated))
    config, found = guarantee.complete(config, federated, network)
    notes = (*notes, *found)
    facts = {"data": federated.hash(), "num_processes": config.num_processes}
    processes.agree(facts | versions() | settings_of_numbers() | shared(config))
    interrupts.check()
    with contextlib.ExitStack() as cleanup, usual_arithmetic(), lost_in_one_line(), memory_errors():
        cleanup.callback(give_back_memory)
        threading.Thread(target=_import_ahead, args=(record,)).start()
        experiment = set_up(config, federated, network, processes, cleanup, notes=notes, on_row=on_row, record=record)
        try:
            (end,) = RunLoop([experiment]).run()
        except Exception as error:
            # An imported method that failed before training leaves nothing to resume.
            if imports.blame(error) and not experiment.images:
                experiment.folder.to_keep = experiment.folder.resumed
            raise
    if isinstance(end, DivergedError):
        raise end
    return end


def _import_ahead(record: bool) -> None:
    """Import what a run needs only later, in a thread beside the first compilation, which needs no Python."""
    # An ImportError is raised again where the package is used. RuntimeError: a refused run ends Python meanwhile.
    with contextlib.suppress(ImportError, RuntimeError):
        checkpoint.import_ahead()
        if record:
            plots.import_ahead()


def shared(config: Config) -> dict[str, Any]:
    """The settings in which all processes of a run must agree, as plain values by flag."""
    values = configuration.setting_values(config)
    kept = {each.flag: each.plain(value) for each, value in values if not each.info.per_process}
    return kept | {"import": imports.hashes(config.imports)}


def set_up(
    config: Config,
    federated: FederatedData,
    model: Model,
    processes: Processes,
    cleanup: contextlib.ExitStack,
    *,
    notes: Iterable[str] = (),
    on_row: OnRow | None = None,
    record: bool = True,
) -> Experiment:
    """Build the simulator and create the run folder. ``cleanup`` removes a folder without a run."""
    events = events_of(config, federated, model)
    secret = guarantee.secret_of(config, processes)
    simulator = simulator_of(config, federated, model, events=events, secret=secret)
    folder = open_folder(config, processes)
    cleanup.callback(folder.close)
    if config.progress and processes.writes:
        notes = list(notes)  # those of the partition are logged already
        if federated.holdout is not None and simulator.rounds.strategy.global_model is None:
            notes.append(
                f"the {federated.holdout.num_clients} clients that never train are not tested: {config.strategy} "
                "deploys no model"
            )
        if config.eval_each and not simulator.rounds.keeps_models:
            notes.append(f"--eval_each has no effect: the server of {config.strategy} keeps no models side by side")
        if any(federated.dataset.categories) and not all(
            hasattr(network.module, "categories") for network in model.networks
        ):
            notes.append(
                f"{model.name} reads the numbers of categories in {federated.dataset.name} as if they were measured: "
                "mlp_table has a vector for each category"
            )
        if config.precision != "float32" and simulator.axis.platform == "cpu":
            notes.append(f"--precision={config.precision} is usually slower on CPUs than float32")
        print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
        print(headline(config, federated, simulator.axis), file=sys.stderr)
    return Experiment(config, simulator, folder, processes, events=events, on_row=on_row, record=record, secret=secret)


def open_folder(config: Config, processes: Processes) -> RunFolder:
    """Open the run folder. The first process chooses and writes it."""
    opened: list[RunFolder] = []

    def choose() -> tuple[str, bool]:
        opened.append(RunFolder.open(config))
        return str(opened[0].path), opened[0].resumed

    path, resumed = processes.on_first(choose)
    return opened[0] if opened else RunFolder(Path(path), resumed=resumed, writes=False)


def headline(config: Config, federated: FederatedData, axis: ClientAxis) -> str:
    """The first line that a run prints."""
    kind = axis.mesh.devices.flat[0].device_kind
    optimizer = "" if config.server_optimizer == "none" else f", server optimizer {config.server_optimizer}"
    return (
        f"{config.strategy}{optimizer}: {config.cohort} of {federated.num_clients} clients per round, "
        f"{registry.shown(config.dataset)} ({config.partition}), {registry.shown(config.model)}; "
        f"{axis.num_devices} x {kind}, {axis.lanes} lane{'s' if axis.lanes > 1 else ''}"
    )


class RunLoop:
    """The loop of a run: compiled calls, and between them evaluations, checkpoints and stop signals.

    This class runs one experiment. `fedjax_mr.experiment.trials.Trials` runs several in the same compiled calls.
    """

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        """Keep the experiments. All settings that the loop uses must be equal."""
        self.experiments = experiments
        for experiment in experiments:
            experiment.sharing = len(experiments)
        self.ended: dict[int, Result | DivergedError] = {}

    @property
    def alive(self) -> list[int]:
        """The numbers of the experiments that have not ended."""
        return [number for number in range(len(self.experiments)) if number not in self.ended]

    def run(self) -> list[Result | DivergedError]:
        """Train until every experiment has ended. Return the result of each, or the error of one that diverged."""
        first = self.experiments[0]
        config = first.config
        with interrupts.stop_signals() as signals, contextlib.ExitStack() as cleanup:
            interrupts.check()
            for experiment in self.experiments:
                cleanup.callback(experiment.logs.close)
            progress, done = self._start()
            self._finish(progress, done)  # experiments that had ended before
            shown = config.progress and first.processes.writes and self.alive
            bar = ProgressBar(config.rounds, done, quiet=not shown)
            cleanup.callback(bar.close)
            cleanup.enter_context(self._stopped_at_once())
            rounds_per_call = 1
            compiled, started = program.compile_seconds(), time.perf_counter()
            while self.alive:
                before, count = done, min(rounds_per_call, first.next_event(done) - done)
                progress, report, seconds = self._train(progress, count)
                seconds, stop = self._agree(seconds, signals)
                done = int(self._part(progress.round, 0))
                rounds_per_call = max(1, int(SECONDS_PER_CALL * (done - before) / max(seconds, 1e-6)))
                self._record(progress, report, done, seconds, stop=stop > 0)
                at_work = time.perf_counter() - started - (program.compile_seconds() - compiled)
                images = sum(each.images for each in self.experiments)
                trained = sum(each.train_seconds for each in self.experiments)
                bar.update(done, seconds=at_work, images_per_second=images / trained, row=first.folder.last_row())
                self._finish(progress, done)
                if stop and self.alive:
                    self._draw(self.alive)
                    words = f"stopped after round {done} of {config.rounds}, saved"
                    raise interrupted(self.experiments[self.alive[0]], words, stop)
        return [self.ended[number] for number in range(len(self.experiments))]

    @contextlib.contextmanager
    def _stopped_at_once(self) -> Iterator[None]:
        """Say which checkpoint is kept if a second Ctrl-C ends the body."""
        try:
            yield
        except Interrupted:
            raise
        except KeyboardInterrupt:
            experiment = self.experiments[(self.alive or [0])[0]]
            saved = experiment.checkpoints.latest()
            words = f"stopped at once; the checkpoint of round {saved} of {experiment.config.rounds} is kept"
            raise interrupted(experiment, words, signal.SIGINT) from None

    # --- one experiment, or several that advance in the same calls

    def _start(self) -> tuple[Progress, int]:
        """The initial progress and its number of completed rounds."""
        return self.experiments[0].start()

    def _advance(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        """Run up to ``count`` rounds."""
        return self.experiments[0].rounds.run(progress, count)

    def _part(self, tree: Any, number: int) -> Any:
        """The part of one experiment in a progress or report."""
        return tree

    # --- the steps of the loop

    def _train(self, progress: Progress, count: int) -> tuple[Progress, Report, float]:
        """Run up to ``count`` rounds. The third result is the duration in seconds, without compilation."""
        compiled, started = program.compile_seconds(), time.perf_counter()
        progress, report = self._advance(progress, count)
        report = jax.device_get(report)
        return progress, report, time.perf_counter() - started - (program.compile_seconds() - compiled)

    def _agree(self, seconds: float, signals: list[int]) -> tuple[float, int]:
        """The seconds of the first process, and the stop signal received by any process (0 if none)."""
        processes = self.experiments[0].processes
        everyone = [json.loads(text) for text in processes.exchange(json.dumps([seconds, *signals]))]
        return everyone[0][0], max(number for _, *numbers in everyone for number in (0, *numbers))

    def _record(self, progress: Progress, report: Report, done: int, seconds: float, *, stop: bool) -> None:
        """Add the counts and equal shares of the seconds of a call. Evaluate and save if due. Keep divergences."""
        alive = self.alive
        for number in alive:
            experiment, part = self.experiments[number], self._part(report, number)
            try:
                experiment.account(done, part, seconds / len(alive))
            except DivergedError as error:
                self.ended[number] = error
                self._draw([number])
            else:
                experiment.record_due(self._part(progress, number), part, done, stop=stop)

    def _draw(self, numbers: Sequence[int]) -> None:
        """Draw the figures of experiments that end early. Errors are ignored, because all results are saved."""
        for number in numbers:
            with contextlib.suppress(UserError):
                self.experiments[number].draw()

    def _finish(self, progress: Progress, done: int) -> None:
        """Finish the experiments that have ended."""
        for number in self.alive:
            if self.experiments[number].ended_by(done):
                self.ended[number] = self.experiments[number].finish(self._part(progress, number), done)


def interrupted(experiment: Experiment, words: str, number: int) -> Interrupted:
    """The exception of a run that the signal ``number`` stopped: ``words``, and how to go on."""
    config, path = experiment.config, experiment.folder.path
    flags = shlex.join([f"--flagfile={path / 'run.flags'}", f"--run_dir={path}", "--resume"])
    command = f"{configuration.COMMAND} {flags}"
    if needed := configuration.needed_objects(config):
        command = f"fmr.load({str(path)!r}).resume({needed}) in Python, with the same objects in place of the dots"
    return Interrupted(f"{words}; go on with: {command}", 128 + number)
