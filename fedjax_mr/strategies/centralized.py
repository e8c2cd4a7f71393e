"""Centralized: all clients' training samples in one place, one network trained on them; what no federation can do.

The oracle of Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange, SDM 2022, which trains for
up to 200 epochs; here for ``rounds`` x ``local_epochs``, and as in all methods the optimiser starts anew in every
round. The clients stay who they are for every test (``--eval_clients``) and for ``--finetune_epochs``.

The first row of the cohort trains on everybody's samples, the others do nothing, so ``--cohort=1`` is enough. No bytes
are counted: the samples would be sent once, and no model ever.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.base import Cohort, Problem, Strategy, Traffic, averaging, kept_for_validation


def pool(data: ClientData, sizes: jax.Array, validation_sizes: jax.Array) -> ClientData:
    """One client's data with all clients' training rows first in its index, then those kept for validation.

    Args:
      data: any client's data; the size stays.
      sizes: training rows of each client [N].
      validation_sizes: rows that each client keeps for validation [N].
    """
    position = jnp.arange(data.index.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(sizes + validation_sizes)
    owner = jnp.searchsorted(ends, position, side="right")
    held_out = position >= (ends - validation_sizes)[owner]
    index = jnp.asarray(data.index)[jnp.argsort(held_out, stable=True)]
    return data._replace(index=index, offset=jnp.zeros((), jnp.int32), validation_size=jnp.sum(validation_sizes))


def build(hyper: None, problem: Problem) -> Strategy:
    """Build centralized training."""
    row, sizes = jnp.arange(problem.cohort_size, dtype=jnp.int32), problem.sizes
    validation_sizes = kept_for_validation(problem)

    def client_update(payload, memory, data, round, key):
        if problem.num_clients > 1 and data.index.shape[0] <= problem.local.max_size:  # the rows of one client alone
            raise UserError("centralized needs all samples at once: --data_placement=device")
        everything = pool(data, sizes, validation_sizes)
        setting = dataclasses.replace(problem.local, max_size=data.index.shape[0])
        model, metrics = local.train(problem.model, setting, payload["model"], everything, key)
        return {"trained": model}, memory, metrics

    return averaging(problem)._replace(
        select=lambda state, key: Cohort(row, jnp.where(row == 0, jnp.sum(sizes), 0)),
        client_update=client_update,
        server_update=lambda state, uploads, *_: (state._replace(model=trees.take(uploads["trained"], row[0])), {}),
        traffic=lambda *_: Traffic(),
    )
