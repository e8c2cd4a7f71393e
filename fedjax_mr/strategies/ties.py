"""TIES-Merging and task arithmetic as rules of a server: a task is a client, its vector the change of its model.

``ties``: Yadav, Tam, Choshen, Raffel, Bansal: TIES-Merging: Resolving Interference When Merging Models, NeurIPS 2023,
Algorithm 1. Of each client's change only the largest numbers stay. Each parameter then takes the sign of the sum of its
changes, and the mean of the changes that have this sign. ``scale`` times this mean is added to the global model.

``taskarithmetic``: Ilharco, Ribeiro, Wortsman, Gururangan, Schmidt, Hajishirzi, Farhadi: Editing Models with Task
Arithmetic, ICLR 2023, section 4: ``scale`` times the sum of the changes is added. With ``scale`` 1 / K it is FedAvg
with equal weights.

Both papers merge once, after the training. Here the server merges in every round.

Two truths (TIES). The released code keeps one number more than ``kept`` says, and where the changes of a parameter add
up to zero, it takes the sign that is in the majority over all parameters. The paper is silent about both. Here it is as
in the code. Task arithmetic has the numbers of its released code (mlfoundations/task_vectors 826a64c: three scales, the
same bits).

Deviations:
* BatchNorm statistics are averaged with equal weights, since a merged variance could become negative.
* A late client, with 0 samples, is left out.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_mr import trees
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging


@dataclasses.dataclass(frozen=True)
class TIES:
    """Hyper-parameters of TIES-Merging."""

    kept: float = field(
        0.2,
        "share of the numbers of each change that are kept, by their absolute values",
        static=True,
        low=0,
        high=1,
        open_low=True,
        source="Yadav et al. 2023",
    )
    scale: float = field(
        1.0, "lambda, factor of the merged change", low=0, open_low=True, source="Yadav et al. 2023, without validation"
    )


@dataclasses.dataclass(frozen=True)
class TaskArithmetic:
    """Hyper-parameters of task arithmetic."""

    scale: float = field(
        0.3,
        "lambda, factor of the sum of all changes",
        low=0,
        open_low=True,
        source="Ilharco et al. 2023: 0.3 to 0.5 for most models, chosen by validation",
    )


def merged(changes: jax.Array, kept: float) -> jax.Array:
    """Trim the changes [K, P], elect the signs, and average what agrees: [P]."""
    size, count = jnp.abs(changes), changes.shape[1]
    least = jnp.sort(size, axis=1)[:, max(count - int(count * kept) - 1, 0), None]  # as the code, one more than kept
    trimmed = jnp.where(size >= least, changes, 0.0)
    sign = jnp.sign(jnp.sum(trimmed, axis=0))
    sign = jnp.where(sign == 0, jnp.sign(jnp.sum(sign)), sign)
    agrees = jnp.where(sign[None] > 0, trimmed > 0, trimmed < 0)
    count = jnp.sum(agrees, axis=0).astype(jnp.float32)
    return jnp.sum(jnp.where(agrees, trimmed, 0.0), axis=0) / jnp.maximum(count, 1.0)


def ties(hyper: TIES, problem: Problem) -> Strategy:
    """Build TIES-Merging."""

    def server_update(state, uploads, cohort, round, key):
        change = merged(_changes(state.model, uploads["model"], cohort), hyper.kept)
        return _moved(state, uploads, cohort, hyper.scale * change), {}

    return averaging(problem)._replace(server_update=server_update)


def taskarithmetic(hyper: TaskArithmetic, problem: Problem) -> Strategy:
    """Build task arithmetic."""

    def server_update(state, uploads, cohort, round, key):
        change = jnp.sum(_changes(state.model, uploads["model"], cohort), axis=0)
        return _moved(state, uploads, cohort, hyper.scale * change), {}

    return averaging(problem)._replace(server_update=server_update)


def _changes(old, new, cohort):
    """The changes of the parameters of the clients that are in time, as vectors [K, P]; 0 of late ones."""
    flat = lambda one: ravel_pytree(trees.subtract(one["params"], old["params"]))[0]
    return jnp.where((cohort.sizes > 0)[:, None], jax.vmap(flat)(new), 0.0)


def _moved(state, uploads, cohort, change):
    """The state with ``change`` [P] added to the parameters of its model."""
    as_params = ravel_pytree(state.model["params"])[1]
    mean = trees.mean(uploads["model"], weights=cohort.sizes > 0)
    return state._replace(model=mean | {"params": trees.add(state.model["params"], as_params(change))})
