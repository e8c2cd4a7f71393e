"""FedCross: K middleware models, each mixed after local training with one collaborator among the others.

Hu et al.: FedCross: Towards Accurate Federated Learning via Multi-Model Cross Aggregation, arXiv 2210.08285, 2022,
Algorithm 1, Equations 2-7.

Deviations. The similarity called cosine is the true cosine of the parameters; the sum in the denominator of the paper's
Eq. 5 (``printed``) and what the released code computes (``authors``) are options. The latter runs over consecutive
pairs of all tensors of the state, so it depends on how many there are: the released ones, with batch counters and
ResNet-20's unused last BatchNorm, are 119 for ResNet-20 and need ``--authors_state``; without it there are 96, and
other tensors form the pairs. ``authors`` also breaks ties as the released scan does, in which "highest" may choose the
model itself. The released code tests the mean of the uploaded models (``deployed=uploaded``), Eq. 7 the mean of the
mixed ones. The K models start as copies of one initialisation, as released. The paper has alpha below 1; 1 is allowed
here and mixes nothing. Rounds of plain averaging first (``warmup_rounds``) are in the released code only, the
acceleration methods of section 3.2.4 in the paper only, which leaves weights, offsets and the growth of alpha open:
ours are named in `mixing`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Layer, Variables
from fedjax_mr.strategies.base import Problem, Strategy, copies_of_one, plain_training, view
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """FedCross's own settings."""

    alpha: float = field(
        0.99,
        "weight alpha of a model itself; its collaborator has 1 - alpha",
        low=0.5,
        high=1,
        source="section 4.1 and Table 2",
    )
    selection: str = field(
        "lowest",
        "the collaborator: the others in turn, or the one of highest or lowest similarity",
        choices=("in_order", "highest", "lowest"),
        source="Table 2 and the authors' code",
    )
    similarity: str = field(
        "cosine",
        "what highest and lowest compare: cosine of the parameters; printed: Eq. 5, product over the sum of norms; "
        "authors: the released code, sum of the cosines of consecutive pairs of tensors, the last pair twice, a single "
        "last tensor once; "
        "or minus the Euclidean or Manhattan distance",
        choices=("cosine", "printed", "authors", "euclidean", "manhattan"),
        source="section 3.2.1",
    )
    deployed: str = field(
        "mixed",
        "the deployed model: mean of the models after cross-aggregation (Eq. 7) or before it (authors' code)",
        choices=("mixed", "uploaded"),
        source="Eq. 7",
    )
    warmup_rounds: int = field(
        0,
        "rounds of plain uniform averaging at the start",
        unit="rounds",
        low=0,
        source="authors' code (its first stage)",
    )
    acceleration: str = field(
        "none",
        "speed up the start: propeller models (pm), growing alpha (da), or the first half each (pm_da)",
        choices=("none", "pm", "da", "pm_da"),
        source="section 3.2.4",
    )
    acceleration_rounds: int = field(
        100, "how long the acceleration lasts", unit="rounds", low=1, source="section 4.4.3"
    )
    start_alpha: float = field(
        0.5,
        "alpha while propeller models are in use, and where growing alpha begins",
        low=0,
        high=1,
        source="our choice; section 3.2.4 asks for a value close to 0.5",
    )


class State(NamedTuple):
    """K middleware models, leaves [K, ...]."""

    models: Variables
    deployed: Variables | None  # the mean of the uploaded models; None if the mean of ``models`` is deployed


def similarities(models: Variables, kind: str, layers: tuple[Layer, ...]) -> jax.Array:
    """Return the similarities of all pairs of the K models [K, K].

    Args:
      models: leaves [K, ...]; parameters alone count, except for ``authors``, which takes the whole state.
      kind: see `Hyper.similarity`.
      layers: the layers in forward order, for ``authors``.
    """
    params = models["params"]
    if kind == "cosine":
        return trees.cosines(params)
    if kind == "printed":
        products = trees.gram(params)
        norms = jnp.sqrt(jnp.diagonal(products))
        return products / (norms[:, None] + norms[None, :])
    if kind == "authors":
        leaves = jax.tree.leaves(models)
        ordered = [leaves[leaf] for layer in layers for leaf in layer.leaves]
        chunks = [ordered[start : start + 2] for start in range(0, len(ordered), 2)]
        if len(ordered) % 2 == 0:  # the released loop adds every pair, and after its end the last chunk, pair or not
            chunks = [chunks[-1], *chunks]
        return sum((trees.cosines(chunk) for chunk in chunks[1:]), start=trees.cosines(chunks[0]))
    distance = jnp.square if kind == "euclidean" else jnp.abs

    def to_all(row: jax.Array) -> jax.Array:  # one row at a time: K x P numbers, never K x K x P
        differences = jax.tree.map(lambda leaf: distance(leaf - leaf[row][None]).reshape(leaf.shape[0], -1), params)
        return jnp.sum(jnp.stack([jnp.sum(leaf, axis=1) for leaf in jax.tree.leaves(differences)]), axis=0)

    table = jax.lax.map(to_all, jnp.arange(jax.tree.leaves(params)[0].shape[0]))
    return -jnp.sqrt(table) if kind == "euclidean" else -table


def in_order(round: jax.Array, count: int) -> jax.Array:
    """Return the collaborators [K] of Eq. 2, (i + (r mod (K - 1)) + 1) mod K: in K - 1 rounds everyone meets all."""
    return (jnp.arange(count) + round % max(count - 1, 1) + 1) % count


def most_similar(table: jax.Array, *, released: bool) -> jax.Array:
    """Return for each model [K] the other one of highest similarity (Eq. 3); of equal ones the first.

    ``released``: as the authors' code scans, where a model has similarity 0 with itself and may choose itself.
    """
    own = jnp.eye(table.shape[0], dtype=bool)
    return jnp.argmax(jnp.where(own, 0.0 if released else -jnp.inf, table), axis=1)


def least_similar(table: jax.Array, *, released: bool) -> jax.Array:
    """Return for each model [K] the other one of lowest similarity (Eq. 4); of equal ones the first.

    ``released``: as the authors' code scans, where the next model wins a tie.
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
    """Return the weights [K, K] with which the K uploaded models are mixed in a round: row i makes model i.

    Our choices where section 3.2.4 is silent: alpha grows linearly from ``start_alpha`` to ``alpha``; a model's two
    propellers are its collaborator in order and the next one after that, with (1 - start_alpha) / 2 each.

    Args:
      hyper: the settings.
      table: similarities [K, K].
      round: rounds before this one.
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
    """Return FedCross.

    Raises:
      UserError: a round of a single client.
    """
    if problem.cohort_size < 2:
        raise UserError("fedcross mixes each model with another one of the round: --cohort must be at least 2")
    deploys_uploaded = hyper.deployed == "uploaded"

    def init(key):
        models = copies_of_one(problem, key)
        return State(models, trees.mean(models) if deploys_uploaded else None)

    def dispatch(state, cohort, key):
        return {"model": state.models}

    def server_update(state, uploads, cohort, round, key):
        table = similarities(uploads["model"], hyper.similarity, problem.layers)
        models = trees.mix(uploads["model"], mixing(hyper, table, round))
        return State(models, trees.mean(uploads["model"]) if deploys_uploaded else None), {}

    def global_model(state):
        return state.deployed if deploys_uploaded else trees.mean(state.models)

    return Strategy(
        init,
        dispatch,
        plain_training(problem),
        server_update,
        global_model=global_model,
        models=view("models", stacked=True),
    )
