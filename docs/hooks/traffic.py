"""Bytes sent in a round of the main job, and bytes kept, counted from the shapes of the arrays."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.engine import round as one_round
from fedjax_mr.experiment.build import build_model, simulator_of
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.traffic import usual_traffic


class Bytes(NamedTuple):
    """Bytes of a method in the main job.

    Attributes:
      model: bytes of the network.
      down, up, peer: per client of the cohort, in every round after the first.
      first: down, up and peer of the first round if they differ, else None.
      kept: per client, between rounds.
      server: bytes that the server keeps between rounds.
      asynchronous: whether clients can be asynchronous: the method selects uniformly, has no code between rounds, and
        exchanges no layers among clients.
    """

    model: int
    down: float
    up: float
    peer: float
    first: tuple[float, float, float] | None
    kept: float
    server: int
    asynchronous: bool


def needs_public(strategy: str) -> bool:
    """Whether a method needs public data with its default settings."""
    needs = STRATEGIES[strategy].needs_public
    return needs(configuration.hyper(Config(strategy=strategy))) if callable(needs) else needs


def flags(strategy: str) -> list[str]:
    """The flags of the main job with a method: the defaults, and public data or adapters if the method needs some."""
    adapters = ["--adapter=lora"] if STRATEGIES[strategy].adapters else []
    return [f"--strategy={strategy}", *adapters, *(["--public_share=0.1"] if needs_public(strategy) else [])]


@functools.cache
def count(strategy: str) -> Bytes:
    """Count the bytes of a method. Its rounds are traced; nothing is trained."""
    config = configuration.parse(flags(strategy))
    federated = federated_data(config)
    model = build_model(config, federated.dataset)
    engine = simulator_of(config, federated, model).rounds

    def objects(constants):
        progress = one_round.start(constants)
        plan, rows = one_round.begin(engine.axis, constants, progress)
        upload, _, _ = one_round.train_client(constants, progress.round, trees.take(rows, 0))
        uploads = trees.broadcast(upload, config.cohort)
        return progress, plan.cohort, rows.payload, uploads

    progress, cohort, payloads, uploads = jax.eval_shape(objects, engine.constants)
    usual, method = usual_traffic(payloads, uploads), engine.strategy

    def sent(round: int) -> tuple[float, float, float]:
        traffic = usual
        if method.traffic is not None:
            state, own, chosen = jax.tree.map(_example, (progress.server, uploads, cohort))
            first = jnp.arange(config.cohort, dtype=jnp.int32)  # methods without a server count messages by their graph
            chosen = chosen._replace(ids=first, sizes=jnp.ones_like(first))
            traffic = method.traffic(usual, state, own, chosen, jnp.int32(round))
        down, up, peer = (each / config.cohort for each in traffic.num_bytes())
        return down, up, peer

    later, first = sent(1), sent(0)
    kept = 0 if progress.memory is None else trees.num_bytes(progress.memory) / config.clients
    size = max(model.num_bytes())
    alone = not (method.select or method.between_rounds or method.exchange)
    return Bytes(size, *later, None if first == later else first, kept, trees.num_bytes(progress.server), alone)


def _example(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """An array of a shape, with values for which traffic is counted: everything is sent, for the first network."""
    fill = 0 if jnp.issubdtype(shape.dtype, jnp.integer) else 1
    return jnp.full(shape.shape, fill, shape.dtype)
