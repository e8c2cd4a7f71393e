"""Two networks of one client that learn from its samples and from each other.

Zhang, Xiang, Hospedales, Lu: Deep Mutual Learning, CVPR 2018, with both networks moved at once instead of in turn.
Both logits are taken before either network moves, and each network takes the other's probabilities as constants, so
the gradient of the mean loss with respect to its logits is (p - onehot) + (p - q) over the batch size, with weights 1,
whatever the two architectures are. FedMe, FML and FedKEMF train their clients so.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_mr.engine import local
from fedjax_mr.engine.local import Batch, ClientData, LocalSetting, Loss, Metrics
from fedjax_mr.models import Variables


class Weights(NamedTuple):
    """The two weights of a network's loss."""

    supervised: float = 1.0  # cross-entropy with the labels
    mutual: float = 1.0  # KL(probabilities of the other network || its own)


class Pair(NamedTuple):
    """Something for each of the two networks."""

    first: Any
    second: Any


Difference = Callable[[jax.Array, jax.Array], jax.Array]
"""(own logits [B, C], the other network's, constant) -> how far they are from them [B]."""


def divergence(logits: jax.Array, other: jax.Array) -> jax.Array:
    """Return KL(the other's probabilities || own ones) [B] of logits [B, C]."""
    return optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), jax.nn.log_softmax(other))


def mutual_loss(models: Pair, weights: Pair, *, difference: Difference = divergence) -> Loss:
    """Return the sum of both networks' losses; ``params`` and ``state`` hold ``first`` and ``second``."""

    def loss(params: Any, state: Variables, batch: Batch, key: jax.Array) -> tuple[jax.Array, Variables]:
        found, states = {}, {}
        for name, model, own_key in zip(Pair._fields, models, jax.random.split(key), strict=True):
            found[name], states[name] = model.train_apply(
                params[name], state[name], batch.x, mask=batch.mask, key=own_key
            )

        def one(own: jax.Array, other: jax.Array, weights: Weights) -> jax.Array:
            supervised = optax.softmax_cross_entropy_with_integer_labels(own, batch.y)
            return weights.supervised * supervised + weights.mutual * difference(own, jax.lax.stop_gradient(other))

        first, second = found["first"], found["second"]
        losses = one(first, second, weights.first) + one(second, first, weights.second)
        return local.masked_mean(losses, batch.mask), states

    return loss


def train_pair(
    models: Pair,
    setting: LocalSetting,
    pair: Pair,
    data: ClientData,
    key: jax.Array,
    *,
    weights: Pair,
    difference: Difference = divergence,
) -> tuple[Pair, Metrics]:
    """Train two networks on the same batches, each with an optimiser of its own; consumes ``key``.

    Args:
      models: the networks.
      setting: epochs, batch size, optimiser.
      pair: the variables of each.
      data: the client's data.
      key: the client's key of this round.
      weights: what each network's loss is made of.
      difference: of the two networks' logits.

    Returns:
      The trained pair, and the metrics; their loss is the sum of both networks'.
    """
    variables: Variables = {"params": {name: each["params"] for name, each in pair._asdict().items()}}
    for name, each in pair._asdict().items():
        variables[name] = {collection: tree for collection, tree in each.items() if collection != "params"}
    labels = {name: name for name in Pair._fields}
    optimizer = optax.partition(dict.fromkeys(Pair._fields, setting.optimizer), labels)
    loss = mutual_loss(models, weights, difference=difference)
    trained, metrics = local.minimise(loss, setting, variables, data, key, optimizer=optimizer)
    return Pair(*({"params": trained["params"][name], **trained[name]} for name in Pair._fields)), metrics
