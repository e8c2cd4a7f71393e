"""FCCL: clients with different networks align the class-wise correlations of their outputs on unlabelled public data.

Huang, Ye, Du: Learn from Others and Be Yourself in Heterogeneous Federated Learning, CVPR 2022. On public batches a
client trains the matrix of correlations between its logits and the clients' mean logits towards 1 on the diagonal and
-1 elsewhere. On its own samples it learns the labels and distils from two frozen teachers: its network after the
pre-training before its first round, and its network at the end of its last round.

Deviations. The mean logits are those that the clients of the previous round computed for the whole public set, not
those of the current batch: the paper's clients synchronise at every batch. Columns are divided by
sqrt(variance + 1e-6), so that a constant column is harmless. Adam's moments persist from batch to batch; the code
resets them at each batch. The pre-training takes place in a client's first round. Teachers see the samples without
augmentation.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import one_client
from fedjax_mr.models import Variables
from fedjax_mr.settings import LARGEST_BATCH, field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import kept_model, no_targets, nothing, own_start, public_samples, require_epochs

EPSILON = 1e-6  # added to variances

divergence = optax.losses.kl_divergence_with_log_targets


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FCCL."""

    off_diagonal: float = field(
        0.0051, "lambda, weight of the correlations between different classes", low=0, source="Huang et al. 2022"
    )
    public_epochs: int = field(
        1, "epochs on the public data per round", unit="epochs", low=0, source="the authors' code"
    )
    public_batch: int = field(
        256,
        "batch size on the public data",
        unit="samples",
        low=2,
        high=LARGEST_BATCH,
        source="code of FCCL+; the authors' first code: 512",
    )
    private_epochs: int = field(
        10,
        "epochs on its own samples in a client's first round",
        unit="epochs",
        low=0,
        source="ours; the authors' code: 3 to 40",
    )
    teachers: float = field(1.0, "weight of each of the two teachers", low=0, source="the authors' code")


class State(NamedTuple):
    """State of the server."""

    consensus: jax.Array  # [P, C] the mean logits on the P public samples


class Memory(NamedTuple):
    """Memory of one client."""

    model: Variables
    frozen: Variables  # the network after the client's first round
    trained: jax.Array  # bool, whether the client has trained


def standardised(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Standardise the columns of [B, C] over the true samples; padding rows become zero."""
    mask = mask[:, None]
    count = jnp.maximum(jnp.sum(mask), 1.0)
    centred = (logits - jnp.sum(logits * mask, axis=0, keepdims=True) / count) * mask
    return centred * jax.lax.rsqrt(jnp.sum(jnp.square(centred), axis=0, keepdims=True) / count + EPSILON)


def correlation_loss(logits: jax.Array, target: jax.Array, mask: jax.Array, *, off_diagonal: float) -> jax.Array:
    """The loss of equation 3 of logits [B, C] and the clients' mean logits [B, C]."""
    table = standardised(logits, mask).T @ standardised(target, mask) / jnp.maximum(jnp.sum(mask), 1.0)
    same = jnp.diagonal(table)
    others = jnp.sum(jnp.square(1 + table)) - jnp.sum(jnp.square(1 + same))
    return jnp.sum(jnp.square(1 - same)) + off_diagonal * others


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FCCL.

    Raises:
      UserError: there are no public data, or the clients train steps in place of epochs.
    """
    network, public = problem.model, public_samples(problem, "fccl")
    require_epochs(problem, "fccl")
    count = public.x.shape[0]
    public = public._replace(y=no_targets(network, count))
    everything = jnp.arange(count, dtype=jnp.int32)

    def init(key):
        return State(jnp.zeros((count, problem.num_classes)))

    def init_memory(key, client_id):
        model = own_start(problem, key, client_id)
        return Memory(model, model, jnp.zeros((), bool))

    def dispatch(state, cohort, key):
        return {"consensus": trees.broadcast(state.consensus, problem.cohort_size)}

    def client_update(payload, memory, data, round, key):
        public_key = jax.random.split(key)[1]  # own samples use the same key as Local-only
        choose = lambda start, later: jnp.where(memory.trained, later, start)

        def collaborate(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            target = payload["consensus"][batch.position]
            return correlation_loss(logits, target, batch.mask, off_diagonal=hyper.off_diagonal), state

        setting = dataclasses.replace(
            problem.local.in_epochs(choose(0, hyper.public_epochs)),
            batch_size=min(hyper.public_batch, count),
            max_size=count,
            augment=None,
            mix=None,
        )
        model, _ = local.train(network, setting, memory.model, one_client(public), public_key, loss=collaborate)

        known = functools.partial(local.client_outputs, network, data=data, max_size=problem.local.max_size)
        teachers = [known(each) for each in (memory.frozen, memory.model)]
        teachers = [jax.nn.log_softmax(each) for each in teachers]

        def learn(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)

            def losses(batch):
                losses = network.task.objective(logits, batch.y, batch.mask)
                for teacher in teachers:
                    distilled = divergence(jax.nn.log_softmax(logits), teacher[batch.position])
                    losses += choose(0.0, hyper.teachers) * distilled
                return losses

            return local.masked_mean(local.mixed(batch, losses), batch.mask), state

        setting = problem.local.in_epochs(choose(hyper.private_epochs, problem.local.epochs))
        model, metrics = local.train(network, setting, model, data, key, loss=learn)
        frozen = jax.tree.map(choose, model, memory.frozen)
        logits = local.outputs(network, model, public, everything)
        return {"logits": logits}, Memory(model, frozen, jnp.ones((), bool)), metrics

    def server_update(state, uploads, cohort, round, key):
        return State(jnp.mean(uploads["logits"], axis=0)), {}

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        init_memory=init_memory,
        personal_part=nothing,
        personal_model=kept_model,
    )
