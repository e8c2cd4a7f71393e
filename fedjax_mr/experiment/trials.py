"""Several trials of one method in one compiled program (see `fedjax_mr.engine.rounds.TrialRounds`)."""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import jax

from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.data import Dataset
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.round import Progress, Report
from fedjax_mr.engine.rounds import TrialRounds
from fedjax_mr.errors import DivergedError, UserError, usual_arithmetic
from fedjax_mr.experiment import guarantee
from fedjax_mr.experiment.experiment import Experiment, Result
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.processes import ALONE
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.experiment.run import RunLoop, set_up

ABSENT = "absent"  # of a number that is zero or not set, so the program has no place for it


def run_together(
    configs: Sequence[Config], *, dataset: Dataset | None = None, model: Any = None, variables: Any = None
) -> list[Result | DivergedError]:
    """Run several trials in one compiled program: any seeds, partitions and numbers, such as learning rates.

    Each trial has its own run folder and can be resumed alone. A trial that diverges does not stop the others. The
    seconds of a call are divided evenly over the trials.

    Args:
      configs: configurations that differ only in ``run_dir`` and in what compiled programs take as arguments: the
        seeds, the partition (but not its number of clients) and the numbers of the method and of the optimizers. A
        momentum, weight decay or similar number must be zero or absent in all of them or in none.
      dataset: as in `run.run`; used by all trials.
      model: as in `run.run`; used by all trials.
      variables: as in `run.run`; used by all trials. Networks with frozen variables need them.

    Returns:
      For each trial its result, or the error if it diverged.

    Raises:
      UserError: bad input, other differences, a strategy that works on the host between rounds, or folders to resume
        with different numbers of completed rounds.
      Interrupted: Ctrl-C or a termination signal, after checkpoints.
    """
    resolved = [resolve(config, dataset=dataset, model=model, variables=variables) for config in configs]
    configs, user_objects = [each.config for each in resolved], resolved[0].user_objects
    first = configs[0]
    for config in configs:
        if different := other_differences(first, config):
            raise UserError(f"trials in one program may differ only in seeds, partition and numbers: {different}")
    cohort_size = len(configs) * first.cohort
    set_up_jax(devices=first.devices, cohort_size=cohort_size)
    axis = client_axis(devices=first.devices, lanes=first.lanes, cohort_size=cohort_size)
    with contextlib.ExitStack() as cleanup, usual_arithmetic():
        built = []
        for config in configs:
            federated = federated_data(config, dataset=user_objects.dataset)
            config, network = user_objects.build(config, federated)
            built.append((guarantee.complete(config, federated, network)[0], federated, network))
        experiments = [
            set_up(config, federated, network, ALONE, cleanup, notes=each.notes)
            for each, (config, federated, network) in zip(resolved, built, strict=True)
        ]
        if experiments[0].rounds.on_host:
            raise UserError("trials in one program need the clients' samples and memories on the devices")
        if first.strategy == "centralized":  # its one client has the full index, which joins all trials
            raise UserError(
                "trials of centralized cannot train in one program, because its client would get those of all trials"
            )
        if experiments[0].rounds.constants.problem.public is not None:  # taken from the training samples
            raise UserError("trials with public samples cannot train in one program: each one trains on other samples")
        all_constants = [experiment.rounds.constants for experiment in experiments]
        code = experiments[0].rounds.trial.code
        together = TrialRounds(all_constants, axis, stop_at_divergence=not first.allow_nonfinite, code=code)
        return Trials(experiments, together).run()


def other_differences(first: Config, second: Config) -> str:
    """The differences of two configurations that keep them from training in one program, in words; "" if none."""
    ours, theirs = _in_common(first), _in_common(second)
    flags = [flag for flag in dict.fromkeys((*ours, *theirs)) if ours.get(flag) != theirs.get(flag)]
    return "; ".join(
        f"{flag} must be zero or absent in all of them or in none"
        if ABSENT in (ours.get(flag), theirs.get(flag))
        else f"{flag} is {ours.get(flag)} and {theirs.get(flag)}"
        for flag in flags
    )


def kind(config: Config) -> str:
    """All settings that must be equal in the trials of one program, as a text."""
    return json.dumps(_in_common(config))


def _in_common(config: Config) -> dict[str, Any]:
    """The settings of a trial that are no arguments of its program, by flag, and the optional numbers that are absent.

    Seed, partition and numbers are arguments. With other shapes of them, such as another number of clients, a program
    is compiled anew.
    """
    decisive, common = configuration.decisive(config), {}
    for setting, _ in configuration.setting_values(config):
        value = decisive.get(setting.flag)
        if setting.is_number and setting.info.group != "Partition":
            if value in (None, 0):
                common[setting.flag] = ABSENT
        elif setting.flag in decisive and setting.compiled != "argument":
            common[setting.flag] = value
    return common


class Trials(RunLoop):
    """Experiments that train in one program. Each has its own evaluations and checkpoints."""

    def __init__(self, experiments: Sequence[Experiment], rounds: TrialRounds) -> None:
        """Keep the experiments and their common rounds."""
        super().__init__(experiments)
        self.rounds = rounds

    def _start(self) -> tuple[Progress, int]:
        starts = [experiment.start() for experiment in self.experiments]
        rounds_done = [done for _, done in starts]
        if len(set(rounds_done)) > 1:
            raise UserError(
                f"the trials have completed different numbers of rounds ({rounds_done}): resume them one by one"
            )
        return self.rounds.stack([progress for progress, _ in starts]), rounds_done[0]

    def _advance(self, progress: Progress, count: int) -> tuple[Progress, Report]:
        self.rounds.keep_running([number not in self.ended for number in range(len(self.experiments))])
        return self.rounds.run(progress, count)

    def _part(self, tree: Any, number: int) -> Any:
        return jax.tree.map(lambda leaf: leaf[number], tree)
