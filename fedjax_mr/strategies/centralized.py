"""Centralized: one network is trained on the training samples of all clients.

This upper bound comes from Matsuda, Sasaki, Xiao, Onizuka: FedMe: Federated Learning via Model Exchange, SDM 2022,
where it trains for up to 200 epochs. Here it trains for rounds x local epochs. As in all methods, the optimizer is
reset in every round. Tests on clients and fine-tuning still use each client's own samples.

The first row of the cohort trains on the samples of all clients. The other rows do not train, so a cohort of one client
is sufficient. No traffic is counted: the samples would be sent once, and models are never sent.
"""

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import averaging, kept_for_validation
from fedjax_mr.strategies.traffic import Traffic


def pool(data: ClientData, sizes: jax.Array, validation_sizes: jax.Array) -> ClientData:
    """Data of a client whose index lists the training rows of all clients, then the validation rows of all clients.

    Args:
      data: data of any client; its size is not changed.
      sizes: training rows of each client [N].
      validation_sizes: validation rows of each client [N].
    """
    position = jnp.arange(data.index.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(sizes + validation_sizes)
    owner = jnp.searchsorted(ends, position, side="right")
    held_out = position >= (ends - validation_sizes)[owner]
    index = jnp.asarray(data.index)[jnp.argsort(held_out, stable=True)]
    return data._replace(index=index, offset=jnp.zeros((), jnp.int32), validation_size=jnp.sum(validation_sizes))


def build(hyper: None, problem: Problem) -> Strategy:
    """Build centralized training.

    Raises:
      UserError: the clients' samples are not all on the devices.
    """
    if not problem.samples_on_device:
        raise UserError("centralized needs the samples of all clients at once: pass data_placement='device'")
    row, sizes = jnp.arange(problem.cohort_size, dtype=jnp.int32), problem.sizes
    validation_sizes = kept_for_validation(problem)

    def client_update(payload, memory, data, round, key):
        pooled = pool(data, sizes, validation_sizes)
        setting = dataclasses.replace(problem.local, max_size=data.index.shape[0])
        model, metrics = local.train(problem.model, setting, payload["model"], pooled, key)
        return {"trained": model}, memory, metrics

    return averaging(problem)._replace(
        select=lambda state, round, key: Cohort(row, jnp.where(row == 0, jnp.sum(sizes), 0)),
        client_update=client_update,
        server_update=lambda state, uploads, *_: (state._replace(model=trees.take(uploads["trained"], row[0])), {}),
        traffic=lambda *_: Traffic(),
    )
