"""Algebra on models as pytrees. Several models are stacked: leaves [K, ...].

There are two kinds of trees. A `State` holds all collections of a model (``{"params": ..., "batch_stats": ...}``,
Flax's variables). States are copied, gathered, exchanged and averaged with non-negative weights that sum to one, so
that a running variance never becomes negative. `Params` are only the trainable collection, or a change of it. They can
also be added, subtracted and scaled, which extrapolates. `add`, `subtract` and `scale` refuse a state, because a
negative variance turns the outputs of the network into NaN.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any
State = Any
"""All Flax collections of a model."""
Params = Any
"""The trainable collection of a model, a change of it, or any other tree of unrestricted numbers."""
Units = Sequence[Sequence[int]]
"""A partition of the leaves of a tree: each unit lists positions in ``jax.tree.leaves``."""


def broadcast(tree: Tree, count: int) -> Tree:
    """Stack ``count`` copies of a tree on a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def take(tree: Tree, rows: jax.Array) -> Tree:
    """Take the rows [R] of every leaf [K, ...]: leaves [R, ...]. A scalar ``rows`` gives leaves [...]."""
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def mean(tree: State | Params, *, weights: jax.Array | None = None) -> State | Params:
    """The mean over the leading axis with ``weights`` [K]. Default: uniform weights."""
    if weights is None:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
    shares = weights.astype(jnp.float32) / jnp.sum(weights.astype(jnp.float32))
    total = lambda leaf: jnp.tensordot(shares, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)
    return jax.tree.map(total, tree)


def fill(tree: Tree, known: jax.Array) -> Tree:
    """Replace the rows of leaves [K, ...] that are not ``known`` [K] by the mean of those that are.

    Types without a mean, such as counts, take the first known row.
    """

    def filled(leaf: jax.Array) -> jax.Array:
        here = known.reshape(-1, *(1,) * (leaf.ndim - 1))
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.where(here, leaf, leaf[jnp.argmax(known)][None])
        return jnp.where(here, leaf, jnp.mean(leaf, axis=0, keepdims=True, where=here))

    return jax.tree.map(filled, tree)


class Neighbours(NamedTuple):
    """A map that adds a few models for each new one: new[i] = sum over s of weights[i, s] * old[ids[i, s]]."""

    ids: jax.Array  # [R, S] int32 in 0..K-1
    weights: jax.Array  # [R, S] float32


Map = jax.Array | Neighbours


def mix(tree: Tree, map: Map, *, units: Units | None = None) -> Tree:
    """Apply a linear map to the client axis of K stacked models. All that a server does to models is such a map.

    ========================  ==========================================  =======================================
    ``map``                   new model i                                 for example
    ========================  ==========================================  =======================================
    ids [R], integers         old[map[i]]                                 a permutation: FedMR, for each layer
    `Neighbours` [R, S]       sum over s of weights[i, s] old[ids[i, s]]  the mean of a few neighbours: D-PSGD
    weights [R, K], or [K]    sum over j of map[i, j] old[j]              the mean of all: FedAvg; FedCross
    ========================  ==========================================  =======================================

    If the weights of each new model sum to one, it is a mean of old ones. If the weights of each old model sum to one,
    too, the sum over the models is preserved. A permutation also preserves the sum of squared distances (FedMR, KDD'24,
    Lemma 4.4).

    Args:
      tree: leaves [K, ...].
      map: one of the three; of U units, with a leading axis [U].
      units: a partition of all leaf positions into U units, each with its own map. Default: one map for all leaves.
    """
    leaves, structure = jax.tree.flatten(tree)
    if units is None:
        return jax.tree.unflatten(structure, [_mixed(leaf, map) for leaf in leaves])
    for number, unit in enumerate(units):
        own = jax.tree.map(lambda part, number=number: part[number], map)
        for position in unit:
            leaves[position] = _mixed(leaves[position], own)
    return jax.tree.unflatten(structure, leaves)


def _mixed(leaf: jax.Array, map: Map) -> jax.Array:
    if isinstance(map, Neighbours):  # one gather after the other, without an array of R x S models
        column = lambda ids, weights: weights.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf[ids]
        return functools.reduce(jnp.add, [column(*pair) for pair in zip(map.ids.T, map.weights.T, strict=True)])
    if jnp.issubdtype(map.dtype, jnp.integer):
        return leaf[map]
    return jnp.tensordot(map, leaf, axes=1, precision=jax.lax.Precision.HIGHEST)


def interpolate(a: State | Params, b: State | Params, share: jax.Array | float) -> State | Params:
    """The interpolation share * a + (1 - share) * b, with ``share`` in 0..1."""
    return jax.tree.map(lambda a, b: share * a + (1 - share) * b, a, b)


def where(condition: jax.Array, a: Tree, b: Tree) -> Tree:
    """Tree ``a`` if a scalar condition holds, otherwise ``b``."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def add(a: Params, b: Params) -> Params:
    """The sum a + b.

    Raises:
      TypeError: an operand is the whole state of a model.
    """
    _refuse_states(a, b)
    return jax.tree.map(jnp.add, a, b)


def subtract(a: Params, b: Params) -> Params:
    """The difference a - b.

    Raises:
      TypeError: an operand is the whole state of a model.
    """
    _refuse_states(a, b)
    return jax.tree.map(jnp.subtract, a, b)


def scale(tree: Params, factor: jax.Array | float) -> Params:
    """The product factor * tree.

    Raises:
      TypeError: the tree is the whole state of a model.
    """
    _refuse_states(tree)
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def _refuse_states(*trees: Params) -> None:
    if any(isinstance(tree, Mapping) and "params" in tree for tree in trees):
        raise TypeError(
            "this is the whole state of a model, and sums could make a BatchNorm variance negative: use its params and "
            'keep the other collections, as in mean | {"params": trees.add(mean["params"], step)}'
        )


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)


def squared_norm(tree: Tree) -> jax.Array:
    """The sum of squares of all numbers. Its gradient at zero is zero, while that of a norm is NaN."""
    return functools.reduce(jnp.add, [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)])


def put(tree: Tree, rows: jax.Array, new: Tree) -> Tree:
    """Set the rows ``rows`` [R] of leaves [N, ...] to ``new`` [R, ...]. Duplicate rows are combined by `agree`."""
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), tree, agree(new, rows))


def agree(tree: Tree, names: jax.Array) -> Tree:
    """Replace all rows of leaves [R, ...] that have equal ``names`` [R] by their mean.

    Types without a mean, such as booleans and counts, take the first of these rows.
    """
    same = names[:, None] == names[None, :]
    first = jnp.argmax(same, axis=1)
    count = jnp.sum(same, axis=1).astype(jnp.float32)

    def shared(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf[first]
        total = jnp.zeros_like(leaf).at[first].add(leaf)[first]
        return total / count.astype(leaf.dtype).reshape(-1, *(1,) * (leaf.ndim - 1))

    return jax.tree.map(shared, tree)


def gram(tree: Tree) -> jax.Array:
    """Inner products of K stacked models [K, K]. They are summed leaf by leaf, without a K x K x P array."""

    def products(leaf: jax.Array) -> jax.Array:
        inner = tuple(range(1, leaf.ndim))  # not flattened, so that a sharded leaf stays sharded
        return jnp.tensordot(leaf, leaf, axes=(inner, inner), precision=jax.lax.Precision.HIGHEST)

    return functools.reduce(jnp.add, [products(leaf) for leaf in jax.tree.leaves(tree)])


def cosines(tree: Tree) -> jax.Array:
    """Cosines of all pairs of K stacked models [K, K]. A zero model has cosine 0 with every model."""
    return cosines_of(gram(tree))


def cosines_of(products: jax.Array) -> jax.Array:
    """The cosines [K, K] that belong to inner products [K, K]."""
    norms = jnp.sqrt(jnp.diagonal(products))
    scales = norms[:, None] * norms[None, :]
    return jnp.where(scales > 0, products / jnp.where(scales > 0, scales, 1.0), 0.0)


def mean_pairwise_cosine(tree: Tree) -> jax.Array:
    """The mean of `cosines` over the K(K-1)/2 pairs of stacked models; 1 for a single model.

    The squared length of the sum of K unit vectors is K plus twice the sum of the pairs' cosines. So two passes over
    the parameters are sufficient, where all inner products would take K passes.
    """
    leaves = jax.tree.leaves(tree)
    squares = functools.reduce(jnp.add, [jnp.sum(leaf * leaf, axis=tuple(range(1, leaf.ndim))) for leaf in leaves])
    count = squares.shape[0]
    if count == 1:
        return jnp.ones((), squares.dtype)
    nonzero = squares > 0
    scales = jnp.where(nonzero, jax.lax.rsqrt(jnp.where(nonzero, squares, 1.0)), 0.0)
    total = [jnp.tensordot(scales, leaf, axes=1, precision=jax.lax.Precision.HIGHEST) for leaf in leaves]
    length = functools.reduce(jnp.add, [jnp.sum(leaf * leaf) for leaf in total])
    return (length - jnp.sum(nonzero, dtype=length.dtype)) / (count * (count - 1))


def all_finite(tree: Tree) -> jax.Array:
    """Whether every number of the tree is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def num_bytes(tree: Tree) -> int:
    """The size in bytes of a tree of arrays or shapes (``jax.eval_shape``)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
