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
from fedjax_mr.engine.local import Batch, ClientData, LocalSetting, LocalStep, Loss, Metrics


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
    """The sum of both networks' losses; its ``params`` and ``state`` are pairs."""

    def loss(params: Pair, state: Pair, batch: Batch, key: jax.Array) -> tuple[jax.Array, Pair]:
        (first, first_state), (second, second_state) = (
            model.train_apply(*own, batch.x, mask=batch.mask, key=own_key)
            for model, *own, own_key in zip(models, params, state, jax.random.split(key), strict=True)
        )

        def one(own: jax.Array, other: jax.Array, weights: Weights) -> jax.Array:
            supervised = optax.softmax_cross_entropy_with_integer_labels(own, batch.y)
            return weights.supervised * supervised + weights.mutual * difference(own, jax.lax.stop_gradient(other))

        losses = one(first, second, weights.first) + one(second, first, weights.second)
        return local.masked_mean(losses, batch.mask), Pair(first_state, second_state)

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
    loss = mutual_loss(models, weights, difference=difference)
    return local.run(in_step(loss, setting.optimizer), setting, pair, data, key)


def in_step(loss: Loss, optimizer: optax.GradientTransformation) -> LocalStep:
    """Two networks that move at once, each by an optimiser of its own, from a pair of variables to a pair."""

    def init(pair: Pair) -> tuple:
        params, state = zip(*map(local.trained_and_state, pair), strict=True)
        return Pair(*params), Pair(*state), Pair(*map(optimizer.init, params))

    def step(carry: tuple, batch: Batch, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, state, optimizer_states = carry
        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(params, state, batch, key)
        moved = [optimizer.update(*each) for each in zip(gradients, optimizer_states, params, strict=True)]
        updates, optimizer_states = zip(*moved, strict=True)
        return (optax.apply_updates(params, Pair(*updates)), state, Pair(*optimizer_states)), value

    def result(carry: tuple) -> Pair:
        params, state, _ = carry
        return Pair(*({"params": own, **others} for own, others in zip(params, state, strict=True)))

    return LocalStep(init, step, result)
