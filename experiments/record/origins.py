"""Origins of the units of FedMR's K models: the share of units with a common origin, replayed from the seed.

In each round FedMR composes every model from units (tensors, layers or segments) of the K uploaded models. The origin
of a unit over the last H rounds is its row in the list of K models H rounds before. No training is needed, as the
permutations depend only on seed and round. The table has for each H:

    common    share of pairs of units of one model that have the same origin, mean over the models. It is 1 for H = 0.
              From H = 1 on, its expectation under uniform permutations is 1 / K.
    largest   largest share of a model's units that have one origin, mean over the models.

Two of the K models never share a unit, because recombination uses each copy once. Rounds of the first stage average the
models, so origins end there.
"""

import argparse

import jax
import numpy as np

from fedjax_mr.analysis import runs, tables
from fedjax_mr.config import config as configuration
from fedjax_mr.engine.round import SERVER
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.build import build_model
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.keys import random_key
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.parts import unit_permutations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_data_argument(parser)
    parser.add_argument("--round", type=int, default=None, help="last round. Default: the last one with a checkpoint")
    parser.add_argument("--back", type=int, default=5, help="largest H. Default: 5")


def main(arguments: argparse.Namespace) -> None:
    """Print the shares of each run."""
    if arguments.back < 1:
        raise UserError(f"--back={arguments.back} must be at least 1")
    rows: list[tuple[str, ...]] = [("run", "H", "common", "1 / K", "largest", "units")]
    for run in runs.read(arguments.runs):
        last = max(run.checkpoints(), default=0) if arguments.round is None else arguments.round
        history = replay(run, last=last, back=arguments.back, data_dir=arguments.data_dir)
        for steps, origins in enumerate(history):
            common, largest = shares(origins)
            units, count = origins.shape
            rows.append((run.name, str(steps), f"{common:.4f}", f"{1 / count:.4f}", f"{largest:.4f}", str(units)))
    print(tables.aligned(rows))


def replay(run: runs.RunRecord, *, last: int, back: int, data_dir: str | None = None) -> list[np.ndarray]:
    """The origins [U, K] of the units of the K models after round ``last``, for H = 0, 1, ..., ``back``.

    Entry (u, j) is the row of unit u of model j, H rounds before. The list ends at the first round, or where
    recombination begins.

    Raises:
      UserError: the run does not recombine models on the server as FedMR does.
    """
    hyper = configuration.hyper(run.config)
    if not isinstance(hyper, fedmr.Hyper) or run.config.exchange != "none" or not hyper.server_recombines:
        raise UserError(f"{run.path}: only fedmr's recombination on the server can be replayed")
    if last < 0:
        raise UserError(f"--round={last} must be at least 0")
    config = runs.with_data_dir(run.config, data_dir)
    model = build_model(config, federated_data(config).dataset)
    units, count = fedmr.recombination_units(hyper, model.layers()), config.cohort
    origins = np.tile(np.arange(count), (len(units), 1))
    history = [origins]
    for round in range(last - 1, max(hyper.stage1_rounds, last - back) - 1, -1):
        key = jax.random.fold_in(jax.random.fold_in(random_key(config.seed), SERVER), round)
        permutations = np.asarray(unit_permutations(key, len(units), count))
        origins = np.take_along_axis(permutations, origins, axis=1)
        history.append(origins)
    return history


def shares(origins: np.ndarray) -> tuple[float, float]:
    """Share of pairs of a model's units with a common origin, and largest share of one origin, from origins [U, K]."""
    units, count = origins.shape
    numbers = (origins[:, :, None] == np.arange(count)).sum(axis=0)  # [K models, K origins] units
    pairs = (numbers * (numbers - 1)).sum(axis=1) / max(units * (units - 1), 1)
    return float(pairs.mean()), float((numbers.max(axis=1) / units).mean())
