"""Exchange of layers among the clients of a round: FedMR's secure recombination as one array program.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Appendix B (no code released). Every client has a buffer per layer.

1. A client selects some of its layers, sends each to one random other client, and puts the others into its own buffers.
2. It puts the layers that it receives into its buffers and remembers their senders.
3. It returns to each of these senders a random layer of the same buffer, drawn without replacement.
4. The returned layers and those left in its buffers are its new model.

So the copies of a layer in one buffer return, in uniformly random order, to the clients that they came from: one
exchange permutes the copies within the group of each holder. Hence every sum over clients is preserved (Lemma 4.4).

Privacy. Let each of K clients send each layer with probability q. A uniformly random order leaves one copy in its place
on average, for every size of the group. So the expected share of unmoved layers is the expected number of used buffers
divided by K: 1 - q (1 - q / (K - 1))^(K - 1). Its minimum over q is 1 - (1 - 1/K)^K, more than 1 - 1/e = 0.63.
Repetitions bring it towards 1/K (`expected_unmoved`).

Limitation. The server knows which copy of a layer it sent to which client, and a trained layer is usually still closest
to the copy that its training started from (tests/secure/test_exchange.py). So by comparison the server can identify
the owner after an exchange before the upload, and the starting copy after an exchange before the training. The share
above applies only if both exchanges take place.

The paper does not specify how many layers are selected (here each independently with the same probability) and whether
normalisation statistics are layers (here they stay with their module). The real, encrypted messages are in messages.py;
for the same choices both give the same models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Repetition(NamedTuple):
    """One repetition of stages 1 to 4."""

    holders: jax.Array  # [U, K] int32: the client whose buffer has the copy of client k; k itself if it was not sent
    permutations: jax.Array  # [U, K] int32: client j receives the copy of client permutations[u, j]


class Outcome(NamedTuple):
    """The result of all repetitions of one round."""

    permutations: jax.Array  # [U, K] int32: client j has the copy of owner permutations[u, j] at the end
    held: jax.Array  # [U, K, K] bool, at [u, m, o]: whether client m ever held the copy of unit u of owner o
    sent: jax.Array  # [U] int32: number of copies sent to other clients (the same number is returned)


def draw(key: jax.Array, *, num_units: int, count: int, share: float) -> Repetition:
    """Draw one random exchange of U units among K = ``count`` clients; consumes ``key``.

    Args:
      key: a random key.
      num_units: U.
      count: K. A single client keeps everything.
      share: probability that a client sends a unit.
    """
    select_key, receiver_key, order_key = jax.random.split(key, 3)
    clients = jnp.arange(count, dtype=jnp.int32)[None, :]
    selected = jax.random.bernoulli(select_key, share, (num_units, count))
    ahead = jax.random.randint(receiver_key, (num_units, count), 1, max(count, 2), jnp.int32)
    holders = jnp.where(selected, (clients + ahead) % count, clients)
    # Both arrays list the groups of holders one after the other: `receivers` by client, `copies` in random order. The
    # entries at the same position are a receiver and its copy.
    receivers = jnp.argsort(holders, axis=1)
    copies = jnp.lexsort((jax.random.bits(order_key, holders.shape), holders), axis=1)
    return Repetition(holders, jnp.take_along_axis(copies, jnp.argsort(receivers, axis=1), axis=1).astype(jnp.int32))


def exchange(key: jax.Array, *, num_units: int, count: int, share: float, repetitions: int) -> Outcome:
    """Simulate repeated exchanges of U units among K = ``count`` clients; consumes ``key``."""
    units = jnp.arange(num_units, dtype=jnp.int32)[:, None]
    clients = jnp.arange(count, dtype=jnp.int32)[None, :]
    start = Outcome(
        permutations=jnp.broadcast_to(clients, (num_units, count)),
        held=jnp.broadcast_to(jnp.eye(count, dtype=bool), (num_units, count, count)),
        sent=jnp.zeros(num_units, jnp.int32),
    )

    def repeat(last: Outcome, key: jax.Array) -> tuple[Outcome, None]:
        step = draw(key, num_units=num_units, count=count, share=share)
        owners = jnp.take_along_axis(last.permutations, step.permutations, axis=1)
        held = last.held.at[units, step.holders, last.permutations].set(True).at[units, clients, owners].set(True)
        sent = last.sent + jnp.sum(step.holders != clients, axis=1, dtype=jnp.int32)
        return Outcome(owners, held, sent), None

    return jax.lax.scan(repeat, start, jax.random.split(key, repetitions))[0]


def expected_unmoved(count: int, *, share: float, repetitions: int = 1) -> float:
    """Expected share of layers that are with their owner after the exchanges, among K = ``count`` clients.

    A copy that moves is equally likely to move to any other client, so the share follows a two-state Markov chain.
    """
    if count == 1:
        return 1.0
    once = 1 - share * (1 - share / (count - 1)) ** (count - 1)
    return 1 / count + (1 - 1 / count) * ((once * count - 1) / (count - 1)) ** repetitions
