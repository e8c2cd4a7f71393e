"""DiLoCo: few messages; each client trains for many steps with its own AdamW, and the server takes a Nesterov step.

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen: DiLoCo: Distributed Low-Communication Training
of Language Models, arXiv 2311.08105, 2023, Algorithm 1. It is FedAvg with equal weights and two additions of this
package: clients keep the state of their optimizer between rounds (`transforms.keep_optimizer`), and the mean change
is the gradient of an outer SGD with Nesterov momentum. H is ``local_steps``. The paper's inner optimizer is
``optimizer=adamw``, with H = 500. With one step of SGD, ``outer_lr=1`` and ``outer_momentum=0`` it is the gradient step
of FedAvg.

Streaming (``fragments``): Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Rame, Szlam,
Ranzato, Barham: Streaming DiLoCo with Overlapping Communication, arXiv 2501.18512, 2025. The layers are divided into P
fragments, of which each round sends one, in turn, so a message has about 1 / P of the size. A client goes on training
its own copy of the other fragments. Layer j belongs to fragment j modulo P, the strided pattern of the paper. A round
is the time between two messages: with the paper's H, ``local_steps`` is H / P.

Ours, without a paper: ``combine=recombine``. The server keeps K models and permutes their tensors as FedMR in place of
averaging, and each model has an outer optimizer of its own.

Deviations:
* The paper's workers all take part in every round. Here a client that is not selected keeps its state. Streaming needs
  all clients in every round.
* The learning rate of the inner steps follows ``lr_schedule`` by rounds, in the paper a cosine over all steps.
* Streaming in the paper also lets clients train while messages are under way, mixes the received fragment with the own
  one, and sends numbers of four bits (here: ``--compress``). Here messages take no time, and clients take the received
  fragment.
"""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.interface import Memory, Problem, Strategy
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.strategies.traffic import Parcels, Traffic
from fedjax_mr.strategies.transforms import keep_optimizer, server_optimizer


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of DiLoCo."""

    outer_lr: float = field(0.7, "learning rate of the server", low=0, open_low=True, source="Douillard et al. 2023")
    outer_momentum: float = field(
        0.9, "Nesterov momentum of the server", low=0, high=1, open_high=True, source="Douillard et al. 2023"
    )
    combine: str = field(
        "average",
        "what the server does to the trained models: average them (average), or keep all and permute their tensors "
        "(recombine)",
        choices=("average", "recombine"),
        source="Douillard et al. 2023; recombine: ours",
    )
    fragments: int = field(
        1,
        "P, groups of layers of which each round sends one in turn (Streaming DiLoCo); 1 sends all",
        low=1,
        high=1000,
        source="Douillard et al. 2025; 1: Douillard et al. 2023",
    )


class Streamed(NamedTuple):
    """Memory of one client that keeps training its own copy of the fragments that are not sent."""

    inner: Memory
    model: Variables  # after its last training


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build DiLoCo.

    Raises:
      UserError: a network or a federation that cannot be streamed.
    """
    if hyper.combine == "recombine":
        inner = fedmr.build(fedmr.Hyper(), problem)
    else:
        inner = averaging(problem, weights="uniform")
    inner = keep_optimizer(inner, problem)
    outer = optax.sgd(hyper.outer_lr, momentum=hyper.outer_momentum, nesterov=True)
    return server_optimizer(inner, outer) if hyper.fragments == 1 else _streaming(hyper, problem, inner, outer)


def _streaming(hyper: Hyper, problem: Problem, inner: Strategy, outer: optax.GradientTransformation) -> Strategy:
    """DiLoCo whose rounds send one fragment of the model in turn."""
    count, layers = hyper.fragments, problem.layers
    for impossible, what in (
        (hyper.combine != "average", "needs hyper.combine=average: the other fragments of a model stay on its client"),
        (count > len(layers), f"divides {len(layers)} layers: set hyper.fragments= to at most that"),
        (
            problem.cohort_size < problem.num_clients,
            f"needs all clients in every round: set cohort={problem.num_clients}",
        ),
    ):
        if impossible:
            raise UserError(f"hyper.fragments={count} {what}")
    shapes = problem.model.shapes()
    numbers = {leaf: place % count for place, layer in enumerate(layers) for leaf in layer.leaves}
    fragment = jax.tree.unflatten(jax.tree.structure(shapes), [numbers[leaf] for leaf in range(len(numbers))])
    names = jax.tree.map(str, fragment["params"])

    def in_turn(number: int) -> optax.GradientTransformation:
        """The outer optimizer, which works only in the rounds of a fragment."""
        return optax.conditionally_mask(outer, lambda step, **extra_args: jnp.mod(step, count) == number)

    by_name: dict[Hashable, optax.GradientTransformation] = {str(number): in_turn(number) for number in range(count)}
    server = server_optimizer(inner, optax.partition(by_name, names))
    models, first_memory = server.models, inner.init_memory
    assert models is not None and first_memory is not None

    def init_memory(key, client_id):
        return Streamed(first_memory(key, client_id), trees.zeros_like(shapes))

    def client_update(payload, memory, data, round, key):
        sent = lambda number: (round == 0) | ((round - 1) % count == number)
        choose = lambda number, new, own: jnp.where(sent(number), new, own)
        model = jax.tree.map(choose, fragment, payload["model"], memory.model)
        upload, kept, metrics = inner.client_update({"model": model}, memory.inner, data, round, key)
        return upload, Streamed(kept, upload["model"]), metrics

    def server_update(state, uploads, cohort, round, key):
        new, info = server.server_update(state, uploads, cohort, round, key)
        choose = lambda number, new, old: jnp.where(round % count == number, new, old)  # statistics wait, too
        return models.set(new, jax.tree.map(choose, fragment, models.get(new), models.get(state))), info

    def traffic(usual, state, uploads, cohort, round):
        """One fragment in each direction. At first, clients receive the whole model."""
        sizes = [0] * count
        for leaf, number in zip(jax.tree.leaves(shapes), jax.tree.leaves(fragment), strict=True):
            sizes[number] += trees.num_bytes(leaf)
        clients = lambda sent: jnp.where(sent, problem.cohort_size, 0)
        down = [Parcels.of(clients((round == 0) | ((round - 1) % count == n)), size) for n, size in enumerate(sizes)]
        up = [Parcels.of(clients(round % count == n), size) for n, size in enumerate(sizes)]
        return Traffic(tuple(down), tuple(up))

    return server._replace(
        init_memory=init_memory,
        client_update=client_update,
        server_update=server_update,
        traffic=traffic,
        stale="lost",
    )
