"""What a worker does for several runs of ``sweep --batch``: it trains them in one program where that pays."""

import sys
from collections.abc import Sequence

import jax

from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.engine.devices import set_up_jax, usable_cores
from fedjax_mr.errors import DivergedError, UserError
from fedjax_mr.experiment.run import run
from fedjax_mr.experiment.trials import run_together
from fedjax_mr.terminal.commands import exit_code
from fedjax_mr.terminal.messages import flags_in_errors

BETWEEN = "--"  # separates the flags of two runs


def main(arguments: Sequence[str]) -> int:
    """Train the runs and return the exit code of the worst one.

    Runs that cannot train in one program train one by one.

    Args:
      arguments: the flags of each run, with `BETWEEN` in between.
    """
    commands: list[list[str]] = [[]]
    for argument in arguments:
        commands.append([]) if argument == BETWEEN else commands[-1].append(argument)

    def work() -> int:
        configs = [configuration.parse(command) for command in commands]
        set_up_jax(devices=configs[0].devices, cohort_size=len(configs) * configs[0].cohort)
        if pays(configs[0]):
            try:
                return _together(configs)
            except UserError as reason:
                print(f"fedjax-mr: not together: {reason}", file=sys.stderr)
        return min((code for code in map(_alone, configs) if code), default=0)  # the worst: 1, then 2, then 3

    return exit_code(work)


def _together(configs: Sequence[Config]) -> int:
    with flags_in_errors(configs[0].strategy):
        results = run_together(configs)
    return max((result.exit_code for result in results if isinstance(result, DivergedError)), default=0)


def _alone(config: Config) -> int:
    try:
        with flags_in_errors(config.strategy):
            run(config)
    except UserError as reason:  # a stop by a signal ends the other runs, too
        print(f"fedjax-mr: {reason}", file=sys.stderr)
        return reason.exit_code
    return 0


def pays(config: Config) -> bool:
    """Whether several trials in one program are faster: on accelerators, and on CPUs if one trial leaves cores idle."""
    if jax.default_backend() != "cpu":
        return True
    devices = min(config.devices or usable_cores(), config.cohort)
    return devices < usable_cores() or config.cohort % devices > 0
