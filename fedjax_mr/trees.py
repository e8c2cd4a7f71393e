"""Algebra on models as pytrees, many of them stacked: leaves [K, ...].

Two kinds of trees. A `State` is all of a model (``{"params": ..., "batch_stats": ...}``, Flax's variables): states are
copied, gathered, exchanged and averaged, with weights that are not negative and sum to one, so that a running variance
stays a variance. `Params` are the trainable collection alone, or a change of it: they may also be added, subtracted and
scaled, which extrapolates. These functions refuse a whole state: a variance could become negative, and the network's
outputs would not be numbers.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
State = Any
"""All of a model: every Flax collection."""
Params = Any
"""The trainable collection of a model, a change of it, or any tree of numbers that may take every value."""
Units = Sequence[Sequence[int]]
"""A division of a tree's leaves: each unit lists positions in ``jax.tree.leaves``."""


def broadcast(tree: Tree, count: int) -> Tree:
    """``count`` copies of a tree, stacked on a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), tree)


def take(tree: Tree, rows: jax.Array) -> Tree:
    """The rows [R] of every leaf [K, ...]: leaves [R, ...] (for a scalar ``rows``: [...])."""
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def mean(tree: State | Params, *, weights: jax.Array | None = None) -> State | Params:
    """The mean over the leading axis, weighted by ``weights`` [K] (None: uniform)."""
    if weights is None:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
    shares = weights.astype(jnp.float32) / jnp.sum(weights.astype(jnp.float32))
    return jax.tree.map(lambda leaf: jnp.tensordot(shares, leaf, axes=1), tree)


def mix(tree: State | Params, weights: jax.Array) -> State | Params:
    """Weighted means of the K stacked models: new[i] = sum over j of weights[i, j] * old[j].

    Args:
      tree: leaves [K, ...].
      weights: [R, K]; the rows are not negative and sum to one.
    """
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1, precision=jax.lax.Precision.HIGHEST), tree)


def interpolate(a: State | Params, b: State | Params, share: jax.Array | float) -> State | Params:
    """Share * a + (1 - share) * b, with ``share`` in 0..1."""
    return jax.tree.map(lambda a, b: share * a + (1 - share) * b, a, b)


def where(condition: jax.Array, a: Tree, b: Tree) -> Tree:
    """A where a scalar condition holds, else b."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def add(a: Params, b: Params) -> Params:
    """A + b.

    Raises:
      TypeError: an operand is the whole state of a model.
    """
    _refuse_states(a, b)
    return jax.tree.map(jnp.add, a, b)


def subtract(a: Params, b: Params) -> Params:
    """A - b.

    Raises:
      TypeError: an operand is the whole state of a model.
    """
    _refuse_states(a, b)
    return jax.tree.map(jnp.subtract, a, b)


def scale(tree: Params, factor: jax.Array | float) -> Params:
    """Factor * tree.

    Raises:
      TypeError: the tree is the whole state of a model.
    """
    _refuse_states(tree)
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def _refuse_states(*trees: Params) -> None:
    if any(isinstance(tree, Mapping) and "params" in tree for tree in trees):
        raise TypeError(
            "this is the whole state of a model, and sums could make a BatchNorm variance negative: take its params "
            'and say what becomes of the rest, as in mean | {"params": trees.add(mean["params"], step)}'
        )


def zeros_like(tree: Tree) -> Tree:
    """A tree of zeros."""
    return jax.tree.map(jnp.zeros_like, tree)


def permute(tree: Tree, *, units: Units, permutations: jax.Array) -> Tree:
    """The K stacked models with their units exchanged: ``new[j][u] = old[permutations[u, j]][u]``.

    A gather per leaf. Every unit's copies are permuted, so sums, means and sums of squared distances over the K
    models stay (FedMR, KDD'24, Lemma 4.4).

    Args:
      tree: leaves [K, ...].
      units: every leaf position exactly once, grouped into U units.
      permutations: [U, K] int, each row a permutation of 0..K-1.
    """
    leaves, structure = jax.tree.flatten(tree)
    for unit, permutation in zip(units, permutations, strict=True):
        for position in unit:
            leaves[position] = leaves[position][permutation]
    return jax.tree.unflatten(structure, leaves)


def squared_norm(tree: Tree) -> jax.Array:
    """The sum of the squares of all numbers (its gradient at zero is zero; that of a norm is not a number)."""
    return functools.reduce(jnp.add, [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)])


def put(tree: Tree, rows: jax.Array, new: Tree) -> Tree:
    """Leaves [N, ...] with ``new`` [R, ...] at ``rows`` [R]; rows named more than once get what `agree` says."""
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), tree, agree(new, rows))


def agree(tree: Tree, names: jax.Array) -> Tree:
    """Leaves [R, ...] whose rows of one name in ``names`` [R] all hold the mean of those rows.

    Of numbers that have no mean, such as truth values and counts, they hold the first.
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
    """The inner products of the K stacked models [K, K], leaf by leaf (never a K x K x P array)."""

    def products(leaf: jax.Array) -> jax.Array:
        inner = tuple(range(1, leaf.ndim))  # not flattened: a leaf that is divided over devices stays so
        return jnp.tensordot(leaf, leaf, axes=(inner, inner), precision=jax.lax.Precision.HIGHEST)

    return functools.reduce(jnp.add, [products(leaf) for leaf in jax.tree.leaves(tree)])


def cosines(tree: Tree) -> jax.Array:
    """The cosines of all pairs of the K stacked models [K, K]; a zero model has cosine 0 with every other."""
    products = gram(tree)
    norms = jnp.sqrt(jnp.diagonal(products))
    scales = norms[:, None] * norms[None, :]
    return jnp.where(scales > 0, products / jnp.where(scales > 0, scales, 1.0), 0.0)


def mean_pairwise_cosine(tree: Tree) -> jax.Array:
    """The mean of `cosines` over the K(K-1)/2 pairs of stacked models; 1 for a single model.

    The sum of K unit vectors has the squared length K plus twice the sum of the pairs' cosines, so two passes over the
    parameters do, where all inner products take K.
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
    """The bytes of a tree of arrays or of shapes (``jax.eval_shape``)."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
