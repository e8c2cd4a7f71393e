"""Which models the units of FedMR's K models stem from: the share of units of a common origin, replayed from the seed.

After a round every model is put together from units (tensors, layers or segments) of the K uploaded models. Followed
back over the last H rounds, each unit of a model has one origin: the row of the list of K models that it stood in H
rounds before. No training is needed: the permutations depend on seed and round alone. Printed for each H:

    common    the share of pairs of units of one model that have the same origin, mean over the models. It is 1 for
              H = 0; from H = 1 on, uniform permutations make 1 / K of it in expectation.
    largest   the largest share of a model's units that stems from one origin, mean over the models.

(Two of the K models never share a unit: recombination uses each copy once.) Rounds of the first stage average, so
nothing can be followed back beyond them.
"""

import argparse

import jax
import numpy as np

from fedjax_mr.analysis import runs, tables
from fedjax_mr.engine.round import SERVER
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import config as configuration
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.base import unit_permutations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_data_argument(parser)
    parser.add_argument("--round", type=int, default=None, help="the last round looked at (default: the last trained)")
    parser.add_argument("--back", type=int, default=5, help="largest H (default: 5)")


def main(arguments: argparse.Namespace) -> None:
    """Print the shares of each run."""
    if arguments.back < 1:
        raise UserError(f"--back={arguments.back} is too small: at least 1")
    rows: list[tuple[str, ...]] = [("run", "H", "common", "1 / K", "largest", "units")]
    for run in runs.read(arguments.runs):
        last = max(run.checkpoints(), default=0) if arguments.round is None else arguments.round
        found = replay(run, last=last, back=arguments.back, data_dir=arguments.data_dir)
        for steps, origins in enumerate(found):
            common, largest = shares(origins)
            units, count = origins.shape
            rows.append((run.name, str(steps), f"{common:.4f}", f"{1 / count:.4f}", f"{largest:.4f}", str(units)))
    print(tables.aligned(rows))


def replay(run: runs.RunRecord, *, last: int, back: int, data_dir: str | None = None) -> list[np.ndarray]:
    """Return for H = 0, 1, ..., ``back`` the origins [U, K] of the units of the K models after round ``last``.

    Entry (u, j) is the row that unit u of model j stood in H rounds before. The list ends early at the first round, or
    where recombination began.

    Raises:
      UserError: the run is not of FedMR's own recombination.
    """
    hyper = configuration.hyper(run.config)
    if not isinstance(hyper, fedmr.Hyper) or hyper.secure or not hyper.server_recombines:
        raise UserError(f"{run.path}: only the server's recombination of fedmr can be replayed")
    if last < 0:
        raise UserError(f"--round={last} is too small: at least 0")
    config = run.config if data_dir is None else runs.with_data_dir(run.config, data_dir)
    model = build_model(config, federated_data(config).dataset)
    units, count = fedmr.recombination_units(hyper, model.layers()), config.cohort
    origins = np.tile(np.arange(count), (len(units), 1))
    found = [origins]
    for round in range(last - 1, max(hyper.stage1_rounds, last - back) - 1, -1):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), SERVER), round)
        permutations = np.asarray(unit_permutations(key, len(units), count))
        origins = np.take_along_axis(permutations, origins, axis=1)
        found.append(origins)
    return found


def shares(origins: np.ndarray) -> tuple[float, float]:
    """Return of origins [U, K] the share of pairs of a model's units with one origin, and the largest of one origin."""
    units, count = origins.shape
    numbers = (origins[:, :, None] == np.arange(count)).sum(axis=0)  # [K models, K origins] units
    pairs = (numbers * (numbers - 1)).sum(axis=1) / max(units * (units - 1), 1)
    return float(pairs.mean()), float((numbers.max(axis=1) / units).mean())
