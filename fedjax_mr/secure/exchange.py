"""Exchange of layers among the clients of a round: FedMR's secure recombination as one array program.

Hu, Yue, Xie, Chen, Huang, Wei, Lian, Liu, Chen: Is Aggregation the Only Choice? Federated Learning via Layer-wise Model
Recombination, KDD 2024, Appendix B (no code released). Every client has a buffer per layer.

1. A client picks some of its layers and sends each to one random other client; it puts the rest into its own buffers.
2. It puts what it receives into its buffers and remembers who sent it.
3. To each of these senders it returns a random layer of the same buffer, drawn without replacement.
4. What came back and what is left in its buffers is its new model.

So the copies of a layer that meet in one buffer go back, in uniformly random order, to the clients they came from:
one exchange permutes the copies within the groups of one holder. Hence every sum over clients stays (Lemma 4.4).

How far this hides whose layer is whose. Let each of K clients send each layer with probability q. A uniformly random
order leaves one copy in its place on average, whatever the size of the group; so the expected share of layers that are
where they were is the expected number of buffers in use, divided by K: 1 - q (1 - q / (K - 1))^(K - 1). No q brings it
below 1 - (1 - 1/K)^K, which is more than 1 - 1/e = 0.63; repetitions take it on to 1/K (`expected_unmoved`).

What it does not hide. The server knows which copy of a layer it sent to whom, and a trained layer is mostly still
closest to the copy that its training started from (tests/secure/test_exchange.py). So a server that compares finds the
owner after an exchange before the upload, and the start after one before the training; only both together leave it with
the odds above.

The paper leaves open how many layers are picked (here each with the same probability, independently) and whether
normalisation statistics count as layers (here they stay with the module that owns them). The real messages, with the
encryption, are in messages.py; for the same choices both give the same models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Repetition(NamedTuple):
    """One repetition of stages 1 to 4."""

    holders: jax.Array  # [U, K] int32: the client in whose buffer k's copy of unit u lies, k itself if it was not sent
    permutations: jax.Array  # [U, K] int32: client j ends with the copy that client permutations[u, j] had


class Outcome(NamedTuple):
    """All repetitions of one round."""

    permutations: jax.Array  # [U, K] int32: client j ends with the copy of owner permutations[u, j]
    held: jax.Array  # [U, K, K] bool: client m has had the copy of owner o of unit u in its hands, at [u, m, o]
    sent: jax.Array  # [U] int32: how many copies of the unit went to another client (each makes one come back)


def draw(key: jax.Array, *, num_units: int, count: int, share: float) -> Repetition:
    """Return one random exchange of U units among K = ``count`` clients; consumes ``key``.

    Args:
      key: a random key.
      num_units: U.
      count: K; a client alone keeps everything.
      share: the probability with which a client sends a unit.
    """
    pick_key, receiver_key, order_key = jax.random.split(key, 3)
    clients = jnp.arange(count, dtype=jnp.int32)[None, :]
    picked = jax.random.bernoulli(pick_key, share, (num_units, count))
    ahead = jax.random.randint(receiver_key, (num_units, count), 1, max(count, 2), jnp.int32)
    holders = jnp.where(picked, (clients + ahead) % count, clients)
    # Both orders list the groups one after the other, one by client and one at random: what stands at the same place
    # in both is who receives and what.
    places = jnp.argsort(holders, axis=1)
    copies = jnp.lexsort((jax.random.bits(order_key, holders.shape), holders), axis=1)
    return Repetition(holders, jnp.take_along_axis(copies, jnp.argsort(places, axis=1), axis=1).astype(jnp.int32))


def exchange(key: jax.Array, *, num_units: int, count: int, share: float, repetitions: int) -> Outcome:
    """Return what repeated exchanges of U units among K = ``count`` clients come to; consumes ``key``."""
    units = jnp.arange(num_units, dtype=jnp.int32)[:, None]
    clients = jnp.arange(count, dtype=jnp.int32)[None, :]
    start = Outcome(
        permutations=jnp.broadcast_to(clients, (num_units, count)),
        held=jnp.broadcast_to(jnp.eye(count, dtype=bool), (num_units, count, count)),
        sent=jnp.zeros(num_units, jnp.int32),
    )

    def repeat(before: Outcome, key: jax.Array) -> tuple[Outcome, None]:
        step = draw(key, num_units=num_units, count=count, share=share)
        owners = jnp.take_along_axis(before.permutations, step.permutations, axis=1)
        held = before.held.at[units, step.holders, before.permutations].set(True).at[units, clients, owners].set(True)
        sent = before.sent + jnp.sum(step.holders != clients, axis=1, dtype=jnp.int32)
        return Outcome(owners, held, sent), None

    return jax.lax.scan(repeat, start, jax.random.split(key, repetitions))[0]


def expected_unmoved(count: int, *, share: float, repetitions: int = 1) -> float:
    """Return the expected share of layers that are where they were before the exchanges, among K = ``count`` clients.

    A copy that leaves its place is equally likely to go to any other client, so the share follows a Markov chain of
    two states.
    """
    if count == 1:
        return 1.0
    once = 1 - share * (1 - share / (count - 1)) ** (count - 1)
    return 1 / count + (1 - 1 / count) * ((once * count - 1) / (count - 1)) ** repetitions
