"""HeteroFL: clients of different strength train the first channels of one shared network, as many as they can.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021. A client of width r holds the first ceil(r C) of the C channels of every layer, and the whole last layer's
outputs. The server takes, number by number, the plain mean over the clients of the round that hold it; what none of
them holds stays as it is. While a client trains, what enters a normalisation is divided by r (the Scaler), and the
logits of classes that it does not have are set to 0 (masked cross-entropy); of the last layer only the rows of its own
classes enter the mean. The deployed model is the whole network.

What a weak client computes here: the multiply-adds of the whole network, most of them with zeros, so that one compiled
program serves all widths (models/slices.py). ``slice_multiply_adds`` tells what the round's slices take by themselves,
as a share of what its clients would with the whole network; bytes are those of the slices.

Deviations. The published networks are all normalised. In one without normalisation the released code has the Scaler
divide what leaves each layer but the last (``scaler=layers``), which at width 1/16 multiplies 16 times in every layer;
here it divides nothing there. In a normalised network, dense layers without normalisation are not divided. Static
BatchNorm: nobody keeps running statistics there, and before each test the server passes the samples of all clients
through the network, which only a simulation can. Here the running statistics, of what enters without the Scaler, travel
and are averaged like all else (``statistics=clients``), or are taken from the public samples the same way (``public``).
Widths are dealt to the clients in runs of equal length, as released for equal shares. Local training there clips
gradients at norm 1 (--clip_norm). The released code keeps the best round by test accuracy; here it is the last.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.errors import UserError
from fedjax_mr.models import Layer, Model
from fedjax_mr.models.base import Variables
from fedjax_mr.models.slices import Level, Slices, slices
from fedjax_mr.strategies.base import Cohort, GlobalModel, Parcels, Problem, Strategy, Traffic, averaging
from fedjax_mr.strategies.hyper import field


@dataclasses.dataclass(frozen=True)
class Hyper:
    """HeteroFL's own settings."""

    widths: tuple[float, ...] = field(
        (1.0, 0.5, 0.25, 0.125, 0.0625),
        "r, the shares of the channels that clients hold, an equal part of the clients each; name one twice for twice "
        "as many",
        low=0,
        open_low=True,
        high=1,
        source="Diao et al. 2021, all five",
    )
    dynamic: bool = field(
        False, "draw the width of each client anew in every round", source="Diao et al. 2021: both, fixed in most rows"
    )
    scaler: str = field(
        "norms",
        "the Scaler, by which a client divides by its width in training: what enters a normalisation (norms); in a "
        "network without any also what leaves each layer but the last, as the released code does (layers); nothing "
        "(none)",
        choices=("norms", "layers", "none"),
        source="Diao et al. 2021, whose networks are normalised",
    )
    own_classes: bool = field(
        True,
        "masked cross-entropy: a client's loss has 0 for the logits of classes that it lacks, and only the rows of its "
        "own classes of the last layer enter the mean",
        source="Diao et al. 2021 with label skew; without it and with width 1 this is FedAvg with equal weights",
    )
    statistics: str = field(
        "clients",
        "BatchNorm's statistics of the deployed model: the mean of the clients' running ones, or, with none in "
        "training, those of the public samples (static BatchNorm; the authors' code: of the samples of all clients)",
        choices=("clients", "public"),
        source="our choice, as no server sees the clients' samples",
    )


def needs_public(hyper: Hyper) -> bool:
    """Whether it cannot run without public data."""
    return hyper.statistics == "public"


def covered_mean(old: Any, new: Any, held: Any, *, weights: jax.Array | None = None) -> Any:
    """The weighted mean of each number over the rows that hold it; what no row holds stays, bit for bit.

    Args:
      old: leaves [...].
      new: leaves [K, ...].
      held: truth values that broadcast to ``new``, with as many axes.
      weights: of the rows [K]; None: equal.
    """

    def each(old: jax.Array, new: jax.Array, held: jax.Array) -> jax.Array:
        shares = held.astype(new.dtype)
        if weights is not None:
            shares *= weights.astype(new.dtype).reshape(-1, *(1,) * (held.ndim - 1))
        covered = jnp.sum(shares, axis=0)
        mean = jnp.sum(shares * new, axis=0) / jnp.where(covered > 0, covered, 1.0)
        return jnp.where(covered > 0, mean, old)

    return jax.tree.map(each, old, new, held)


def slices_sent(sizes: Any, levels: jax.Array) -> tuple[Parcels, ...]:
    """The slices of some levels [R] as parcels: of each level as many as are of it.

    Args:
      sizes: numbers of 4 bytes in a slice of each level [A].
      levels: int32.
    """
    counts = jnp.bincount(levels, length=len(sizes))
    return tuple(Parcels.of(counts[level], 4 * size) for level, size in enumerate(sizes))


def work(parts: Slices, levels: jax.Array, *, whole: int) -> jax.Array:
    """The multiply-adds of some slices [R] as a share of as many whole networks, of which ``whole`` is one."""
    shares = jnp.asarray(parts.multiply_adds / parts.multiply_adds[whole], jnp.float32)
    return jnp.mean(shares[levels])


@contextlib.contextmanager
def scaled(layers: Sequence[Layer], width: jax.Array) -> Iterator[None]:
    """Divide by ``width``, in the forward passes that the body traces.

    Divided is what enters a normalisation; in a network without any, what leaves a layer, the last one's apart.
    """
    norms = {layer.name for layer in layers if "mean" in layer.names}
    others = [layer.name for layer in layers if "kernel" in layer.names][:-1]

    def divide(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        name = "/".join(context.module.path)
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        if name in norms:
            return call(args[0] / width, *args[1:], **kwargs)
        out = call(*args, **kwargs)
        return out / width if not norms and name in others else out

    with nn.intercept_methods(divide):
        yield


def in_units(variables: Variables, unit: jax.Array) -> Variables:
    """The variables with BatchNorm's means and variances multiplied by a unit and its square."""

    def each(path: tuple, leaf: jax.Array) -> jax.Array:
        is_statistic = path[0].key != "params"
        return leaf * {"mean": unit, "var": unit * unit}.get(path[-1].key, 1.0) if is_statistic else leaf

    return jax.tree_util.tree_map_with_path(each, variables)


def static_statistics(model: Model, variables: Variables, samples: local.Samples, *, batch_size: int) -> Variables:
    """The variables with the statistics of some samples: the mean over batches, as PyTorch's ``momentum=None``.

    A running statistic is old + rate (batch's - old) whatever the layer; from 0 and from 1 both unknowns follow.
    """
    params, kept = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}
    if not jax.tree.leaves(kept):
        return variables
    count = samples.x.shape[0]
    size = min(batch_size, count)
    key = jax.random.key(0)  # of dropout

    def after(start: float, x: jax.Array, mask: jax.Array) -> Variables:
        filled = jax.tree.map(lambda leaf: jnp.full_like(leaf, start), kept)
        return model.train_apply(params, filled, x, mask=mask, key=key)[1]

    def add(total: Variables, number: jax.Array) -> tuple[Variables, None]:
        rows = number * size + jnp.arange(size, dtype=jnp.int32)
        x, mask = local.gather(samples, jnp.minimum(rows, count - 1)), (rows < count).astype(jnp.float32)
        low, high = after(0.0, x, mask), after(1.0, x, mask)
        rate = jax.tree.map(lambda low, high: 1.0 + low - high, low, high)
        batch = jax.tree.map(lambda low, rate: low / jnp.where(rate > 0, rate, 1.0), low, rate)
        return jax.tree.map(jnp.add, total, batch), None

    batches = -(-count // size)
    total, _ = jax.lax.scan(add, trees.zeros_like(kept), jnp.arange(batches, dtype=jnp.int32))
    return {"params": params} | jax.tree.map(lambda leaf: leaf / batches, total)


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build HeteroFL.

    Raises:
      UserError: no width, a network that cannot be narrowed, or no public samples where the statistics are theirs.
    """
    if not hyper.widths:
        raise UserError("heterofl needs one width at least: --heterofl_widths=0.5")
    if needs_public(hyper) and problem.public is None:
        raise UserError("heterofl takes statistics from a public set: give --public_share, or --heterofl_statistics")
    network, count = problem.model, len(hyper.widths)
    parts = slices(network, (*map(Level, hyper.widths), Level(1.0)))  # the last one is the whole, which nobody is dealt
    sizes = parts.numbers(collections=("params",) if hyper.statistics == "public" else None)

    normalised = any("mean" in layer.names for layer in problem.layers)
    divides = hyper.scaler == "layers" or (hyper.scaler == "norms" and normalised)

    def dispatch(state, cohort, key):
        if hyper.dynamic:
            levels = jax.random.randint(key, cohort.ids.shape, 0, count)
        else:
            levels = cohort.ids * count // problem.num_clients
        return {"model": jax.vmap(parts.cut, in_axes=(None, 0))(state.model, levels), "level": levels}

    def owned(ids):
        """The classes of some clients [..., C]."""
        return (problem.label_counts[ids] > 0) | (not hyper.own_classes)

    def client_update(payload, memory, data, round, key):
        level, classes = payload["level"], owned(data.client_id)
        width = jnp.asarray(hyper.widths if divides else (1.0,) * count, jnp.float32)[level]

        def loss(params, state, batch, key):
            with scaled(problem.layers, width):
                logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            logits = jnp.where(classes[None], logits, 0.0)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.y)
            return local.masked_mean(losses, batch.mask), state

        start = in_units(payload["model"], 1 / width)  # running statistics are of what is divided
        confined = parts.confine(loss, level)
        model, metrics = local.train(network, problem.local, start, data, key, loss=confined)
        return {"model": in_units(model, width), "level": level}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        levels = uploads["level"]
        held = jax.vmap(lambda level, classes: parts.masks(level, classes=classes))(levels, owned(cohort.ids))
        model = covered_mean(state.model, uploads["model"], held)
        return state._replace(model=model), {"slice_multiply_adds": work(parts, levels, whole=count)}

    def traffic(usual: Traffic, state: GlobalModel, uploads: Any, cohort: Cohort, round: jax.Array) -> Traffic:
        sent = slices_sent(sizes, uploads["level"])
        return Traffic(sent, sent)

    def global_model(state):
        if problem.public is None or not needs_public(hyper):
            return state.model
        return static_statistics(network, state.model, problem.public, batch_size=problem.local.batch_size)

    return averaging(problem)._replace(
        dispatch=dispatch,
        client_update=client_update,
        server_update=server_update,
        global_model=global_model,
        traffic=traffic,
    )
