"""Write the trained network of a run as a folder that loads with orbax and Flax alone.

FOLDER receives the variables (orbax), network.json (class, fields, normalisation), an example and a README. A
user-supplied network can only be exported in Python: fmr.load(RUN, model=...).export(FOLDER).
"""

# ruff: noqa: E402
from fedjax_mr.experiment import interrupts

interrupts.begin(__name__)  # before the imports that take seconds

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedjax_mr.errors import UserError
from fedjax_mr.experiment import imports
from fedjax_mr.experiment.load import load
from fedjax_mr.experiment.messages import flags_in_errors


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0, or 2 for bad input.

    Args:
      arguments: command-line arguments without the program name. Default: those of this process.
    """
    parser = _Parser(prog="python -m fedjax_mr.export", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("folder", metavar="FOLDER", help="the new folder")
    parser.add_argument("--round", type=int, help="round of the checkpoint (default: the newest)")
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint of the best evaluation (requires a run with --keep_best)"
    )
    parser.add_argument(
        "--client", type=int, help="export the personal model of this client (default: the deployed model)"
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="add the adapters to the weights (required with adapters; the folder has the names of the base)",
    )
    parser.add_argument("--data_dir", metavar="DIR", help="folder that holds the datasets (default: as in the run)")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="FILE",
        help="Python file with an imported method",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="allow running the Python files that the run imported, or the copies in its folder (default: no)",
    )
    try:
        chosen = parser.parse_args(arguments)
        imports.load(chosen.imports)
        with imports.blamed(), flags_in_errors():
            run = load(chosen.run, round=chosen.round, best=chosen.best, data_dir=chosen.data_dir, trust=chosen.trust)
            folder = run.export(chosen.folder, client=chosen.client, merged=chosen.merged)
        print(f"exported into {folder}: try python example.py there")
    except UserError as error:
        print(f"fedjax-mr: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
