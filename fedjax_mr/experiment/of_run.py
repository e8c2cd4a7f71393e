"""What the commands `export` and `predict` share: the arguments that choose a network of a run folder."""

import argparse
from typing import NoReturn

from fedjax_mr.config import imports
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.load import SavedRun, load


class Parser(argparse.ArgumentParser):
    """A parser that raises UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def parser(command: str, description: str | None) -> Parser:
    """A parser of ``python -m fedjax_mr.COMMAND RUN``. The command adds its other arguments."""
    made = Parser(prog=f"python -m fedjax_mr.{command}", description=description, allow_abbrev=False)
    made.add_argument("run", metavar="RUN", help="run folder")
    return made


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the network, and those that reading a run needs."""
    parser.add_argument("--round", type=int, help="round of the checkpoint (default: the newest)")
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint of the best evaluation (requires a run with --keep_best)"
    )
    parser.add_argument("--client", type=int, help="the personal model of this client (default: the deployed model)")
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


def read(chosen: argparse.Namespace) -> SavedRun:
    """Read the run of the arguments.

    Raises:
      UserError: as `imports.load` and `load`.
    """
    imports.load(chosen.imports)
    return load(chosen.run, round=chosen.round, best=chosen.best, data_dir=chosen.data_dir, trust=chosen.trust)
