"""A run: set up, its loop of compiled calls, evaluations and checkpoints, stop signals, divergence, going on."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_mr import registry
from fedjax_mr.data import Dataset, FederatedData
from fedjax_mr.engine.clients import ClientAxis
from fedjax_mr.engine.devices import memory_by_name, set_up_jax
from fedjax_mr.engine.program import give_back_memory
from fedjax_mr.engine.round import Progress, Report
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment import imports, interrupts
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.experiment import Experiment, Result, versions
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.folder import RunFolder
from fedjax_mr.experiment.logs import OnRow
from fedjax_mr.experiment.processes import Processes, join_processes
from fedjax_mr.experiment.report import ProgressBar
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.models import Model

SECONDS_PER_CALL = 5.0  # a compiled call returns after about this long, so that progress and Ctrl-C stay alive

# In these settings, processes that share a run may differ.
ABOUT_THE_PROCESS = ("data_dir", "progress", "coordinator", "num_processes", "process_id", "join_timeout")


class Interrupted(KeyboardInterrupt):
    """The user asked to stop, and everything is saved. Not an `Exception`, so ``except Exception`` does not catch it.

    Attributes:
      exit_code: 128 plus the number of the signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the line to print and the code to exit with."""
        super().__init__(message)
        self.exit_code = exit_code


def run(
    config: Config,
    *,
    dataset: Dataset | None = None,
    model: Any = None,
    on_row: OnRow | None = None,
    record: bool = True,
) -> Result:
    """Run an experiment, or go on with one, and return its result.

    User-supplied samples and networks are recorded as ``given:NAME:HASH``. Such a run is resumed by
    ``fmr.load(FOLDER).resume(dataset=..., model=...)``, which needs them again.

    Args:
      config: all settings of the run.
      dataset: one's own samples (`from_arrays`), in place of the data set that ``config`` names.
      model: one's own network, in place of the one that ``config`` names: any Flax module from samples [B, ...] to
        logits [B, C]; a list of several where clients have different ones (see `models.user_module.bind`).
      on_row: called with each evaluation, a row of ``metrics.jsonl`` as a dictionary, when it is in that file; of
        several processes, the first one's is. A resumed run calls it for the rows that it writes, among them again
        those after its last checkpoint. Whatever it raises ends the run, which can be resumed.
      record: draw the pictures of the run folder at the end; off, a short run in a loop takes two seconds less.

    Raises:
      UserError: bad input, and nothing was changed; or the memory is exhausted.
      DivergedError: a loss or weight is not finite; the last good checkpoint stays.
      Interrupted: Ctrl-C or a termination signal; a checkpoint was written.
      LostError: another process of the run is out of reach.
    """
    config, user_objects, notes = resolve(config, dataset=dataset, model=model)
    if on_row is not None and not callable(on_row):
        raise UserError(f"on_row is {on_row!r}, but must be a function of one row")
    processes = join_processes(
        coordinator=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
        join_timeout=config.join_timeout,
    )
    set_up_jax(devices=config.devices, cohort_size=config.cohort, num_processes=processes.count)
    federated = processes.together(lambda: federated_data(config, dataset=user_objects.dataset))
    config, network = processes.together(lambda: user_objects.build(config, federated))
    processes.agree({"data": federated.hash()} | versions() | shared(config))
    interrupts.check()
    with contextlib.ExitStack() as at_the_end, processes.lost_by_name(), memory_by_name():
        at_the_end.callback(give_back_memory)
        experiment = set_up(
            config, federated, network, processes, at_the_end, notes=notes, on_row=on_row, record=record
        )
        try:
            (end,) = RunLoop([experiment]).run()
        except Exception as error:
            if imports.blame(error) and not experiment.images:  # a method that never trained: nothing to go on with
                experiment.folder.to_keep = experiment.folder.resumed
            raise
    if isinstance(end, DivergedError):
        raise end
    return end


def shared(config: Config) -> dict[str, Any]:
    """Return the settings in which all processes of a run must agree, as plain values by flag."""
    kept = {flag: value for flag, value in configuration.to_json(config).items() if flag not in ABOUT_THE_PROCESS}
    return kept | {"import": imports.hashes(config.imports)}


def set_up(
    config: Config,
    federated: FederatedData,
    model: Model,
    processes: Processes,
    at_the_end: contextlib.ExitStack,
    *,
    notes: Iterable[str] = (),
    on_row: OnRow | None = None,
    record: bool = True,
) -> Experiment:
    """Build the simulator and take the run folder; ``at_the_end`` a folder without a run is removed."""
    simulator = simulator_of(config, federated, model)
    folder = open_folder(config, processes)
    at_the_end.callback(folder.withdraw)
    if config.progress and processes.writes:
        notes = [*notes, *federated.notes]
        if federated.holdout is not None and simulator.rounds.strategy.global_model is None:
            notes.append(
                f"the {federated.holdout.num_clients} clients that never train are not tested: {config.strategy} "
                "deploys no model that they could take"
            )
        print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
        print(headline(config, federated, simulator.axis), file=sys.stderr)
    return Experiment(config, simulator, folder, processes, on_row=on_row, record=record)


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
    optimizer = "" if config.server_optimizer == "none" else f", server optimizer {config.server_optimizer}"
    return (
        f"{config.strategy}{optimizer}: {config.cohort} of {federated.num_clients} clients per round, "
        f"{registry.shown(config.dataset)} ({config.partition}), {registry.shown(config.model)}; "
        f"{axis.num_devices} x {kind}, {axis.lanes} lane{'s' if axis.lanes > 1 else ''}"
    )


class RunLoop:
    """The loop of a run: calls of compiled rounds, between them what is due, stop signals, and the end.

    Here of one experiment; `fedjax_mr.experiment.seeds.Seeds` has several that advance in the same calls.
    """

    def __init__(self, experiments: Sequence[Experiment]) -> None:
        """Gather experiments whose settings differ in nothing that the loop looks at."""
        self.experiments = experiments
        self.ended: dict[int, Result | DivergedError] = {}

    @property
    def alive(self) -> list[int]:
        """The numbers of the experiments that have not ended."""
        return [number for number in range(len(self.experiments)) if number not in self.ended]

    def run(self) -> list[Result | DivergedError]:
        """Train until every experiment has ended; return each one's result, or the reason why it ended early."""
        first = self.experiments[0]
        config = first.config
        with interrupts.stop_signals() as asked, contextlib.ExitStack() as at_the_end:
            interrupts.check()
            for experiment in self.experiments:
                at_the_end.callback(experiment.close)
            progress, done = self._start()
            bar = ProgressBar(config.rounds, done, quiet=not (config.progress and first.processes.writes))
            at_the_end.callback(bar.close)
            rounds_per_call = 1
            compiled, started = self._compile_seconds(), time.perf_counter()
            self._finish(progress, done)  # those that had ended before
            while self.alive:
                before, count = done, min(rounds_per_call, first.next_event(done) - done)
                progress, report, seconds = self._train(progress, count)
                seconds, stop = self._confer(seconds, asked)
                done = int(self._part(progress.round, 0))
                rounds_per_call = max(1, int(SECONDS_PER_CALL * (done - before) / max(seconds, 1e-6)))
                self._record(progress, report, done, seconds, stop=stop > 0)
                at_work = time.perf_counter() - started - (self._compile_seconds() - compiled)
                bar.update(
                    done, seconds=at_work, images_per_second=self._images_per_second(), row=first.folder.last_row()
                )
                self._finish(progress, done)
                if stop and self.alive:
                    self._draw(self.alive)
                    raise interrupted(self.experiments[self.alive[0]], done, stop)
        return [self.ended[number] for number in range(len(self.experiments))]

    # --- one experiment, or several that advance in the same calls

    def _start(self) -> tuple[Progress, int]:
        """Return the progress to go on from, and the rounds done."""
        return self.experiments[0].start()

    def _advance(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        """Run up to ``count`` rounds."""
        return self.experiments[0].rounds.run(progress, count)

    def _part(self, tree: Any, number: int) -> Any:
        """Return an experiment's part of a progress or report."""
        return tree

    # --- the steps of the loop

    def _train(self, progress: Progress, count: int) -> tuple[Progress, Report, float]:
        """Run up to ``count`` rounds; return also the seconds they took, without compilation."""
        compiled, started = self._compile_seconds(), time.perf_counter()
        progress, report = self._advance(progress, count)
        report = jax.device_get(report)
        return progress, report, time.perf_counter() - started - (self._compile_seconds() - compiled)

    def _confer(self, seconds: float, asked: list[int]) -> tuple[float, int]:
        """Return the first process's seconds, and the stop signal that any process has received (0: none)."""
        processes = self.experiments[0].processes
        everyone = [json.loads(text) for text in processes.exchange(json.dumps([seconds, *asked]))]
        return everyone[0][0], max(number for _, *numbers in everyone for number in (0, *numbers))

    def _record(self, progress: Progress, report: Report, done: int, seconds: float, *, stop: bool) -> None:
        """Add up a call's work, its seconds shared out evenly; evaluate and save what is due; note who has diverged."""
        alive = self.alive
        for number in alive:
            experiment, own = self.experiments[number], self._part(report, number)
            try:
                experiment.account(done, own, seconds / len(alive))
            except DivergedError as error:
                self.ended[number] = error
                self._draw([number])
            else:
                experiment.record_due(self._part(progress, number), own, done, stop=stop)

    def _draw(self, numbers: Sequence[int]) -> None:
        """Draw the pictures of experiments that end early, if the disk allows it: what counts is saved already."""
        for number in numbers:
            with contextlib.suppress(UserError):
                self.experiments[number].draw()

    def _finish(self, progress: Progress, done: int) -> None:
        """Finish the experiments that have nothing left to do."""
        for number in self.alive:
            if self.experiments[number].has_ended(done):
                self.ended[number] = self.experiments[number].finish(self._part(progress, number), done)

    def _compile_seconds(self) -> float:
        return sum(experiment.compile_seconds() for experiment in self.experiments)

    def _images_per_second(self) -> float:
        images, seconds = (
            sum(getattr(each, name) for each in self.experiments) for name in ("images", "train_seconds")
        )
        return images / seconds


def interrupted(experiment: Experiment, done: int, number: int) -> Interrupted:
    """Return the error of a run that was stopped after ``done`` rounds by the signal ``number``."""
    config, path = experiment.config, experiment.folder.path
    flags = shlex.join([f"--flagfile={path / 'run.flags'}", f"--run_dir={path}", "--resume"])
    command = f"{configuration.COMMAND} {flags}"
    if needed := configuration.needed_objects(config):
        command = f"fmr.load({str(path)!r}).resume({needed}) in Python, with the same in place of the dots"
    return Interrupted(f"stopped after round {done} of {config.rounds}, saved; go on with: {command}", 128 + number)
