"""Compare the programs of all strategies before and after a change that should alter none, without compiling any.

    PYTHONPATH=EARLIER python experiments/lab/same_programs.py --write=before.json    # half a minute on one core
    PYTHONPATH=. python experiments/lab/same_programs.py --check=before.json

EARLIER is a checkout of another commit. A round of each strategy on the small federation of its contract, from the
choice of the clients to the new server state, is lowered to StableHLO: the text that XLA receives, with the names of
functions and values and without those of results and modules. Exit code 1 if something differs.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import jax

NAMES = re.compile(r'\{?jax\.result_info = "[^"]*"\}?|module @\S+')


def of_strategy(strategy: str) -> str:
    """The program of one round as text."""
    from fedjax_mr.engine.round import begin, finish, start, train_client
    from fedjax_mr.testing.federations import make_engine

    engine = make_engine(strategy)

    def one_round(constants):
        progress = start(constants)
        plan, rows = begin(engine.axis, constants, progress)
        trained = jax.lax.map(lambda row: train_client(constants, progress.round, row), rows)
        return finish(constants, progress, plan, trained)

    return NAMES.sub("", jax.jit(one_round).lower(engine.constants).as_text())


def main() -> int:
    """Write or compare the programs, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE", help="write the programs to a file")
    what.add_argument("--check", type=Path, metavar="FILE", help="compare with the programs in a file")
    chosen = parser.parse_args()
    from fedjax_mr.strategies import STRATEGIES

    programs = {strategy: of_strategy(strategy) for strategy in STRATEGIES}
    if chosen.write:
        chosen.write.write_text(json.dumps(programs))
        return 0
    before = json.loads(chosen.check.read_text())
    shared = [strategy for strategy in programs if strategy in before]
    other = [strategy for strategy in shared if programs[strategy] != before[strategy]]
    for strategy in other:
        lines = [len(text[strategy].splitlines()) for text in (before, programs)]
        print(f"{strategy}: another program, {lines[0]} lines before and {lines[1]} after")
    print(f"{len(shared) - len(other)} of {len(shared)} programs are the same")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
