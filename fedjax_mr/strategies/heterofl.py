"""HeteroFL: clients of different capacity train the first channels of one shared network, as many as they can.

Diao, Ding, Tarokh: HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients, ICLR
2021. A client of width r holds the first ceil(r C) of the C channels of every layer, and all outputs of the last layer.
The server averages each number over the clients of the round that hold it. Numbers that no client holds do not change.
In training, the inputs of normalisation layers are divided by r (the Scaler), and the logits of classes without samples
on the client are set to 0 (masked cross-entropy). Only the rows of the client's classes of the last layer enter the
mean. The deployed model is the whole network.

Computation here: each client computes the multiply-adds of the whole network, most of them with zeros, so that one
compiled program serves all widths (models/slices.py). The column ``slice_multiply_adds`` is the work of the round's
slices alone, as a share of the work for the whole network. Traffic counts the slices.

Deviations:
* All published networks have normalisation layers. In a network without them, the Scaler of the released code divides
  the outputs of every layer but the last (``scaler=layers``), which at width 1/16 multiplies them by 16 in every layer.
  Here nothing is divided in such a network. In a normalised network, dense layers without normalisation are not
  divided.
* Static BatchNorm: in the paper clients keep no running statistics, and before each test the server passes the samples
  of all clients through the network, which is possible only in a simulation. Here the running statistics of the
  unscaled inputs are uploaded and averaged like the parameters (``statistics=clients``), or computed from the public
  samples (``statistics=public``).
* Widths are assigned to consecutive clients, an equal number for each width, as in the released code for equal shares.
* The released code clips gradients at norm 1 in local training; here this is the setting ``clip_norm``.
* The released code reports the best round by test accuracy; here it is the last round.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples, gather
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import Layer, Model
from fedjax_mr.models.base import Variables
from fedjax_mr.models.slices import Level, Slices, slices
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import GlobalModel, averaging
from fedjax_mr.strategies.traffic import Parcels, Traffic


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of HeteroFL."""

    widths: tuple[float, ...] = field(
        (1.0, 0.5, 0.25, 0.125, 0.0625),
        "r, shares of the channels that clients hold. Each entry applies to an equal number of clients; repeat an "
        "entry to assign it to more clients",
        low=0,
        open_low=True,
        high=1,
        source="Diao et al. 2021, all five",
    )
    dynamic: bool = field(
        False,
        "draw the width of each client in every round",
        source="Diao et al. 2021 report both, mostly fixed widths",
    )
    scaler: str = field(
        "norms",
        "Scaler, the division by the client's width in training: inputs of normalisation layers (norms); in a network "
        "without them, outputs of every layer but the last, as in the released code (layers); disabled (none)",
        choices=("norms", "layers", "none"),
        source="Diao et al. 2021, whose networks are normalised",
    )
    own_classes: bool = field(
        True,
        "masked cross-entropy: logits of classes that a client lacks are 0 in its loss, and only the rows of its own "
        "classes in the last layer are averaged. It has no effect on tasks without a class per sample. Without it and "
        "with width 1, HeteroFL is FedAvg with equal weights",
        source="Diao et al. 2021 with label skew",
    )
    statistics: str = field(
        "clients",
        "BatchNorm statistics of the deployed model: mean of the clients' running statistics (clients), or statistics "
        "of the public samples (public; static BatchNorm, in the authors' code on the samples of all clients)",
        choices=("clients", "public"),
        source="our choice, because a server does not see the clients' samples",
    )


def needs_public(hyper: Hyper) -> bool:
    """Whether HeteroFL needs public data."""
    return hyper.statistics == "public"


def covered_mean(old: Any, new: Any, held: Any, *, weights: jax.Array | None = None) -> Any:
    """The weighted mean of each number over the rows that hold it. Numbers that no row holds keep their old value.

    Args:
      old: leaves [...].
      new: leaves [K, ...].
      held: booleans that broadcast to ``new`` and have the same number of axes.
      weights: weights of the rows [K], or None for equal weights.
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
    """Parcels of slices with the given levels [R]: one entry per level, which counts the slices of that level.

    Args:
      sizes: count of 4-byte numbers in a slice of each level [A].
      levels: int32.
    """
    counts = jnp.bincount(levels, length=len(sizes))
    return tuple(Parcels.of(counts[level], 4 * size) for level, size in enumerate(sizes))


def work(parts: Slices, levels: jax.Array, *, whole: int) -> jax.Array:
    """Multiply-adds of slices [R] as a share of those of R whole networks; ``whole`` is the level of the network."""
    shares = jnp.asarray(parts.multiply_adds / parts.multiply_adds[whole], jnp.float32)
    return jnp.mean(shares[levels])


@contextlib.contextmanager
def scaled(layers: Sequence[Layer], width: jax.Array) -> Iterator[None]:
    """Divide by ``width`` in the forward passes traced in the body.

    The inputs of normalisation layers are divided. In a network without them, the outputs of all layers but the last
    are divided.
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
    """Multiply BatchNorm's means by a unit and its variances by the square of the unit."""

    def each(path: tuple, leaf: jax.Array) -> jax.Array:
        is_statistic = path[0].key != "params"
        return leaf * {"mean": unit, "var": unit * unit}.get(path[-1].key, 1.0) if is_statistic else leaf

    return jax.tree_util.tree_map_with_path(each, variables)


def static_statistics(model: Model, variables: Variables, samples: Samples, *, batch_size: int) -> Variables:
    """Replace the statistics by those of samples: the mean over batches, as with PyTorch's ``momentum=None``.

    In every layer a running statistic is updated to old + rate (new - old). Two updates, from old = 0 and from old = 1,
    determine the rate and the new value.
    """
    params, kept = variables["params"], {name: tree for name, tree in variables.items() if name != "params"}
    if not jax.tree.leaves(kept):
        return variables
    count = samples.x.shape[0]
    size = min(batch_size, count)
    key = random_key(0)  # for dropout

    def after(start: float, x: jax.Array, mask: jax.Array) -> Variables:
        filled = jax.tree.map(lambda leaf: jnp.full_like(leaf, start), kept)
        return model.train_apply(params, filled, x, mask=mask, key=key)[1]

    def add(total: Variables, number: jax.Array) -> tuple[Variables, None]:
        rows = number * size + jnp.arange(size, dtype=jnp.int32)
        x, mask = gather(samples, jnp.minimum(rows, count - 1)), (rows < count).astype(jnp.float32)
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
      UserError: there is no width, the network cannot be sliced, or statistics=public without public samples.
    """
    if not hyper.widths:
        raise UserError("heterofl needs at least one width: pass hyper.widths=(0.5,)")
    if needs_public(hyper) and problem.public is None:
        raise UserError(
            "heterofl takes BatchNorm statistics from public data: pass public_share=0.1, or hyper.statistics=clients"
        )
    network, count = problem.model, len(hyper.widths)
    parts = slices(
        network, (*map(Level, hyper.widths), Level(1.0))
    )  # the last level is the whole network, assigned to no client
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
        """The classes of clients as booleans [..., C]."""
        if "classes" not in network.task.provides:  # all outputs belong to everybody
            return jnp.ones((*ids.shape, problem.num_classes), bool)
        return (problem.label_counts[ids] > 0) | (not hyper.own_classes)

    def client_update(payload, memory, data, round, key):
        level, classes = payload["level"], owned(data.client_id)
        width = jnp.asarray(hyper.widths if divides else (1.0,) * count, jnp.float32)[level]

        def loss(params, state, batch, key):
            with scaled(problem.layers, width):
                logits, state = network.train_apply(params, state, batch.x, mask=batch.mask, key=key)
            logits = jnp.where(classes[None], logits, 0.0)
            return local.task_loss(network, logits, batch), state

        start = in_units(payload["model"], 1 / width)  # running statistics of divided inputs
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
