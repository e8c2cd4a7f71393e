"""Deep mutual learning: two networks of one client learn from its samples and from each other.

Zhang, Xiang, Hospedales, Lu: Deep Mutual Learning, CVPR 2018. Here both networks are updated at once instead of in
turn. Both logits are computed before the updates, and each network treats the probabilities q of the other as
constants. With weights 1, the gradient of the mean loss with respect to the logits of a network with probabilities p is
((p - onehot) + (p - q)) / batch size, independent of the architectures. Used by FedMe, FML and FedKEMF.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from fedjax_mr.client import local, optimizers
from fedjax_mr.client.local import Batch, LocalSetting, LocalStep, Loss, Metrics
from fedjax_mr.client.samples import ClientData


class Weights(NamedTuple):
    """The weights of the two terms of a network's loss."""

    supervised: float = 1.0  # cross-entropy with the labels
    mutual: float = 1.0  # KL(probabilities of the other network || probabilities of this network)


class Pair(NamedTuple):
    """One value for each of the two networks."""

    first: Any
    second: Any


Difference = Callable[[jax.Array, jax.Array], jax.Array]
"""(outputs of a network [B, ...], constant outputs of the other network [B, ...]) -> difference [B]."""


def mutual_loss(models: Pair, weights: Pair, *, difference: Difference | None = None) -> Loss:
    """The sum of the losses of both networks. Its ``params`` and ``state`` are pairs.

    The default difference is that of the task: KL(probabilities of the other || own probabilities) for classes.
    """

    def loss(params: Pair, state: Pair, batch: Batch, key: jax.Array) -> tuple[jax.Array, Pair]:
        (first, first_state), (second, second_state) = (
            model.train_apply(*variables, batch.x, mask=batch.mask, key=model_key)
            for model, *variables, model_key in zip(models, params, state, jax.random.split(key), strict=True)
        )

        def one(logits: jax.Array, other: jax.Array, weights: Weights) -> jax.Array:
            supervised = local.task_losses(models.first, logits, batch)
            return weights.supervised * supervised + weights.mutual * apart(logits, jax.lax.stop_gradient(other))

        apart = difference or models.first.task.divergence
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
    difference: Difference | None = None,
) -> tuple[Pair, Metrics]:
    """Train two networks on the same batches, each with its own optimizer state. Consumes ``key``.

    Args:
      models: the networks.
      setting: epochs, batch size, optimizer.
      pair: the variables of each network.
      data: the client's data.
      key: the client's key of this round.
      weights: the `Weights` of each network's loss.
      difference: the mutual term, a function of the outputs of both networks. Default: see `mutual_loss`.

    Returns:
      The trained pair and the metrics, whose loss is the sum over both networks.
    """
    loss = mutual_loss(models, weights, difference=difference)
    return local.run(in_step(loss, setting.optimizer), setting, pair, data, key)


def in_step(loss: Loss, optimizer: optax.GradientTransformation) -> LocalStep:
    """A step that updates a pair of networks at once, each with its own optimizer state."""

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
        params, state, optimizer_states = carry
        params = map(optimizers.trained, params, optimizer_states)
        return Pair(*({"params": trained, **others} for trained, others in zip(params, state, strict=True)))

    return LocalStep(init, step, result)
