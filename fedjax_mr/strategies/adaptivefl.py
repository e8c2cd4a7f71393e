"""AdaptiveFL: seven nested slices of one network; the server learns which clients can train which slice.

Jia, Hu, Chen, Yang, Xie, Liu, Chen: AdaptiveFL: Adaptive Heterogeneous Federated Learning for Resource-Constrained AIoT
Systems, DAC 2024. L is the whole network. The slices S1, S2, S3 have 0.4 and M1, M2, M3 0.66 of the channels of every
layer, except for their first blocks, which are whole: S1 and M1 have the most whole blocks, S3 and M3 the fewest. In a
round

    each of the K places draws one of the seven slices,
    then each place draws an unused client with probability proportional to min(R, 1/2) / sqrt(T_c),
    a client that cannot hold its slice trains and returns the largest slice inside it that it can hold,
    the server averages each number over the clients that hold it, weighted by samples; other numbers do not change.

T_r [N, 7], starting at 1, records the slices that a client could hold. If a client trains the slice s that it received,
1 is added to all slices from s on, and 3 more to L if s is L. If it reduces s to c, 3 is added to c, and 1, 2, ... is
subtracted from the slices above c, with a minimum of 0. T_c [N, 3] counts the sizes (S, M, L) that were sent and
returned. R of a size is the mean over its slices of the sum of T_r from that slice on, as a share of the total. Clients
are weak, medium or strong (4 : 3 : 3, in this order by their numbers). The capacity of a client, as a share of the
network's parameters, is drawn in every round from the normal distribution of its strength.

Computation here: each client computes the multiply-adds of the whole network, most of them with zeros, so that one
compiled program serves all slices (models/slices.py). The column ``slice_multiply_adds`` is the work of the returned
slices alone, as a share of the work for the whole network. Traffic counts the slices sent and returned. ``cut`` is the
share of clients that reduced their slice. ``individual`` columns are for S1, M1 and L; their mean is the paper's "avg".

Deviations:
* In the released code a client may return any smaller slice, even one that is not inside the received slice (S1 has
  more whole blocks than M3). Here the returned slice is always inside the received one.
* The numbers of whole blocks are those of the released VGG-16, as shares of the network's blocks. In small networks two
  slices may be equal.
* The capacities are the released ones of VGG-16. The released file uses those of ResNet-18, with which every strong
  client holds a whole VGG.
* In the released code slices are tested with the statistics of each test batch. Here they use the clients' running
  statistics, averaged like the parameters.
* ``selection=available`` follows the released scripts: clients are drawn at random from those that can hold the slice,
  and no client reduces its slice. In these scripts a client may be drawn twice.
* In the released code local training has weight decay, and the learning rate decays by 0.2 % in each round. Here weight
  decay is the setting ``weight_decay``, and the learning rate is constant.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.client import local
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.models.slices import Level, floor, slices
from fedjax_mr.settings import field
from fedjax_mr.strategies.heterofl import covered_mean, slices_sent, work
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.strategies.traffic import Traffic

CLASS = np.array([0, 0, 0, 1, 1, 1, 2])  # size of each slice: small, medium, large
LARGEST = np.array([2, 5, 6])  # largest slice of each size
# Capacity of weak, medium and strong clients: mean, standard deviation, minimum, maximum. The released values are in
# millions of parameters, for a VGG-16 with 33.65 million.
STRENGTHS = np.array([[8, 1, 6, 11], [16, 1, 13, 19], [35, 2, 25, 40]]) / 33.65


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of AdaptiveFL."""

    small: float = field(
        0.4, "r_w of S, share of the channels", static=True, low=0, open_low=True, high=1, source="Jia et al. 2024"
    )
    medium: float = field(
        0.66, "r_w of M, share of the channels", static=True, low=0, open_low=True, high=1, source="Jia et al. 2024"
    )
    whole: tuple[float, ...] = field(
        (0.27, 0.4, 0.54),
        "I, shares of the blocks (from the input on, rounded down) that are whole in the three slices of S and of M",
        low=0,
        high=1,
        source="Jia et al. 2024: 4, 6 and 8 of VGG-16's 15",
    )
    weak_share: float = field(0.4, "share of weak clients", static=True, low=0, high=1, source="Jia et al. 2024")
    medium_share: float = field(
        0.3, "share of clients of medium strength; the others are strong", static=True, low=0, high=1,
        source="Jia et al. 2024",
    )  # fmt: skip
    selection: str = field(
        "rl",
        "selection of clients: by the learnt records (rl), or at random among the clients known to hold the slice "
        "(available, as in the authors' scripts)",
        choices=("rl", "available"),
        source="Jia et al. 2024",
    )


class State(NamedTuple):
    """The global model and the records that select the next clients."""

    model: Variables
    drawn: jax.Array  # slice of each place of the next round [K] int32
    records: jax.Array  # T_r [N, 7]
    counts: jax.Array  # T_c [N, 3]


def rewards(records: jax.Array, counts: jax.Array) -> jax.Array:
    """The selection weight of each client for a slice of each size [N, 3]."""
    from_slice = jnp.cumsum(records[:, ::-1], axis=1)[:, ::-1]  # [N, 7]
    of_class = jnp.asarray(CLASS[:, None] == np.arange(3), jnp.float32)
    success = (
        from_slice @ (of_class / jnp.sum(of_class, axis=0, keepdims=True)) / jnp.sum(records, axis=1, keepdims=True)
    )
    return jnp.minimum(success, 0.5) / jnp.sqrt(counts)


def update_records(
    records: jax.Array, counts: jax.Array, sent: jax.Array, returned: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Update the records [7] and counts [3] of ONE client with the slices that it received and returned."""
    slice = jnp.arange(7, dtype=jnp.int32)
    gained = jnp.where(slice >= sent, 1.0, 0.0) + jnp.where((slice == 6) & (sent == 6), 3.0, 0.0)
    above = jnp.maximum(slice - returned, 0).astype(jnp.float32)
    held, reduced = records + gained, jnp.maximum(records + jnp.where(slice == returned, 3.0, 0.0) - above, 0.0)
    sizes = jnp.asarray(CLASS)[jnp.stack([sent, returned])]
    return jnp.where(sent == returned, held, reduced), counts.at[sizes].add(1)


def draw(key: jax.Array, weights: jax.Array) -> jax.Array:
    """Draw a client for each of K places from the weights [K, N], without replacement."""

    def one(free: jax.Array, place: tuple) -> tuple[jax.Array, jax.Array]:
        key, weights = place
        # If no free client has a positive weight, all free clients are equally likely.
        chances = jnp.where(free, jnp.log(jnp.maximum(weights, 1e-12)), -jnp.inf)
        drawn = jax.random.categorical(key, chances).astype(jnp.int32)
        return free.at[drawn].set(False), drawn

    places = jax.random.split(key, weights.shape[0]), weights
    return jax.lax.scan(one, jnp.ones(weights.shape[1], bool), places)[1]


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build AdaptiveFL.

    Raises:
      UserError: the network cannot be sliced, or ``whole`` does not have three entries.
    """
    if len(hyper.whole) != 3:
        raise UserError(
            f"adaptivefl has three slices of S and of M: hyper.whole needs 3 values, not {len(hyper.whole)}"
        )
    network, count = problem.model, problem.num_clients
    nested = [Level(width, whole) for width in (hyper.small, hyper.medium) for whole in sorted(hyper.whole)]
    parts = slices(network, (*nested, Level(1.0)), rounding=floor)
    sizes, params = parts.numbers(), parts.numbers(collections=("params",))
    ends = np.cumsum([round(hyper.weak_share * count), round(hyper.medium_share * count)])
    strength = np.searchsorted(ends, np.arange(count), side="right").astype(np.int32)  # 0, 1 or 2 for each client

    def init(key):
        drawn = jax.random.randint(jax.random.fold_in(key, 1), (problem.cohort_size,), 0, 7)
        return State(network.init(key), drawn, jnp.ones((count, 7)), jnp.ones((count, 3)))

    def select(state, round, key):
        if hyper.selection == "rl":
            weights = rewards(state.records, state.counts)
        else:
            weights = jnp.asarray(strength[:, None] >= np.arange(3), jnp.float32)
        ids = draw(key, weights[:, jnp.asarray(CLASS)[state.drawn]].T)
        return Cohort(ids, problem.sizes[ids])

    def dispatch(state, cohort, key):
        return {"model": jax.vmap(parts.cut, in_axes=(None, 0))(state.model, state.drawn), "level": state.drawn}

    def largest_held(sent, client, key):
        """The slice that a client trains, inside the slice that it received."""
        mean, deviation, least, most = jnp.asarray(STRENGTHS, jnp.float32)[jnp.asarray(strength)[client]]
        capacity = jnp.clip(mean + deviation * jax.random.normal(key), least, most)
        shares = jnp.asarray(params / params[-1], jnp.float32)
        inside = jnp.asarray(parts.within().T)[sent]  # contains at least S3, the smallest slice
        fits = inside & (shares <= capacity)
        cut = jnp.argmax(jnp.where(fits, shares, -1.0)).astype(jnp.int32)
        return jnp.where(shares[sent] <= capacity, sent, jnp.where(jnp.any(fits), cut, 0))

    def client_update(payload, memory, data, round, key):
        level = payload["level"]
        if hyper.selection == "rl":
            level = largest_held(level, data.client_id, jax.random.fold_in(key, 2 * problem.local.most_epochs))
        start = parts.cut(payload["model"], level)
        loss = parts.confine(local.supervised(network), level)
        model, metrics = local.train(network, problem.local, start, data, key, loss=loss)
        return {"model": model, "level": level}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        ids, returned = cohort.ids, uploads["level"]
        held = jax.vmap(parts.masks)(returned)
        model = covered_mean(state.model, uploads["model"], held, weights=cohort.sizes)
        records, counts = jax.vmap(update_records)(state.records[ids], state.counts[ids], state.drawn, returned)
        drawn = jax.random.randint(key, returned.shape, 0, 7)
        new = State(model, drawn, state.records.at[ids].set(records), state.counts.at[ids].set(counts))
        cut = jnp.mean((returned != state.drawn).astype(jnp.float32))
        return new, {"cut": cut, "slice_multiply_adds": work(parts, returned, whole=6)}

    def traffic(usual: Traffic, state: State, uploads: Any, cohort: Cohort, round: jax.Array) -> Traffic:
        return Traffic(slices_sent(sizes, state.drawn), slices_sent(sizes, uploads["level"]))

    def individual_models(state):
        return jax.vmap(parts.cut, in_axes=(None, 0))(state.model, jnp.asarray(LARGEST))

    return averaging(problem)._replace(
        init=init,
        select=select,
        dispatch=dispatch,
        client_update=client_update,
        server_update=server_update,
        individual_models=individual_models,
        traffic=traffic,
    )
