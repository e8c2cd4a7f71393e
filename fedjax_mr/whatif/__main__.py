"""The command ``python -m fedjax_mr.whatif``: train the federations of many coalitions, and value the clients."""

import dataclasses
import sys
from collections.abc import Sequence

from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.errors import UserError
from fedjax_mr.settings import field
from fedjax_mr.sweep import grids
from fedjax_mr.terminal import commands, interrupts
from fedjax_mr.terminal.messages import flags_in_errors
from fedjax_mr.whatif.coalitions import KINDS
from fedjax_mr.whatif.train import what_if

COMMAND = "python -m fedjax_mr.whatif"
USAGE = f"""usage: {COMMAND} [--flag=value ...] [--flagfile=FILE ...]

Train the federations of many sets of clients, as if the other clients had never joined, and show what each client
contributes. The same command again continues after a stop or a kill. The federation of all clients is described by the
flags of {configuration.COMMAND} (see its --help=all), and the rest by these:
"""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the command, in addition to the configuration of the federation."""

    coalitions: str = field(
        "all",
        "Sets of clients to train: all subsets, all clients but one (leave_one_out), the first clients of random "
        "orders (orders), or of orders in which each client has each place (stratified)",
        choices=KINDS,
    )
    orders: int = field(20, "Number of random orders of the clients", low=1, high=100_000)
    approximations: bool = field(
        False, "Also approximate the contributions from the uploads of one more training run of all clients"
    )
    seeds: str | None = field(
        None,
        "Seeds of the training, such as 0,1,5 or 0:3. The partition is that of --seed or --partition_seed for all of "
        "them. If omitted, the one of --seed",
    )
    metric: str | None = field(
        None, "Test result that is the value of a set of clients. If omitted, the first of --metrics"
    )
    block: int | None = field(
        None, "Federations that train together. If omitted, as many as fit into memory, at most 256", low=1
    )
    whatif_dir: str = field("runs/whatif", "Folder of the results", path=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 0 success, 2 bad input, 3 a federation diverged, 130 Ctrl-C.

    Args:
      arguments: flags without the name of the program. Default: those of the command line.
    """
    return commands.of_several_runs(_what_if, arguments, usage=USAGE, settings=Settings)


def _what_if(arguments: list[str]) -> None:
    config, settings = configuration.parse_command(arguments, Settings)
    if config.run_dir or config.overwrite or config.resume:
        raise UserError("the results are in --whatif_dir: remove --run_dir, --overwrite and --resume")
    with imports.blamed(), flags_in_errors(config.strategy):
        result = what_if(
            config,
            coalitions=settings.coalitions,
            seeds=grids.seeds_of(settings.seeds) or None,
            metric=settings.metric,
            orders=settings.orders,
            approximations=settings.approximations,
            block=settings.block,
            folder=settings.whatif_dir,
            progress=config.progress,
        )
    print(result.table())
    print(f"results: {settings.whatif_dir}")


if __name__ == "__main__":
    sys.exit(interrupts.run(main))
