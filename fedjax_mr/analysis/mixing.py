"""What a server does to the models of K clients, as a linear map: how fast they agree, and whether the mean moves.

The map W [K, K] says how the model that client i receives next depends on the model that client j has sent. It is
computed exactly, by the derivative of the method's own server step, for each parameter tensor and each of some rounds.

* ``expected``: second singular value of the mean map of all rounds and tensors: how much of the models' disagreement is
  left after a round, in expectation over the method's random numbers. It is exact for maps without random numbers, and
  an estimate for others: of n random permutations of K models it is about 2 / sqrt(n) where it should be 0.
* ``each round``: the same of the product of the maps of all rounds, per round: how much is really left. A permutation
  of layers leaves all of it (1), although in expectation it averages (0).
* ``mean moves``: the largest deviation of a column sum of W from one. With 0, the mean over the models stays.
* ``MB``: megabytes that a client sends and receives in a round, from the run.
* ``spread``: root mean square distance of the models that the run's last checkpoint keeps from their mean, divided by
  the norm of the mean.

If a method keeps a model of each client, all clients take part in the rounds of the map. Links, the clock and server
optimizers are left out. A method that mixes the models of before the training (``dpsgd_order=mix``) shows the identity,
because the map is that of the trained ones.
"""

import argparse
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.analysis import runs, tables
from fedjax_mr.analysis.runs import RunRecord
from fedjax_mr.channel.base import upload_shapes
from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import Variables
from fedjax_mr.settings import bind
from fedjax_mr.strategies import STRATEGIES, Cohort, Problem, Strategy
from fedjax_mr.strategies.interface import kept_models

NOISE = 0.1  # size of the differences between the models that are mixed, which some servers compare


class Mixing(NamedTuple):
    """The numbers of one method, see the head of this file."""

    expected: float
    each_round: float
    mean_moves: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    runs.add_arguments(parser)
    runs.add_restore_arguments(parser)
    parser.add_argument("--draws", type=int, default=40, help="rounds whose maps are computed. Default: 40")


def main(arguments: argparse.Namespace) -> None:
    """Print the table of all runs."""
    if arguments.draws < 1:
        raise UserError(f"--draws={arguments.draws} must be at least 1")
    rows = [("run", "method", "expected", "each round", "mean moves", "MB", "spread")]
    for run in runs.read(arguments.runs):
        found = of_run(run, draws=arguments.draws, data_dir=arguments.data_dir, trust=arguments.trust)
        spread = _spread(run, data_dir=arguments.data_dir, trust=arguments.trust)
        numbers = (f"{found.expected:.3f}", f"{found.each_round:.3f}", f"{found.mean_moves:.3f}")
        rows.append((run.name, run.config.strategy, *numbers, _megabytes(run), spread))
    print(tables.aligned(rows))


def of_run(run: RunRecord, *, draws: int, data_dir: str | None = None, trust: bool = False) -> Mixing:
    """The numbers of the method of a run, with its clients and its network."""
    config, problem = run.config, runs.rebuild(run, data_dir=data_dir, trust=trust).rounds.constants.problem
    build = bind(STRATEGIES[config.strategy].build, configuration.hyper(config))
    kept = jax.eval_shape(lambda: kept_models(build(problem), build(problem).init(random_key(0))))
    if kept is not None and jax.tree.leaves(kept)[0].shape[0] == problem.num_clients:
        problem = dataclasses.replace(problem, cohort_size=problem.num_clients)
    return numbers_of(maps(build(problem), problem, draws=draws))


def maps(strategy: Strategy, problem: Problem, *, draws: int) -> np.ndarray:
    """The maps [T, L, K, K] of ``draws`` rounds T, one for each parameter tensor L.

    Raises:
      UserError: a client sends or receives something else than one model.
    """
    count, key = problem.cohort_size, random_key(0)
    ids = jnp.arange(count, dtype=jnp.int32)
    cohort = Cohort(ids, problem.sizes[ids])
    shapes = upload_shapes(strategy, problem)
    received = jax.eval_shape(lambda: strategy.dispatch(strategy.init(key), cohort, key))
    if "model" not in shapes or "model" not in received:
        raise UserError("mixing needs a method whose clients receive one model and send one back")

    @jax.jit
    def one_map(state: Any, sent: Variables, round: jax.Array) -> jax.Array:
        zeros = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)

        def after(shift: jax.Array) -> Any:
            """The parameters that the clients receive after they have sent theirs, shifted by ``shift`` [K]."""
            move = lambda leaf: leaf + shift.reshape(-1, *(1,) * (leaf.ndim - 1))
            uploads = zeros | {"model": sent | {"params": jax.tree.map(move, sent["params"])}}
            first, second = jax.random.split(jax.random.fold_in(key, round))
            new, _ = strategy.server_update(state, uploads, cohort, round, first)
            return strategy.dispatch(new, cohort, second)["model"]["params"]

        change = jax.linearize(after, jnp.zeros(count))[1]
        # Leaves [K, K, ...]: of each sender, what each client receives. The mean is taken after the loop: jaxlib 0.10.2
        # sums a product of a matrix and a broadcast vector wrongly (a neighbour of jax issue 39103).
        columns = jax.lax.map(change, jnp.eye(count))
        means = [jnp.mean(leaf.reshape(count, count, -1), axis=2).T for leaf in jax.tree.leaves(columns)]
        return jnp.stack(means)  # [L, K, K]

    state = jax.jit(strategy.init)(key)
    sent = jax.jit(lambda state: _apart(strategy.dispatch(state, cohort, key)["model"], key))(state)
    return np.stack([np.asarray(one_map(state, sent, np.int32(round)), np.float64) for round in range(draws)])


def _apart(models: Variables, key: jax.Array) -> Variables:
    """The models with other parameters for each client."""
    leaves, structure = jax.tree.flatten(models["params"])
    keys = jax.random.split(key, len(leaves))
    moved = [leaf + NOISE * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return models | {"params": jax.tree.unflatten(structure, moved)}


def numbers_of(maps: np.ndarray) -> Mixing:
    """The numbers of maps [T, L, K, K]."""
    count = maps.shape[-1]
    apart = np.eye(count) - 1 / count  # takes the mean away
    inner = apart @ maps @ apart
    product = inner[0]
    for each in inner[1:]:
        product = each @ product
    left = np.linalg.svd(product, compute_uv=False)[:, 0] ** (1 / len(maps))
    expected = np.linalg.svd(inner.mean(axis=(0, 1)), compute_uv=False)[0]
    moves = np.abs(maps.sum(axis=2) - 1).max()
    return Mixing(float(expected), float(left.mean()), float(moves))


def _megabytes(run: RunRecord) -> str:
    """Megabytes that a client of the cohort sends and receives in a round."""
    row = run.rows()[-1]
    total = sum(row.get(name) or 0 for name in ("bytes_down", "bytes_up", "bytes_peer"))
    return f"{total / row['round'] / run.config.cohort / 1e6:.3f}"


def _spread(run: RunRecord, *, data_dir: str | None, trust: bool) -> str:
    """The relative spread of the models of the newest checkpoint, or a dash without several models."""
    if not run.checkpoints():
        return "-"
    models = runs.restore(run, data_dir=data_dir, trust=trust).models
    return "-" if models is None else f"{runs.relative_spread(jax.tree.leaves(models['params'])):.3f}"
