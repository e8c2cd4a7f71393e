"""AdaptiveFL: seven nested slices of one network, sent to clients that the server learns to choose by their strength.

Jia, Hu, Chen, Yang, Xie, Liu, Chen: AdaptiveFL: Adaptive Heterogeneous Federated Learning for Resource-Constrained AIoT
Systems, DAC 2024. Slices S3, S2, S1 have 0.4 and M3, M2, M1 0.66 of the channels of every layer behind their first few
blocks, which are whole: fewest in the third of each. L is the network. In a round

    each of the K places draws one of the seven slices,
    then a client with probability in proportion to min(R, 1/2) / sqrt(T_c), who has no place yet,
    a client that cannot hold its slice cuts it to the largest one inside it that it can, trains and returns that,
    number by number the server takes the mean over the clients that hold it, by their samples; the rest stays.

T_r [N, 7] (from 1) is the record of what a client could hold: one that trains the slice s which it was sent adds 1 to
all from s on, and 3 more to L if that is s; one that cut it to c adds 3 to c and takes 1, 2, ... from those above, not
below 0. T_c [N, 3] counts classes (S, M, L) sent and returned. R of a class is the mean over its slices of the sum of
T_r from there on, as a share of all. Clients are weak, medium or strong (4 : 3 : 3, in this order by their numbers);
how many parameters one holds is drawn in every round from its class's normal distribution, in parts of the network.

What a weak client computes here: the multiply-adds of the whole network, most of them with zeros, so that one compiled
program serves all slices (models/slices.py). ``slice_multiply_adds`` tells what the returned slices take by themselves,
as a share of what the clients would with the whole network; bytes down are those of the slices sent, bytes up those of
the slices returned, ``cut`` is the share of clients that cut. ``individual`` are S1, M1 and L, whose mean is the
paper's "avg".

Deviations. In the released code a client may return any smaller slice, even one of which it was not sent all (S1 has
more whole blocks than M3); here it returns a slice inside the one that it was sent. Which blocks are whole is the
released VGG-16's choice as shares of a network's blocks; in small networks two slices may be equal. Strengths are the
released ones of VGG-16; the released file uses those of ResNet-18, with which every strong client holds a whole VGG.
Slices there are tested with the statistics of each test batch; here with the clients' running ones, averaged like all
else. ``selection=available`` is what the released scripts run: clients at random from those of a class that holds the
slice, nobody cuts; there a client may be drawn twice. Local training there has a rate that falls by 0.2 % in each
round, and --weight_decay.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.engine import local
from fedjax_mr.errors import UserError
from fedjax_mr.models.base import Variables
from fedjax_mr.models.slices import Level, floor, slices
from fedjax_mr.strategies.base import Cohort, Problem, Strategy, Traffic, averaging
from fedjax_mr.strategies.heterofl import covered_mean, slices_sent, work
from fedjax_mr.strategies.hyper import field

CLASS = np.array([0, 0, 0, 1, 1, 1, 2])  # of each slice: small, medium, large
LARGEST = np.array([2, 5, 6])  # slice of each class
# Parameters that a weak, medium and strong client holds: mean, deviation, least, most. Released in millions, for a
# VGG-16 of 33.65.
STRENGTHS = np.array([[8, 1, 6, 11], [16, 1, 13, 19], [35, 2, 25, 40]]) / 33.65


@dataclasses.dataclass(frozen=True)
class Hyper:
    """AdaptiveFL's own settings."""

    small: float = field(
        0.4, "r_w of S, the share of the channels", low=0, open_low=True, high=1, source="Jia et al. 2024"
    )
    medium: float = field(
        0.66, "r_w of M, the share of the channels", low=0, open_low=True, high=1, source="Jia et al. 2024"
    )
    whole: tuple[float, ...] = field(
        (0.27, 0.4, 0.54),
        "I, the shares of the blocks, from the input on and rounded down, that are whole in the slices of S and of M",
        low=0,
        high=1,
        source="Jia et al. 2024: 4, 6 and 8 of VGG-16's 15",
    )
    weak_share: float = field(0.4, "share of the clients that are weak", low=0, high=1, source="Jia et al. 2024")
    medium_share: float = field(
        0.3, "share of the clients that are of medium strength; the others are strong", low=0, high=1,
        source="Jia et al. 2024",
    )  # fmt: skip
    selection: str = field(
        "rl",
        "how clients are chosen: by what the server has learnt of them, or at random from those that hold the slice, "
        "who are known (available, which the authors' scripts run)",
        choices=("rl", "available"),
        source="Jia et al. 2024",
    )


class State(NamedTuple):
    """The global model, and what the choice of the next clients rests on."""

    model: Variables
    drawn: jax.Array  # the slice of each place of the coming round [K] int32
    records: jax.Array  # T_r [N, 7]
    counts: jax.Array  # T_c [N, 3]


def rewards(records: jax.Array, counts: jax.Array) -> jax.Array:
    """The weight of each client for a slice of each class [N, 3]."""
    from_there_on = jnp.cumsum(records[:, ::-1], axis=1)[:, ::-1]  # [N, 7]
    of_class = jnp.asarray(CLASS[:, None] == np.arange(3), jnp.float32)
    success = (
        from_there_on @ (of_class / jnp.sum(of_class, axis=0, keepdims=True)) / jnp.sum(records, axis=1, keepdims=True)
    )
    return jnp.minimum(success, 0.5) / jnp.sqrt(counts)


def recorded(records: jax.Array, counts: jax.Array, sent: jax.Array, back: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tables of ONE client, [7] and [3], after a round in which it was sent a slice and returned one."""
    slice = jnp.arange(7, dtype=jnp.int32)
    gained = jnp.where(slice >= sent, 1.0, 0.0) + jnp.where((slice == 6) & (sent == 6), 3.0, 0.0)
    above = jnp.maximum(slice - back, 0).astype(jnp.float32)
    kept, lost = records + gained, jnp.maximum(records + jnp.where(slice == back, 3.0, 0.0) - above, 0.0)
    classes = jnp.asarray(CLASS)[jnp.stack([sent, back])]
    return jnp.where(sent == back, kept, lost), counts.at[classes].add(1)


def draw(key: jax.Array, weights: jax.Array) -> jax.Array:
    """A client for each of K places, each from its own weights [K, N], nobody twice."""

    def one(free: jax.Array, place: tuple) -> tuple[jax.Array, jax.Array]:
        key, weights = place
        # Without anyone of positive weight left, all who are free are alike.
        chances = jnp.where(free, jnp.log(jnp.maximum(weights, 1e-12)), -jnp.inf)
        chosen = jax.random.categorical(key, chances).astype(jnp.int32)
        return free.at[chosen].set(False), chosen

    places = jax.random.split(key, weights.shape[0]), weights
    return jax.lax.scan(one, jnp.ones(weights.shape[1], bool), places)[1]


def build(hyper: Hyper, problem: Problem) -> Strategy:
    """Build AdaptiveFL.

    Raises:
      UserError: a network that cannot be narrowed, or not three shares of whole blocks.
    """
    if len(hyper.whole) != 3:
        raise UserError(f"adaptivefl has three slices of S and M: --adaptivefl_whole 3 times, not {len(hyper.whole)}")
    network, count = problem.model, problem.num_clients
    nested = [Level(width, whole) for width in (hyper.small, hyper.medium) for whole in sorted(hyper.whole)]
    parts = slices(network, (*nested, Level(1.0)), rounding=floor)
    sizes, params = parts.numbers(), parts.numbers(collections=("params",))
    ends = np.cumsum([round(hyper.weak_share * count), round(hyper.medium_share * count)])
    strength = np.searchsorted(ends, np.arange(count), side="right").astype(np.int32)  # of each client: 0, 1, 2

    def init(key):
        drawn = jax.random.randint(jax.random.fold_in(key, 1), (problem.cohort_size,), 0, 7)
        return State(network.init(key), drawn, jnp.ones((count, 7)), jnp.ones((count, 3)))

    def select(state, key):
        if hyper.selection == "rl":
            weights = rewards(state.records, state.counts)
        else:
            weights = jnp.asarray(strength[:, None] >= np.arange(3), jnp.float32)
        ids = draw(key, weights[:, jnp.asarray(CLASS)[state.drawn]].T)
        return Cohort(ids, problem.sizes[ids])

    def dispatch(state, cohort, key):
        return {"model": jax.vmap(parts.cut, in_axes=(None, 0))(state.model, state.drawn), "level": state.drawn}

    def largest_held(sent, client, key):
        """The slice that a client trains of the one that it was sent."""
        mean, deviation, least, most = jnp.asarray(STRENGTHS, jnp.float32)[jnp.asarray(strength)[client]]
        room = jnp.clip(mean + deviation * jax.random.normal(key), least, most)
        shares = jnp.asarray(params / params[-1], jnp.float32)
        inside = jnp.asarray(parts.within().T)[sent]  # the smallest, S3, always
        cut = jnp.argmax(jnp.where(inside & (shares <= room), shares, -1.0)).astype(jnp.int32)
        return jnp.where(shares[sent] <= room, sent, jnp.where(jnp.any(inside & (shares <= room)), cut, 0))

    def client_update(payload, memory, data, round, key):
        level = payload["level"]
        if hyper.selection == "rl":
            level = largest_held(level, data.client_id, jax.random.fold_in(key, 2 * problem.local.epochs))
        start = parts.cut(payload["model"], level)
        loss = parts.confine(local.cross_entropy(network), level)
        model, metrics = local.train(network, problem.local, start, data, key, loss=loss)
        return {"model": model, "level": level}, memory, metrics

    def server_update(state, uploads, cohort, round, key):
        ids, back = cohort.ids, uploads["level"]
        held = jax.vmap(parts.masks)(back)
        model = covered_mean(state.model, uploads["model"], held, weights=cohort.sizes)
        records, counts = jax.vmap(recorded)(state.records[ids], state.counts[ids], state.drawn, back)
        drawn = jax.random.randint(key, back.shape, 0, 7)
        new = State(model, drawn, state.records.at[ids].set(records), state.counts.at[ids].set(counts))
        cut = jnp.mean((back != state.drawn).astype(jnp.float32))
        return new, {"cut": cut, "slice_multiply_adds": work(parts, back, whole=6)}

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
