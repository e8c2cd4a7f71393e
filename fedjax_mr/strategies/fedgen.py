"""FedGen: the server trains a generator of representations, from which clients distil the knowledge of the others.

Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021, Algorithm 1. The
generator maps a label and noise to a representation. It is trained so that the clients' heads, weighted by their
numbers of samples of the label, assign the representation to the label. Clients train their heads on generated
representations, and regularise their outputs towards those for generated representations of the same labels. Each
client sends its label counts once.

Deviations:
* The losses and the two decays are those of the paper and its code. The sizes and batches of the generator are those of
  FedMR's authors. The noise is uniform, as in both codes; the paper has Gaussian noise.
* The last layer of the generator has the width of the network's representation.
* The labels of a client are counted once. FedGen's code counts the labels of the batches drawn in a round, starting
  from one, and regularises only the first 20 local epochs.
* If no client of a round has two samples of any label, labels with one sample are drawn. Both codes fail.
* Both codes, FedGen's and that of FedMR's authors, weight the server's cross-entropies [B] by label shares [B, 1]. This
  broadcasts to [B, B]: the mean share of a model is multiplied by its mean cross-entropy, so a model with many samples
  of a label has no larger weight for that label. Here each cross-entropy is weighted by the share of its own label,
  which is evidently intended. ``variant=authors`` reproduces FedGen as run by FedMR's authors: with the product of
  means, an optimizer of the server that is reset in every round, and no decay.
"""

import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.models import layers
from fedjax_mr.models.base import Model, Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import averaging, to_all
from fedjax_mr.strategies.traffic import Parcels

SMALLEST_GAMMA = 1e-4  # lower bound of a decaying gamma (code of FedGen)

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedGen."""

    gamma_teacher: float = field(
        0.2,
        "alpha of FedGen's code, weight of the head's loss on generated representations",
        low=0,
        source="code of FedMR's authors: 0.2 for CIFAR-10, 10 for CIFAR-100 and FEMNIST; FedGen's: 10",
    )
    gamma_latent: float = field(
        0.2,
        "beta of FedGen's code, weight of the divergence from the outputs for generated representations",
        low=0,
        source="code of FedMR's authors: 0.2 for CIFAR-10, 1 for CIFAR-100, 10 for FEMNIST; FedGen's: 10, EMNIST 1",
    )
    server_lr: float = field(
        3e-4,
        "learning rate of the server (Adam)",
        low=0,
        open_low=True,
        source="code of FedGen and of FedMR's authors: 3e-4; the latter for CIFAR-100: 1e-4",
    )
    weight_decay: float = field(
        1e-2, "weight decay of the generator", low=0, source="code of FedGen and of FedMR's authors"
    )
    steps: int = field(
        50, "steps of the generator per round", unit="steps", low=0, source="code of FedMR's authors: 10 epochs of 5"
    )
    batch_size: int = field(
        128,
        "batch size of generated representations",
        unit="samples",
        low=2,
        high=2048,  # memory grows with the number of pairs
        source="code of FedMR's authors; FedGen's: 32",
    )
    noise: int = field(100, "dimension of the noise", low=1, high=4096, source="code of FedMR's authors; FedGen's: 32")
    hidden: int = field(
        512,
        "hidden units of the generator",
        low=1,
        high=16_384,
        source="code of FedMR's authors; FedGen's: 256",
    )
    decay: float = field(
        0.98,
        "decay per round of the server's learning rate and of both gammas; ignored with variant=authors",
        low=0,
        open_low=True,
        high=1,
        source="FedGen's code",
    )
    variant: str = field(
        "original",
        "original: the paper; authors: code of FedMR's authors, with Adam reset in every round, no decay, and label "
        "shares that are not matched to their samples",
        choices=("original", "authors"),
        source="Zhu et al. 2021 and its code",
    )


class Generator(nn.Module):
    """A network that maps labels and noise to representations.

    Attributes:
      num_classes: C.
      hidden: hidden units.
      shape: the shape of one representation.
    """

    num_classes: int
    hidden: int
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, noise: jax.Array, labels: jax.Array, *, train: bool = False) -> jax.Array:
        """The representations [B, *shape] of noise [B, Z] and labels [B]."""
        x = jnp.concatenate([noise, jax.nn.one_hot(labels, self.num_classes)], axis=-1)
        x = layers.Dense(self.hidden, name="hidden")(x)
        x = nn.relu(layers.BatchNorm(name="norm")(x, train=train))
        x = layers.Dense(math.prod(self.shape), name="latent")(x)
        return x.reshape(-1, *self.shape)


def generator_for(hyper: Hyper, network: Model, num_classes: int) -> Generator:
    """The generator for the representations of a network (outputs of ``features``)."""
    sample = jax.ShapeDtypeStruct((1, *network.input_shape), network.input_dtype)
    shape = jax.eval_shape(network.features, network.shapes(), sample).shape[1:]
    return Generator(num_classes, hyper.hidden, shape)


def diversity(noise: jax.Array, latent: jax.Array) -> jax.Array:
    """The loss exp(-mean over pairs of |noise_i - noise_j|^2 |z_i - z_j|_1); distances are means over coordinates."""
    pairs = lambda a: a[:, None] - a[None, :]
    flat = latent.reshape(latent.shape[0], -1)
    return jnp.exp(-jnp.mean(jnp.mean(pairs(noise) ** 2, axis=-1) * jnp.mean(jnp.abs(pairs(flat)), axis=-1)))


def teacher_loss(losses: jax.Array, shares: jax.Array, *, released: bool) -> jax.Array:
    """The loss of generated samples: the sum over models of the mean of share times cross-entropy, both [K, B].

    ``released``: as in both released codes, where shares [B, 1] broadcast against cross-entropies [B].
    """
    if released:
        return jnp.sum(jnp.mean(shares, axis=1) * jnp.mean(losses, axis=1))
    return jnp.sum(jnp.mean(shares * losses, axis=1))


class State(NamedTuple):
    """The global model, the generator, and the optimizer state (None if it is reset in every round)."""

    model: Variables
    generator: Variables
    optimizer: optax.OptState | None


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedGen."""
    network, num_classes, original = problem.model, problem.num_classes, hyper.variant == "original"
    generator = generator_for(hyper, network, num_classes)
    adam = optax.chain(optax.add_decayed_weights(hyper.weight_decay), optax.scale_by_adam())

    def decayed(round):
        """The factor decay^round, or 1 for variant=authors."""
        return jnp.power(hyper.decay, round.astype(jnp.float32)) if original else jnp.ones(())

    def gamma(start, round):
        """The value of a gamma in a round; 0 in the first round, when the generator is untrained."""
        return jnp.where(round == 0, 0.0, jnp.maximum(start * decayed(round), jnp.minimum(start, SMALLEST_GAMMA)))

    def generate(variables, labels, key):
        """Generate representations of labels on a client."""
        return generator.apply(variables, jax.random.uniform(key, (labels.shape[0], hyper.noise)), labels)

    def init(key):
        noise, labels = jnp.zeros((1, hyper.noise)), jnp.zeros(1, jnp.int32)
        start = dict(generator.init(jax.random.fold_in(key, 1), noise, labels))
        return State(network.init(key), start, adam.init(start["params"]) if original else None)

    def client_update(payload, memory, data, round, key):
        received = payload["generator"]
        teacher, latent = gamma(hyper.gamma_teacher, round), gamma(hyper.gamma_latent, round)

        def loss(params, state, batch, key):
            logits, new_state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            supervised = local.task_loss(network, logits, batch)

            head = lambda z: network.head({"params": params, **state}, z)
            label_key, key, same_key = jax.random.split(key, 3)

            def divergences(batch):
                same = jax.lax.stop_gradient(head(generate(received, batch.y, same_key)))
                return optax.losses.kl_divergence_with_log_targets(jax.nn.log_softmax(logits), jax.nn.log_softmax(same))

            divergence = local.mixed(batch, divergences)

            labels = jax.random.randint(label_key, (hyper.batch_size,), 0, num_classes)
            generated = jnp.mean(cross_entropy(head(generate(received, labels, key)), labels))
            return supervised + teacher * generated + latent * local.masked_mean(divergence, batch.mask), new_state

        model, metrics = local.train(network, problem.local, payload["model"], data, key, loss=loss)
        return {"model": model}, memory, metrics

    def generator_loss(params, statistics, models, counts, key):
        """Loss of a generated batch: cross-entropy of the heads of K ``models`` plus `diversity`."""
        label_key, noise_key = jax.random.split(key)
        several = jnp.any(counts > 1, axis=0)
        allowed = jnp.where(jnp.any(several), several, jnp.any(counts > 0, axis=0))
        labels = jax.random.categorical(label_key, jnp.where(allowed, 0.0, -jnp.inf), shape=(hyper.batch_size,))
        noise = jax.random.uniform(noise_key, (hyper.batch_size, hyper.noise))
        variables = {"params": params, **statistics}
        latent, statistics = generator.apply(variables, noise, labels, train=True, mutable=list(statistics))

        shares = counts / jnp.maximum(jnp.sum(counts, axis=0, keepdims=True), 1)
        losses = jax.vmap(lambda model: cross_entropy(network.head(model, latent), labels))(models)  # [K, B]
        supervised = teacher_loss(losses, shares[:, labels], released=not original)
        return supervised + diversity(noise, latent), statistics

    def server_update(state, uploads, cohort, round, key):
        takes_part = (cohort.sizes > 0)[:, None]
        counts = jnp.where(takes_part, problem.label_counts[cohort.ids].astype(jnp.float32), 0)
        loss_gradient = jax.grad(generator_loss, has_aux=True)

        def step(number, carry):
            params, statistics, optimizer = carry
            key_of_step = jax.random.fold_in(key, number)
            gradient, statistics = loss_gradient(params, statistics, uploads["model"], counts, key_of_step)
            with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises floats to integer powers
                update, optimizer = adam.update(gradient, optimizer, params)
            params = trees.subtract(params, trees.scale(update, hyper.server_lr * decayed(round)))
            return params, statistics, optimizer

        params, statistics = state.generator["params"], {"batch_stats": state.generator["batch_stats"]}
        optimizer = state.optimizer if original else adam.init(params)
        params, statistics, optimizer = jax.lax.fori_loop(0, hyper.steps, step, (params, statistics, optimizer))
        model = trees.mean(uploads["model"], weights=cohort.sizes)
        return State(model, {"params": params, **statistics}, optimizer if original else None), {}

    def traffic(usual, state, uploads, cohort, round):
        """The label counts of all clients are sent once, before the first round."""
        counts = Parcels.of(round == 0, trees.num_bytes(problem.label_counts))
        return usual._replace(up=(*usual.up, counts))

    return averaging(problem)._replace(
        init=init,
        dispatch=to_all(problem, "model", "generator"),
        client_update=client_update,
        server_update=server_update,
        traffic=traffic,
    )
