"""Several seeds of one setting in one compiled program (see `fedjax_mr.engine.rounds.SeedRounds`)."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from fedjax_mr.data import Dataset
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.round import Progress, Report
from fedjax_mr.engine.rounds import SeedRounds
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.config import Config
from fedjax_mr.experiment.experiment import Experiment, Result
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.processes import ALONE
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import RunLoop, set_up


def run_seeds(
    configs: Sequence[Config], *, dataset: Dataset | None = None, model: Any = None
) -> list[Result | DivergedError]:
    """Run several seeds of one setting in one compiled program.

    Each seed has its own run folder and can be resumed alone. A seed that diverges does not stop the others. The
    seconds of a call are divided evenly over the seeds.

    Args:
      configs: configurations that differ only in ``seed``, ``partition_seed`` and ``run_dir``.
      dataset: as in `run.run`; used by all seeds.
      model: as in `run.run`; used by all seeds.

    Returns:
      For each seed its result, or the error if it diverged.

    Raises:
      UserError: bad input, other differences, a strategy that works on the host between rounds, several CPU devices, or
        folders to resume with different numbers of completed rounds.
      Interrupted: Ctrl-C or a termination signal, after checkpoints.
    """
    resolved = [resolve(config, dataset=dataset, model=model) for config in configs]
    configs, user_objects = [each.config for each in resolved], resolved[0].user_objects
    first = configs[0]
    for config in configs:
        apart = {name: getattr(config, name) for name in ("seed", "partition_seed", "run_dir")}
        if different := configuration.differences(dataclasses.replace(first, **apart), config):
            raise UserError(
                f"seeds in one program may differ only in seed, partition_seed and run_dir: {'; '.join(different)}"
            )
    cohort_size = len(configs) * first.cohort
    set_up_jax(devices=first.devices, cohort_size=cohort_size)
    axis = client_axis(devices=first.devices, lanes=first.lanes, cohort_size=cohort_size)
    with contextlib.ExitStack() as cleanup:
        divided = [federated_data(config, dataset=user_objects.dataset) for config in configs]
        built = [user_objects.build(config, federated) for config, federated in zip(configs, divided, strict=True)]
        experiments = [
            set_up(config, federated, network, ALONE, cleanup, notes=each.notes)
            for each, federated, (config, network) in zip(resolved, divided, built, strict=True)
        ]
        rounds = experiments[0].rounds
        if rounds.on_host:
            raise UserError("seeds in one program need the clients' samples and memories on the devices")
        if first.strategy == "centralized":  # its one client has the full index, which joins all seeds
            raise UserError(
                "seeds of centralized cannot train in one program, because its client would get those of all seeds"
            )
        if rounds.constants.problem.public is not None:
            raise UserError(
                "seeds with public samples cannot train in one program, because each seed has other public samples"
            )
        all_constants = [experiment.rounds.constants for experiment in experiments]
        together = SeedRounds(rounds.build, all_constants, axis, stop_at_divergence=not first.allow_nonfinite)
        return Seeds(experiments, together).run()


class Seeds(RunLoop):
    """Experiments that train in one program. Each has its own evaluations and checkpoints."""

    def __init__(self, experiments: Sequence[Experiment], rounds: SeedRounds) -> None:
        """Keep the experiments and their common rounds."""
        super().__init__(experiments)
        self.rounds = rounds

    def _start(self) -> tuple[Progress, int]:
        starts = [experiment.start() for experiment in self.experiments]
        rounds_done = [done for _, done in starts]
        if len(set(rounds_done)) > 1:
            raise UserError(
                f"the seeds have completed different numbers of rounds ({rounds_done}): resume them one by one"
            )
        return self.rounds.stack([progress for progress, _ in starts]), rounds_done[0]

    def _advance(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        compiled = self.rounds.programs.compile_seconds
        alive = [number not in self.ended for number in range(len(self.experiments))]
        progress, report = self.rounds.run(progress, count, alive)
        share = (self.rounds.programs.compile_seconds - compiled) / len(self.experiments)
        for experiment in self.experiments:
            experiment.compile_seconds_before += share
        return progress, report

    def _part(self, tree: Any, number: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[number], tree)
