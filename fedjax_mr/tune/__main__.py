"""The command ``python -m fedjax_mr.tune``: plan, train the trials, choose, test, and show a table."""

import sys
from collections.abc import Sequence

from fedjax_mr.config import config as configuration
from fedjax_mr.experiment.resolve import unequal_shares
from fedjax_mr.terminal import commands, interrupts
from fedjax_mr.tune import report, studies
from fedjax_mr.tune.plan import Tune, Tuning, plan
from fedjax_mr.tune.rungs import Trainer, climb

COMMAND = "python -m fedjax_mr.tune"
USAGE = f"""usage: {COMMAND} --strategies=NAMES [--flag=value ...] [--flagfile=FILE ...]

Tune methods with the same number of trials each, choose on validation samples, and test the chosen settings on other
seeds. The same command again continues after a stop or a kill, and several processes with the same command share the
runs. The runs are described by the flags of {configuration.COMMAND} (see its --help=all), and the tuning by these:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tuning and return the exit code.

    0: all runs are finished; 1: a run aborted; 2: bad input, here or in a run; 3: a test diverged, or all trials of a
    method did; 128 + n: signal n.

    Args:
      arguments: flags without the name of the program. Default: those of the command line.
    """
    return commands.of_several_runs(_tune, arguments, usage=USAGE, settings=Tune)


def _tune(arguments: list[str]) -> int:
    tuning = plan(arguments)
    asked = [strategy for strategy in tuning.strategies if not tuning.is_drawn(strategy)]
    if asked:
        studies.check(tuning.tune.sampler)
    if tuning.tune.dry_run:
        print(report.plan_text(tuning))
        return 0
    methods = [tuning.run("tests", strategy, tuning.seeds[0], {}).config for strategy in tuning.strategies]
    for note in unequal_shares(methods):
        print(note, file=sys.stderr)
    return _train(tuning, asked)


def _train(tuning: Tuning, asked: Sequence[str]) -> int:
    """Train, choose and test, and return the exit code. Optuna proposes the trials of the methods in ``asked``."""
    drawn = [trial for name in tuning.strategies if name not in asked for trial in tuning.drawn(name)]
    with Trainer(tuning) as trainer:
        standing = climb(trainer, drawn + (studies.first_rung(trainer, asked) if asked else []))
        report.write(tuning, standing)
        best = {name: standing.best(name) for name in tuning.strategies}
        tests = {name: tuning.tests(trial) for name, trial in best.items() if trial is not None}
        planned = [run for runs in tests.values() for run in runs]
        tuning.say(f"tests of the chosen settings on seeds {', '.join(map(str, tuning.seeds))}")
        trainer.train(planned, lambda run: run.state() in ("finished", "diverged"))
    print(report.table(tuning, standing, tests))
    complete = len(tests) == len(tuning.strategies) and all(run.state() == "finished" for run in planned)
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
