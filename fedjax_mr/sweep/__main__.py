"""The command ``python -m fedjax_mr.sweep``: plan, run, and show a table."""

import sys
from collections.abc import Sequence

from fedjax_mr.analysis import tables
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.resolve import unequal_shares
from fedjax_mr.results import kept
from fedjax_mr.sweep import slurm
from fedjax_mr.sweep.costs import describe, estimate
from fedjax_mr.sweep.plan import Sweep, plan
from fedjax_mr.sweep.runs import run_all
from fedjax_mr.terminal import commands, interrupts

COMMAND = "python -m fedjax_mr.sweep"
USAGE = f"""usage: {COMMAND} [--flag=value ...] [--flagfile=FILE ...]

Run the product of strategies, settings and seeds. The same command again skips finished runs and resumes the others.
The runs are described by the flags of {configuration.COMMAND} (see its --help=all), and the sweep by these:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep and return the exit code.

    0: all runs are finished; 1: a run aborted; 2: bad input, here or in a run; 3: a run diverged; 128 + n: signal n.

    Args:
      arguments: flags without the name of the program. Default: those of the command line.
    """
    return commands.of_several_runs(_sweep, arguments, usage=USAGE, settings=Sweep)


def _sweep(arguments: list[str]) -> int:
    _, sweep = configuration.parse_command(arguments, Sweep)
    if not sweep.wait:
        arguments = [*arguments, "--noprogress"]
    sweep, runs = plan(arguments)
    if sweep.calibrate and not sweep.dry_run:
        raise UserError("--calibrate estimates the time of a plan: add --dry_run")
    for note in unequal_shares([run.config for run in runs]):
        print(note, file=sys.stderr)
    if sweep.dry_run:
        print(f"{len(runs)} runs in {sweep.sweep_dir}:")
        print(describe(runs, estimate(runs) if sweep.calibrate else None))
        return 0
    launch = slurm.launcher(sweep, sweep.sweep_dir, wait=sweep.wait) if sweep.launcher == "slurm" else None
    code = run_all(runs, batch=sweep.batch, launch=launch)
    begun = [run.folder for run in runs if kept.find(run.folder)]
    if begun:
        print(tables.accuracy_table(begun))
    return code


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
