"""FedMD: clients with different networks agree on their outputs for public data.

Li and Wang: FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS workshop 2019. Before all else a
client trains on the labelled public data, then on its own. In every round the clients' logits for S public samples
are averaged; each client brings its own closer to the mean (digest), then trains on its own samples (revisit). No
parameters travel.

Deviations. A client speaks once per round here, after it has trained: the consensus of a round is the mean of the
logits that the clients of the round before left for this round's samples. With all clients in every round this is the
paper's order, for a client's logits do not change between its training and the next round. A client's first round is
its start: public data, own data, no digest. Samples are drawn uniformly (the code: by classes). The loss of the digest,
left open by the paper, is the code's mean absolute difference of logits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.errors import UserError
from fedjax_mr.models import Variables
from fedjax_mr.strategies.base import Problem, Strategy, nothing, own_starts
from fedjax_mr.strategies.hyper import LARGEST_BATCH, field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedMD's own settings."""

    subset: int = field(
        5000, "S, public samples per round; all if there are fewer", unit="samples", low=1, source="Li and Wang 2019"
    )
    public_epochs: int = field(
        10, "epochs on the public data in a client's first round", unit="epochs", low=0, source="ours; code: 20"
    )
    private_epochs: int = field(
        10,
        "epochs on its own data in a client's first round",
        unit="epochs",
        low=0,
        source="ours; the code: 25",
    )
    digest_epochs: int = field(1, "epochs of the digest", unit="epochs", low=0, source="the code")
    digest_batch: int = field(256, "batch on public data", unit="samples", low=1, high=LARGEST_BATCH, source="the code")
    digest_loss: str = field(
        "mae",
        "between own logits and the consensus: mean absolute or squared difference, or KL of the softmaxes",
        choices=("mae", "mse", "kl"),
        source="the code; the paper leaves it open",
    )


class State(NamedTuple):
    """The server's state."""

    rows: jax.Array  # [S] which public samples the next round is about
    next_rows: jax.Array  # [S] the same of the round after
    consensus: jax.Array  # [S, C] the mean logits for ``rows``


class Memory(NamedTuple):
    """A client's memory."""

    model: Variables
    trained: jax.Array  # whether it took part before


def difference(logits: jax.Array, target: jax.Array, *, kind: str) -> jax.Array:
    """Return how far logits [B, C] are from the consensus [B, C], per sample; its gradient is zero where they agree."""
    if kind == "mae":
        gap = logits - target
        return jnp.mean(jnp.where(gap == 0, 0.0, jnp.abs(gap)), axis=-1)  # JAX's abs has derivative 1 at 0
    if kind == "mse":
        return jnp.mean(jnp.square(logits - target), axis=-1)
    return optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), jax.nn.log_softmax(target))


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Return FedMD.

    Raises:
      UserError: there are no labelled public data.
    """
    network, public = problem.model, problem.public
    if public is None or public.y is None:
        raise UserError("fedmd wants labelled public data: give --public_share")
    count = public.x.shape[0]
    subset = min(hyper.subset, count)

    def on_public(epochs: Any) -> local.LocalSetting:
        """Return the setting of training on public data; the number of epochs may be traced."""
        return dataclasses.replace(
            problem.local, epochs=epochs, batch_size=min(hyper.digest_batch, count), max_size=count, augment=None
        )

    def draw(key):
        return jax.random.permutation(key, count)[:subset].astype(jnp.int32)

    def init(key):
        one, other = jax.random.split(key)
        return State(draw(one), draw(other), jnp.zeros((subset, problem.num_classes)))

    def init_memory(key):
        return Memory(own_starts(problem, key), jnp.zeros(problem.num_clients, bool))

    def dispatch(state, cohort, key):
        return trees.broadcast(state._asdict(), problem.cohort_size)

    def client_update(payload, memory, data, round, key):
        public_key = jax.random.split(key)[1]  # own samples: the key of Local-only
        choose = lambda start, later: jnp.where(memory.trained, later, start)

        def loss(params, state, batch, key):
            logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            supervised = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
            digested = difference(logits, payload["consensus"][batch.position % subset], kind=hyper.digest_loss)
            return local.masked_mean(choose(supervised, digested), batch.mask), state

        whole = local.whole(public)
        rows = jnp.where(memory.trained, jnp.resize(payload["rows"], (count,)), whole.index)
        chosen = whole._replace(index=rows, size=choose(count, subset))
        setting = on_public(choose(hyper.public_epochs, hyper.digest_epochs))
        model, _ = local.train(network, setting, memory.model, chosen, public_key, loss=loss)

        setting = dataclasses.replace(problem.local, epochs=choose(hyper.private_epochs, problem.local.epochs))
        model, metrics = local.train(network, setting, model, data, key)
        logits = local.outputs(network, model, public, payload["next_rows"])
        return {"logits": logits}, Memory(model, jnp.ones((), bool)), metrics

    def server_update(state, uploads, cohort, round, key):
        return State(state.next_rows, draw(key), jnp.mean(uploads["logits"], axis=0)), {}

    return Strategy(
        init,
        dispatch,
        client_update,
        server_update,
        init_memory=init_memory,
        personal_part=nothing,
        personal_model=lambda part, memory, data, key: memory.model,
    )
