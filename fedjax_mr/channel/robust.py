"""Robust rules: what the server does with the messages of a round if some of them may come from attackers.

A rule combines changes x_1..x_K (values minus reference), of which f may be arbitrary (outliers).

- ``median``, ``trimmed_mean``: of each number by itself. Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed
  Learning, ICML 2018.
- ``krum``, ``multi_krum``: the change, or the mean of the K - f changes, with the smallest mean squared distance to its
  K - f - 1 nearest others. Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries, NeurIPS 2017.
- ``geometric_median``: Weiszfeld's steps. Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE
  Transactions on Signal Processing 2022 (RFA).
- ``centered_clip``: steps by the mean of clipped differences. Karimireddy, He, Jaggi: Learning from History, ICML 2021.

Two steps before a rule make it better on heterogeneous clients. ``nnm`` (nearest-neighbour mixing; Allouah,
Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: Fixing by Mixing, AISTATS 2023) replaces each change by the mean of the
K - f nearest ones, itself included. ``bucketing`` (Karimireddy, He, Jaggi: Byzantine-Robust Learning on Heterogeneous
Datasets via Bucketing, ICLR 2022) replaces the changes by the means of random pairs.

Methods with one server model: the rule is an aggregation. Every message becomes the reference plus the result, so any
mean that the method takes is the result. Krum and Multi-Krum keep accepted messages bit for bit and replace the
others by the mean of the accepted ones, so a method that weights messages by samples still does.

Methods with K models (``stacked``): a server that recombines models uses every message, so there is no mean to make
robust. Here the rule screens the messages before the recombination, and the models stay different.

- ``krum``, ``multi_krum``: a rejected message is replaced by what the client had received.
- ``trimmed_mean``: each number of a change is clipped to the range that trimming keeps.
- ``median``, ``geometric_median``, ``centered_clip``: a change is pulled to within a radius of the rule's result. The
  radius is the (K - f)-th smallest distance of the changes to it. So at most f changes are shortened, as many as Krum
  refuses and trimming clips, and f = 0 changes nothing. The largest f, (K - 1) / 2 rounded down, gives about the median
  distance, the strongest setting.

Methods whose clients add what they upload to their memory (`Strategy.increments`, SCAFFOLD) need ``krum`` or
``multi_krum``, which refuse whole messages, see `channel.base`. The other rules are refused: they change the server's
control variate but not the clients', and the difference grows until the training diverges, with and without attackers.

``nnm`` and ``bucketing`` are refused for K models, because they make the models nearly equal. No published guarantee
for recombination is known, and none is claimed here. A message that passes reaches many models: of K = 10 models with
29 layers, 95 % contain one of its layers after one recombination.

Where papers and codes differ. Krum's paper sums over the K - f - 2 nearest; ByzFL 0.0.11 and this module average over
one more. The code of the bucketing paper has fourth powers of distances in Krum and returns the sum in Multi-Krum.
Geometric median: ByzFL makes three steps from 0 with a smoothing of 0.1, RFA at most four from the mean with 1e-6. A
smoothing of 0.1 can exceed the length of a model's change, and then the rule is a mean. From the mean, an outlier of
size 1e9 needs many steps to be forgotten. From 0, a single client that sends back what it received stops the rule: the
first point is then one of the rows, whose weight is a million times that of the others. The default here is eight steps
from the median of each number, with 1e-6. That median is robust by itself, and no step increases the sum of distances.
Centered clipping: ByzFL and the authors have a constant radius (100 and 10) and continue from the result of the last
round. The default here is the median distance of the changes, from the reference in each round, so there is nothing to
tune.

Methods without a server (D-PSGD): each client applies the rule to its own model and those that it receives, and f is
the number of attackers among its neighbours. All clients must take part in each round.

- ``median``, ``trimmed_mean``, ``krum``, ``multi_krum``, ``geometric_median``: the result is the client's new model, as
  in the code of He, Karimireddy, Jaggi: Byzantine-Robust Decentralized Learning via ClippedGossip, arXiv 2202.01545,
  2022. All models of a neighbourhood have equal weights. So ``trimmed_mean`` with f = 0 is the mean of the graph only
  if all clients have the same number of neighbours.
- ``centered_clip`` is their ClippedGossip: x_i + sum over j of W_ij clip(x_j - x_i), with the weights of the graph. The
  radius is the (S - f)-th smallest distance of the S neighbours' models to x_i; the code has f = 1 or a constant.

``nnm`` and ``bucketing`` are refused there, as for K models.

A message that is not finite, or whose squared length is not, counts as one of the f outliers. The rules leave it out:
with m such messages they combine the other K - m against max(f - m, 0) outliers. If no message is usable, the result is
the reference.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.channel.base import Context, Link, Values
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Combine, Info, Problem, Received, Strategy

Tree = trees.Params
Number = jax.Array | float
BEFORE = ("none", "nnm", "bucketing")
BUCKET = 2  # changes per bucket


_setting = functools.partial(field, group="Channel")


@dataclasses.dataclass(frozen=True)
class Robust:
    """A robust rule of the server."""

    # fmt: off
    robust: str = _setting(
        "none", "Robust rule of the server: aggregation for methods with one model, screening of the uploads for "
        "methods with several",
        choices=("none", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clip"),
        short=True)
    robust_outliers: int = _setting(
        1, "Malicious clients f in a round that the rule withstands", unit="clients", low=0, needs=("robust",),
        argument="outliers")
    robust_before: str = _setting(
        "none", "Step before the rule, for methods with one model: nearest-neighbour mixing (nnm), or means of two "
        "random uploads (bucketing)", choices=("none", "nnm", "bucketing"), needs=("robust",))
    # fmt: on


def build(settings: Robust, problem: Problem, *, stacked: bool) -> Link:
    """The link of the settings, see `robust`."""
    outliers, before = settings.robust_outliers, settings.robust_before
    return robust(problem, settings.robust, outliers=outliers, before=before, stacked=stacked)


def robust(problem: Problem, rule: str, *, outliers: int, before: str = "none", stacked: bool) -> Link:
    """A link in which the server applies a robust rule to the messages of a round.

    Info: ``rejected``, the share of messages that are replaced or pulled closer because of their distance, or that are
    not finite. For ``trimmed_mean`` with K models it is the share of numbers.

    Args:
      problem: the problem of the strategy.
      rule: one of `RULES`.
      outliers: f, the number of messages per round that may come from attackers. With K models and f = 0, all rules but
        ``krum`` return the values bit for bit.
      before: one of `BEFORE`, applied before the rule.
      stacked: whether the rule screens the messages of K models. Otherwise it aggregates those of one model.

    Raises:
      UserError: unknown names, or ``before`` with K models. `Link.check` raises it if the cohort is too small, if
        clients exchange layers before the upload, or if the rule does not suit a method with `Strategy.increments`.
    """
    if rule not in RULES:
        raise unknown_name("robust rule", rule, RULES)
    if before not in BEFORE:
        raise unknown_name("step before a robust rule", before, BEFORE)
    if stacked and before != "none":
        raise UserError(f"{before} makes the models of this method nearly equal: leave it out or train one model")

    refuses = "krum" in rule and before == "none"  # a message is accepted or refused as a whole

    def check(strategy: Strategy, problem: Problem) -> None:
        if strategy.neighbours is not None and problem.cohort_size < problem.num_clients:
            raise UserError(
                f"neighbours apply {rule} to the models that they receive, so all must send: set "
                f"cohort={problem.num_clients}"
            )
        if strategy.increments and not refuses:
            raise UserError(
                f"the clients add their {' and '.join(strategy.increments)} to their memory, which "
                f"{before if before != 'none' else rule} on the server cannot follow: use multi_krum alone"
            )
        if strategy.exchange is not None and strategy.exchange.before_upload:
            raise UserError(
                "after an exchange of layers a message mixes the layers of several clients, so one attacker is in all "
                "of them: use the exchange or a robust rule, not both"
            )
        count, size = problem.cohort_size, BUCKET if before == "bucketing" else 1
        needed = size * (2 * outliers + (2 if "krum" in rule else 0)) + 1
        if outliers < 0 or (count < needed and strategy.neighbours is None):
            raise UserError(
                f"{rule}{' of buckets' if size > 1 else ''} against outliers={outliers} needs cohort={needed} or more, "
                f"but the cohort is {count}: choose a larger cohort or another number of outliers"
            )

    def server(state: Any, values: Values, reference: Values, context: Context) -> tuple[Any, Values, Info]:
        usable = jnp.isfinite(squared_norms(trees.subtract(values, reference)))
        values = jax.vmap(trees.where)(usable, values, reference)
        changes = trees.subtract(values, reference)
        counted = usable | ~jnp.any(usable)  # if no message is usable, all changes are zero, and so is the result
        if stacked:
            values, shares = _screened(rule, values, reference, changes, outliers, counted)
        elif before == "none" and "krum" in rule:
            kept = accepted(changes, outliers, counted, count=1 if rule == "krum" else None)
            values = jax.vmap(trees.where)(kept, values, _around(reference, _mean_of(changes, kept)))
            shares = ~kept
        else:
            if before == "nnm":
                changes = nearest_neighbour_mixing(changes, outliers, counted)
            if before == "bucketing":
                changes, counted = bucketing(changes, context.key, counted)
            values, shares = _around(reference, RULES[rule](changes, outliers, counted)), ~usable
        if state is not None:
            state = state.at[context.client].set(shares | ~usable)
        return state, values, {"rejected": jnp.mean(jnp.where(usable, shares.astype(jnp.float32), 1.0))}

    without_server = neighbourhoods(rule, outliers)
    if not refuses:
        return Link("robust", server=server, check=check, neighbours=without_server)
    return Link(
        "robust",
        server=server,
        neighbours=without_server,
        init=lambda key: jnp.zeros(problem.num_clients, bool),
        announce=lambda refused, client: refused[client],
        check=check,
        refuses=True,
    )


def neighbourhoods(rule: str, outliers: int) -> Combine:
    """The rule of clients without a server, with f = ``outliers`` among the neighbours of each client.

    Info: ``rejected``, the share of the received models that are shortened (``centered_clip``) or not finite.

    Raises:
      UserError: when it is called, if a client has too few neighbours, or if Krum's clients have different numbers.
    """

    def combine(params: Tree, received: Received) -> tuple[Tree, Info]:
        needed, have = 2 * outliers + (2 if "krum" in rule else 0) + 1, received.least + 1
        if have < needed:
            raise UserError(
                f"{rule} against outliers={outliers} among the neighbours needs {needed} models, but a client has "
                f"{have} with its own: use a graph with more neighbours"
            )
        if "krum" in rule and received.least < received.most:
            raise UserError(f"{rule} needs a graph in which all clients have the same number of neighbours")

        def one(client: jax.Array) -> tuple[Tree, jax.Array]:
            own, ids, shares = trees.take(params, client), received.ids[client], received.shares[client]
            changes = jax.tree.map(lambda leaf, own: leaf[ids] - own[None], params, own)
            sent = shares > 0
            usable = sent & jnp.isfinite(squared_norms(changes))
            changes = jax.tree.map(lambda leaf: jnp.where(_column(usable, leaf), leaf, 0.0), changes)
            lost, empty = sent & ~usable, ids.shape[0] - received.counts[client]
            if rule == "centered_clip":
                distances = jnp.sqrt(squared_norms(changes))
                last = jnp.minimum(received.counts[client] - outliers, jnp.sum(usable)) - 1
                factors = _factors(distances, _sorted(distances, usable)[last])
                return trees.add(own, _combined(changes, shares * factors)), (factors < 1) | lost
            itself = jax.tree.map(lambda leaf: jnp.pad(leaf, ((1, 0), *((0, 0),) * (leaf.ndim - 1))), changes)
            allowed = outliers if "krum" in rule else outliers + empty  # an empty place is no outlier
            return trees.add(own, RULES[rule](itself, allowed, jnp.pad(usable, (1, 0), constant_values=True))), lost

        params, rejected = jax.lax.map(one, jnp.arange(received.ids.shape[0], dtype=jnp.int32))  # S models at a time
        sent = jnp.maximum(jnp.sum(received.shares > 0), 1).astype(jnp.float32)
        return params, {"rejected": jnp.sum(rejected, dtype=jnp.float32) / sent}

    return combine


# --- Rules: leaves [K, ...] -> leaves [...] ---------------------------------------------------------------------------
# Only the rows that are ``usable`` [K] bool count. Default: all. The others must be finite as well.


def median(tree: Tree, usable: jax.Array | None = None) -> Tree:
    """The median of each number. For an even number of rows, the mean of the two in the middle."""
    count = _count(tree, usable)

    def middle(leaf: jax.Array) -> jax.Array:
        return (leaf[(count - 1) // 2] + leaf[count // 2]) * 0.5

    return jax.tree.map(lambda leaf: middle(_sorted(leaf, usable)), tree)


def trimmed_mean(tree: Tree, outliers: int, usable: jax.Array | None = None) -> Tree:
    """The mean of each number without its f lowest and f highest values."""
    low, high = _trimmed_range(tree, outliers, usable)

    def mean(leaf: jax.Array) -> jax.Array:
        position = jnp.arange(leaf.shape[0]).reshape(-1, *(1,) * (leaf.ndim - 1))
        kept = jnp.where((position >= low) & (position <= high), _sorted(leaf, usable), jnp.zeros_like(leaf))
        return jnp.sum(kept, axis=0) / (high - low + 1).astype(leaf.dtype)

    return jax.tree.map(mean, tree)


def krum(tree: Tree, outliers: int, usable: jax.Array | None = None) -> Tree:
    """The row with the lowest of `krum_scores`."""
    return trees.take(tree, jnp.argmin(krum_scores(tree, outliers, usable)))


def multi_krum(tree: Tree, outliers: int, usable: jax.Array | None = None) -> Tree:
    """The mean of the K - f rows with the lowest of `krum_scores`."""
    return _mean_of(tree, accepted(tree, outliers, usable))


def krum_scores(tree: Tree, outliers: int, usable: jax.Array | None = None) -> jax.Array:
    """The mean squared distance of each row to its K - f - 1 nearest others [K]; infinite for unusable rows."""
    squares = pairwise_squares(tree, usable)
    nearest = jnp.sort(squares, axis=1)[:, 1 : squares.shape[0] - outliers]
    count = jnp.clip(_count(tree, usable) - 1, 1, nearest.shape[1])  # with more than f unusable rows there are fewer
    is_known = jnp.arange(nearest.shape[1]) < count
    scores = jnp.sum(jnp.where(is_known[None, :], nearest, 0.0), axis=1) / count.astype(nearest.dtype)
    return scores if usable is None else jnp.where(usable, scores, jnp.inf)


def accepted(tree: Tree, outliers: int, usable: jax.Array | None = None, *, count: int | None = None) -> jax.Array:
    """The ``count`` rows with the lowest of `krum_scores` [K] bool. Default: K - f rows."""
    scores = krum_scores(tree, outliers, usable)
    first = jnp.argsort(scores, stable=True)[: scores.shape[0] - outliers if count is None else count]
    return jnp.zeros(scores.shape, bool).at[first].set(True) & _all_rows(tree, usable)


def geometric_median(
    tree: Tree,
    usable: jax.Array | None = None,
    *,
    start: Tree | None = None,
    smoothing: Number = 1e-6,
    steps: int = 8,
) -> Tree:
    """The point with the smallest sum of distances, approximately.

    Weiszfeld's steps: z becomes the mean of the rows with weights 1 / max(smoothing, distance to z). A first point that
    is one of the rows hardly moves, so it must not be one that an attacker knows and that is no good result.

    Args:
      tree: leaves [K, ...].
      usable: which rows count [K] bool. Default: all.
      start: the first z. Default: the median of each number.
      smoothing: nu, the smallest distance in a weight.
      steps: number of steps T.
    """
    counts = _all_rows(tree, usable)

    def step(_: jax.Array, z: Tree) -> Tree:
        weights = jnp.where(counts, 1 / jnp.maximum(jnp.sqrt(squares_to(tree, z)), smoothing), 0.0)
        return _combined(tree, weights / jnp.sum(weights))

    return jax.lax.fori_loop(0, steps, step, median(tree, usable) if start is None else start)


def centered_clip(tree: Tree, usable: jax.Array | None = None, *, radius: Number | None = None, steps: int = 3) -> Tree:
    """Steps from zero: v becomes v + the mean of the differences x_i - v, each clipped to the length ``radius``.

    Args:
      tree: leaves [K, ...].
      usable: which rows count [K] bool. Default: all.
      radius: tau. Default: in each step, the median distance of the rows to v.
      steps: number of steps L. Default: that of the authors' code.
    """
    counts = _all_rows(tree, usable)

    def step(_: jax.Array, v: Tree) -> Tree:
        distances = jnp.sqrt(squares_to(tree, v))
        limit = median(distances, usable) if radius is None else jnp.asarray(radius, distances.dtype)
        factors = _factors(distances, limit)
        clipped = jax.tree.map(lambda leaf, v: _rows_times(factors, leaf - v[None]), tree, v)
        return trees.add(v, _mean_of(clipped, counts))

    return jax.lax.fori_loop(0, steps, step, _zero_row(tree))


RULES = {
    "median": lambda tree, outliers, usable=None: median(tree, usable),
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": lambda tree, outliers, usable=None: geometric_median(tree, usable),
    "centered_clip": lambda tree, outliers, usable=None: centered_clip(tree, usable),
}
"""The rules, (changes [K, ...], f, usable [K]) -> change [...]."""


# --- Steps before a rule: leaves [K, ...] -> leaves [R, ...] ----------------------------------------------------------


def nearest_neighbour_mixing(tree: Tree, outliers: int, usable: jax.Array | None = None) -> Tree:
    """Replace each row by the mean of its K - f nearest rows, itself included."""
    squares = pairwise_squares(tree, usable)
    count = squares.shape[0]
    nearest = jnp.argsort(squares, axis=1, stable=True)[:, : count - outliers]
    chosen = jnp.sum(jax.nn.one_hot(nearest, count), axis=1) * _all_rows(tree, usable)[None, :].astype(jnp.float32)
    return _combined(tree, chosen / jnp.sum(chosen, axis=1, keepdims=True))


def bucketing(
    tree: Tree, key: jax.Array, usable: jax.Array | None = None, *, size: int = BUCKET
) -> tuple[Tree, jax.Array]:
    """The means of ``size`` rows each, in random order: R = ceil(K / size). The last bucket may be smaller.

    Consumes ``key``.

    Returns:
      The means, and which buckets have a usable row [R] bool.
    """
    count = jax.tree.leaves(tree)[0].shape[0]
    bucket = jax.random.permutation(key, count) // size
    members = jax.nn.one_hot(bucket, -(-count // size)).T * _all_rows(tree, usable)[None, :].astype(jnp.float32)
    sizes = jnp.sum(members, axis=1, keepdims=True)
    return _combined(tree, members / jnp.maximum(sizes, 1.0)), sizes[:, 0] > 0


# --- Distances --------------------------------------------------------------------------------------------------------


def squares_to(tree: Tree, centre: Tree) -> jax.Array:
    """The squared distance of each row of leaves [K, ...] to a centre [...]: [K]."""
    return squared_norms(jax.tree.map(lambda leaf, centre: leaf - centre[None], tree, centre))


def squared_norms(tree: Tree) -> jax.Array:
    """The squared length of each row of leaves [K, ...]: [K]."""
    return jax.vmap(trees.squared_norm)(tree)


def pairwise_squares(tree: Tree, usable: jax.Array | None = None) -> jax.Array:
    """The squared distances of all pairs of rows [K, K], from differences; those to unusable rows are infinite.

    They are exact to rounding also where distances are much smaller than lengths, unlike those from inner products.
    One row is compared with all others at a time, so memory is that of the tree.
    """
    squares = jax.lax.map(lambda row: squares_to(tree, row), tree)
    return squares if usable is None else jnp.where(usable[None, :], squares, jnp.inf)


# --- Screening before a recombination ---------------------------------------------------------------------------------


def _screened(
    rule: str, values: Values, reference: Values, changes: Values, outliers: int, usable: jax.Array
) -> tuple[Values, jax.Array]:
    """The values [K, ...] that K models may take, and which were changed [K] (for trimming, the share of numbers).

    The values of unusable rows are their references.
    """
    if "krum" in rule:
        kept = accepted(changes, outliers, usable, count=1 if rule == "krum" else None)
        return jax.vmap(trees.where)(kept, values, reference), ~kept
    if rule == "trimmed_mean":
        first, last = _trimmed_range(changes, outliers, usable)
        limit = lambda position: jax.tree.map(lambda leaf: _sorted(leaf, usable)[position][None], changes)
        low, high = limit(first), limit(last)
        outside = jax.tree.map(lambda leaf, low, high: (leaf < low) | (leaf > high), changes, low, high)
        outside = jax.tree.map(lambda leaf: _rows_times(usable, leaf), outside)
        clipped = trees.add(reference, jax.tree.map(jnp.clip, changes, low, high))
        size = sum(leaf[0].size for leaf in jax.tree.leaves(changes))
        share = lambda row: sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(row)) / jnp.float32(size)
        return jax.tree.map(jnp.where, outside, clipped, values), jax.vmap(share)(outside)
    centre = RULES[rule](changes, outliers, usable)
    distances = jnp.sqrt(squares_to(changes, centre))
    last = jnp.minimum(usable.shape[0] - outliers, _count(changes, usable)) - 1
    factors = _factors(distances, _sorted(distances, usable)[last])
    pulled = jax.tree.map(lambda leaf, v: v[None] + _rows_times(factors, leaf - v[None]), changes, centre)
    far = (factors < 1) & usable
    return jax.vmap(trees.where)(far, trees.add(reference, pulled), values), far


def _factors(distances: jax.Array, radius: jax.Array) -> jax.Array:
    """Factors in 0..1 that bring rows with these distances [K] to within a radius [K]."""
    return jnp.where(distances > radius, radius / distances, 1.0)


def _all_rows(tree: Tree, usable: jax.Array | None) -> jax.Array:
    return jnp.ones(jax.tree.leaves(tree)[0].shape[0], bool) if usable is None else usable


def _count(tree: Tree, usable: jax.Array | None) -> jax.Array:
    """The number of usable rows."""
    return jnp.sum(_all_rows(tree, usable))


def _sorted(leaf: jax.Array, usable: jax.Array | None) -> jax.Array:
    """The values of each number in ascending order, those of unusable rows last."""
    if usable is not None:
        leaf = jnp.where(usable.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, jnp.inf)
    return jnp.sort(leaf, axis=0)


def _trimmed_range(tree: Tree, outliers: int, usable: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The first and the last of the sorted values that trimming keeps. Each unusable row is one of the f outliers."""
    rows, count = _all_rows(tree, usable).shape[0], _count(tree, usable)
    trimmed = jnp.maximum(outliers - (rows - count), 0)
    return trimmed, count - trimmed - 1


def _combined(tree: Tree, weights: jax.Array) -> Tree:
    """Weighted sums of the rows, with weights [K] or [R, K], in full float32 precision on every device."""
    total = lambda leaf: jnp.tensordot(weights.astype(leaf.dtype), leaf, axes=1, precision=jax.lax.Precision.HIGHEST)
    return jax.tree.map(total, tree)


def _mean_of(tree: Tree, kept: jax.Array) -> Tree:
    weights = kept.astype(jnp.float32)
    return _combined(tree, weights / jnp.sum(weights))


def _rows_times(factors: jax.Array, leaf: jax.Array) -> jax.Array:
    return _column(factors, leaf).astype(leaf.dtype) * leaf


def _column(rows: jax.Array, leaf: jax.Array) -> jax.Array:
    """Numbers of the rows [K] in the rank of a leaf [K, ...]."""
    return rows.reshape(-1, *(1,) * (leaf.ndim - 1))


def _zero_row(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), tree)


def _around(reference: Values, change: Tree) -> Values:
    """The reference [K, ...] plus one change [...]."""
    return jax.tree.map(lambda leaf, change: leaf + change[None], reference, change)
