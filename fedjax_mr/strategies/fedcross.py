"""FedCross: each of K middleware models is mixed with one of the others (its collaborator) after local training.

Hu et al.: FedCross: Towards Accurate Federated Learning via Multi-Model Cross Aggregation, arXiv 2210.08285, 2022,
Algorithm 1, Equations 2-7.

Deviations and choices:
* Similarity. ``cosine`` is the true cosine of the parameters. Options are the formula printed in Eq. 5, with a sum in
  the denominator (``printed``), and the computation of the released code (``authors``). The latter runs over
  consecutive pairs of all tensors of the state, so it depends on the number of tensors. The released ResNet-20 has 119,
  with batch counters and an unused last BatchNorm; the setting ``authors_state`` adds these. Without it there are 96
  tensors, which form other pairs. ``authors`` also breaks ties like the released scan, in which "highest" may select
  the model itself.
* Deployed model. Eq. 7 deploys the mean of the mixed models. The released code tests the mean of the uploaded models
  (``deployed=uploaded``).
* The K models start as copies of one initialisation, as in the released code. Algorithm 1 starts from K models
  (``independent``).
* Adapters (LoRA). Models are compared and deployed by the products of their adapters. They are mixed by their factors,
  which differs from mixing the products by alpha (1 - alpha) (A_i - A_j) (B_i - B_j): about 1 % at alpha = 0.99.
* The paper has alpha < 1. Here alpha = 1 is allowed and disables mixing.
* Initial rounds of plain averaging (``warmup_rounds``) exist only in the released code. The acceleration methods of
  section 3.2.4 exist only in the paper, which does not specify the weights, the offsets and the growth of alpha. Our
  choices are described in `mixing`.
* Asynchronous clients (``mode=async``) are ours, without a paper: M models circulate. A model that returns is at once
  mixed with the newest upload of its collaborator among all M, and is sent again. Rounds (``in_order``, initial rounds,
  acceleration) are then versions of the server. With M = K this is FedCross.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Problem, Strategy
from fedjax_mr.strategies.parts import STARTS, circulating, returned


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of FedCross."""

    alpha: float = field(
        0.99,
        "alpha, weight of the model itself; its collaborator has weight 1 - alpha",
        low=0.5,
        high=1,
        source="section 4.1 and Table 2",
    )
    selection: str = field(
        "lowest",
        "collaborator of a model: the other models in turn (in_order), or the one of highest or lowest similarity",
        choices=("in_order", "highest", "lowest"),
        source="Table 2 and the authors' code",
    )
    similarity: str = field(
        "cosine",
        "similarity for highest and lowest: cosine of the parameters; Eq. 5, inner product divided by the sum of the "
        "norms (printed); sum of the cosines of consecutive pairs of tensors, with the last pair counted twice and a "
        "single last tensor once (authors); or the negative Euclidean or Manhattan distance",
        choices=("cosine", "printed", "authors", "euclidean", "manhattan"),
        source="section 3.2.1",
    )
    deployed: str = field(
        "mixed",
        "deployed model: mean of the models after cross-aggregation (mixed) or before it (uploaded; authors' code)",
        choices=("mixed", "uploaded"),
        source="Eq. 7",
    )
    start: str = field(
        "copies",
        "the K initial models: copies of one initialisation (authors' code), or independent ones (Algorithm 1)",
        choices=tuple(STARTS),
        source="authors' code",
    )
    warmup_rounds: int = field(
        0,
        "initial rounds of uniform averaging",
        unit="rounds",
        low=0,
        source="authors' code (its first stage)",
    )
    acceleration: str = field(
        "none",
        "acceleration of the first rounds: propeller models (pm), growing alpha (da), or pm and then da (pm_da)",
        choices=("none", "pm", "da", "pm_da"),
        source="section 3.2.4",
    )
    acceleration_rounds: int = field(100, "number of accelerated rounds", unit="rounds", low=1, source="section 4.4.3")
    start_alpha: float = field(
        0.5,
        "alpha with propeller models, and the initial value of a growing alpha",
        low=0,
        high=1,
        source="our choice; section 3.2.4 asks for a value close to 0.5",
    )


class State(NamedTuple):
    """K middleware models, leaves [K, ...]; M with asynchronous clients."""

    models: Variables
    deployed: Variables | None  # mean of the uploaded models; None if the mean of ``models`` is deployed
    newest: Variables | None  # the newest upload of each model; None if all models return in each round


def similarities(
    models: Variables,
    kind: str,
    layers: tuple[Layer, ...],
    *,
    gram: Callable[[Variables], jax.Array] = lambda models: trees.gram(models["params"]),
) -> jax.Array:
    """The similarities of all pairs of K models [K, K].

    Args:
      models: leaves [K, ...]. ``authors`` compares the whole state, the others only the parameters.
      kind: see `Hyper.similarity`.
      layers: the layers in forward order, used by ``authors``.
      gram: the inner products of models [K, K], used by ``cosine`` and ``printed``.
    """
    params = models["params"]
    if kind == "cosine":
        return trees.cosines_of(gram(models))
    if kind == "printed":
        products = gram(models)
        norms = jnp.sqrt(jnp.diagonal(products))
        return products / (norms[:, None] + norms[None, :])
    if kind == "authors":
        leaves = jax.tree.leaves(models)
        ordered = [leaves[leaf] for layer in layers for leaf in layer.leaves]
        chunks = [ordered[start : start + 2] for start in range(0, len(ordered), 2)]
        if len(ordered) % 2 == 0:  # the released loop adds every pair, then the last chunk, even if it is a pair
            chunks = [chunks[-1], *chunks]
        return sum((trees.cosines(chunk) for chunk in chunks[1:]), start=trees.cosines(chunks[0]))
    distance = jnp.square if kind == "euclidean" else jnp.abs

    def to_all(row: jax.Array) -> jax.Array:  # one row at a time, so memory is K x P, not K x K x P
        differences = jax.tree.map(lambda leaf: distance(leaf - leaf[row][None]).reshape(leaf.shape[0], -1), params)
        return jnp.sum(jnp.stack([jnp.sum(leaf, axis=1) for leaf in jax.tree.leaves(differences)]), axis=0)

    table = jax.lax.map(to_all, jnp.arange(jax.tree.leaves(params)[0].shape[0]))
    return -jnp.sqrt(table) if kind == "euclidean" else -table


def in_order(round: jax.Array, count: int) -> jax.Array:
    """The collaborators [K] of Eq. 2, (i + (r mod (K - 1)) + 1) mod K; all pairs occur within K - 1 rounds."""
    return (jnp.arange(count) + round % max(count - 1, 1) + 1) % count


def most_similar(table: jax.Array, *, released: bool) -> jax.Array:
    """The other model of highest similarity (Eq. 3) for each model [K]; the first one in a tie.

    ``released``: as in the authors' code, where a model has similarity 0 with itself and may select itself.
    """
    itself = jnp.eye(table.shape[0], dtype=bool)
    return jnp.argmax(jnp.where(itself, 0.0 if released else -jnp.inf, table), axis=1)


def least_similar(table: jax.Array, *, released: bool) -> jax.Array:
    """The other model of lowest similarity (Eq. 4) for each model [K]; the first one in a tie.

    ``released``: as in the authors' code, where the next model wins a tie.
    """
    count = table.shape[0]
    others = jnp.where(jnp.eye(count, dtype=bool), jnp.inf, table)
    lowest = jnp.argmin(others, axis=1)
    if not released:
        return lowest
    rows = jnp.arange(count)
    following = (rows + 1) % count
    return jnp.where(others[rows, following] <= others[rows, lowest], following, lowest)


def mixing(hyper: Hyper, table: jax.Array, round: jax.Array) -> jax.Array:
    """The mixing weights [K, K] of the K uploaded models in a round; row i yields model i.

    Our choices where section 3.2.4 is not specific: alpha grows linearly from ``start_alpha`` to ``alpha``. The two
    propellers of a model are its in-order collaborator and the next model, with weight (1 - start_alpha) / 2 each.

    Args:
      hyper: the hyper-parameters.
      table: similarities [K, K].
      round: number of previous rounds.
    """
    count, released = table.shape[0], hyper.similarity == "authors"
    identity = jnp.eye(count)
    if count == 1:
        return identity
    if hyper.selection == "in_order":
        collaborators = in_order(round, count)
    elif hyper.selection == "highest":
        collaborators = most_similar(table, released=released)
    else:
        collaborators = least_similar(table, released=released)

    half = hyper.acceleration_rounds // 2 if hyper.acceleration == "pm_da" else 0
    grown = (round - half) / (hyper.acceleration_rounds - half)
    growing = hyper.start_alpha + (hyper.alpha - hyper.start_alpha) * jnp.clip(grown, 0.0, 1.0)
    alpha = growing if hyper.acceleration in ("da", "pm_da") else hyper.alpha
    weights = alpha * identity + (1 - alpha) * jax.nn.one_hot(collaborators, count)

    if hyper.acceleration in ("pm", "pm_da"):
        first = in_order(round, count)
        second = jnp.where((first + 1) % count == jnp.arange(count), (first + 2) % count, (first + 1) % count)
        propellers = (jax.nn.one_hot(first, count) + jax.nn.one_hot(second, count)) / 2
        propelled = hyper.start_alpha * identity + (1 - hyper.start_alpha) * propellers
        weights = jnp.where(round < (half or hyper.acceleration_rounds), propelled, weights)
    return jnp.where(round < hyper.warmup_rounds, jnp.full_like(weights, 1 / count), weights)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build FedCross.

    Raises:
      UserError: there is a single model.
    """
    if problem.num_branches < 2:
        raise UserError("fedcross mixes each model with another model of the round: cohort= must be at least 2")
    if hyper.similarity not in ("cosine", "printed") and problem.model.adapter is not None:
        raise UserError(f"hyper.similarity={hyper.similarity} compares factors, which mean nothing alone: use cosine")
    deploys_uploaded = hyper.deployed == "uploaded"
    all_return = problem.num_branches == problem.cohort_size

    def init(key):
        models = STARTS[hyper.start](problem, key)
        return State(models, problem.model.mean(models) if deploys_uploaded else None, None if all_return else models)

    def server_update(state, uploads, cohort, round, key):
        newest = uploads["model"] if all_return else returned(state.newest, uploads["model"], cohort)
        table = similarities(newest, hyper.similarity, problem.layers, gram=problem.model.gram)
        weights = mixing(hyper, table, round)
        mixed = trees.mix(newest, weights if cohort.branches is None else weights[cohort.branches])
        models = returned(state.models, mixed, cohort)
        deployed = problem.model.mean(newest) if deploys_uploaded else None
        return State(models, deployed, None if all_return else newest), {}

    def global_model(state):
        return state.deployed if deploys_uploaded else problem.model.mean(state.models)

    return circulating(problem)._replace(init=init, server_update=server_update, global_model=global_model)
