"""Which servers take a cohort with vacant slots for a smaller cohort. Coalitions of any size then share one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.channel.base import upload_shapes
from fedjax_mr.engine.round import RunConstants
from fedjax_mr.engine.trials import of_coalition
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.strategies.interface import Cohort

PROBED = (0, 1, 1000)  # rounds in which the servers are compared, because some methods have stages


def takes_vacant_slots(constants: RunConstants) -> bool:
    """Whether a server with K slots, of which half are vacant, does the same as one with a cohort of half the size.

    The two servers get the same random uploads. A vacant slot has the mean of the others as its upload (`trees.fill`)
    and no samples. Servers with K models have other states, and so do not.
    """
    half = max(1, constants.problem.cohort_size // 2)
    try:
        outcomes = [_outcome(of_coalition(constants, range(half), vacant=vacant), half) for vacant in (True, False)]
    except UserError:  # the method needs a larger cohort
        return False
    if None in outcomes or len({str(jax.tree.map(jnp.shape, each)) for each in outcomes}) > 1:
        return False
    leaves = [[np.asarray(leaf) for leaf in jax.tree.leaves(each)] for each in outcomes]
    return all(np.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(*leaves, strict=True))


def _outcome(constants: RunConstants, clients: int) -> Any:
    """What the first clients receive and the new state, from random uploads in the rounds `PROBED`.

    None if the uploads are not only models of floating-point numbers that the server uses as they arrive.
    """
    problem, strategy = constants.problem, constants.strategy
    if strategy.receive is not None or strategy.exchange is not None:
        return None
    shapes = upload_shapes(strategy, problem)
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(shapes)):
        return None
    random, slots = np.random.default_rng(0), problem.cohort_size
    own = jax.tree.map(lambda leaf: 0.1 * random.normal(size=(clients, *leaf.shape)).astype(np.float32), shapes)
    padded = jax.tree.map(lambda leaf: np.resize(leaf, (slots, *leaf.shape[1:])), own)
    ids, key = np.arange(slots, dtype=np.int32), random_key(0)
    cohort = Cohort(jnp.asarray(ids), jnp.asarray(problem.sizes)[ids])

    @jax.jit
    def one_round(state: Any, uploads: Any, round: jax.Array) -> tuple[Any, Any]:
        received = jax.tree.map(lambda leaf: leaf[:clients], strategy.dispatch(state, cohort, key))
        return received, strategy.server_update(state, uploads, cohort, round, key)[0]

    uploads, state, found = jax.jit(trees.fill)(padded, ids < clients), jax.jit(strategy.init)(key), []
    for round in PROBED:
        received, state = one_round(state, uploads, jnp.int32(round))
        found.append((received, state))
    return found
