"""Parts that strategies are made of: two skeletons (`averaging`, `circulating`), and what their members have in common.

A method takes a skeleton and replaces the members in which its paper differs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import Metrics
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.errors import UserError
from fedjax_mr.models import Model, Variables
from fedjax_mr.strategies.interface import (
    ClientUpdate,
    Cohort,
    Dispatch,
    Memory,
    Payload,
    Problem,
    State,
    Strategy,
    View,
    view,
)
from fedjax_mr.strategies.traffic import Parcels, Traffic


class GlobalModel(NamedTuple):
    """State of a server that keeps only the global model."""

    model: Variables


Train = Callable[[Variables, ClientData, jax.Array], tuple[Variables, Metrics]]
"""(received variables, data, key) -> (trained variables, metrics), of ONE client."""


def averaging(problem: Problem, *, train: Train | None = None, weights: str = "samples") -> Strategy:
    """FedAvg: clients train the global model, and the server averages their models.

    McMahan et al., AISTATS 2017, Algorithm 1. Other methods replace members with ``_replace``. All members but ``init``
    work with any state that has a field ``model``.

    Args:
      problem: the federation.
      train: the training of one client. Defaults to `local.train`.
      weights: weights of the clients in the mean, ``samples`` (n_i) or ``uniform``.
    """

    def init(key):
        return GlobalModel(problem.model.init(key))

    def server_update(state, uploads, cohort, round, key):
        mean = trees.mean(uploads["model"], weights=cohort.sizes if weights == "samples" else None)
        return state._replace(model=mean), {}

    return Strategy(
        init,
        to_all(problem, "model"),
        plain_training(problem, train=train),
        server_update,
        global_model=lambda state: state.model,
        models=view("model"),
    )


class Models(NamedTuple):
    """State of a server that keeps only its stacked models [K, ...], or [M, ...] with asynchronous clients."""

    models: Variables


def circulating(problem: Problem, *, start: Callable[[Problem, jax.Array], Variables] | None = None) -> Strategy:
    """K models that circulate among clients: model j is trained by the j-th client of each cohort.

    The server stores the uploaded models unchanged and deploys their uniform mean. Other methods replace
    ``server_update`` to combine the models. All members but ``init`` work with any state that has a field ``models``.

    With asynchronous clients, M models circulate, and the K that have returned are stored.

    Args:
      problem: the federation.
      start: (problem, key) -> the initial models. Defaults to `copies_of_one`.
    """

    def init(key):
        return Models((start or copies_of_one)(problem, key))

    def dispatch(state, cohort, key):
        return {"model": state.models if cohort.branches is None else trees.take(state.models, cohort.branches)}

    def server_update(state, uploads, cohort, round, key):
        return state._replace(models=returned(state.models, uploads["model"], cohort)), {}

    return Strategy(
        init,
        dispatch,
        plain_training(problem),
        server_update,
        global_model=lambda state: problem.model.mean(state.models),
        models=view("models", stacked=True),
        stale="branches",
    )


def returned(models: Variables, new: Variables, cohort: Cohort) -> Variables:
    """The circulating models [M, ...] after those of the cohort have become ``new`` [K, ...]."""
    if cohort.branches is None:
        return new
    return jax.tree.map(lambda leaf, new: leaf.at[cohort.branches].set(new), models, new)


def freshness(cohort: Cohort) -> jax.Array:
    """The weights of the uploads by their staleness [K]; 1 in synchronous rounds."""
    return jnp.ones(cohort.ids.shape) if cohort.freshness is None else cohort.freshness


def to_all(problem: Problem, *names: str) -> Dispatch:
    """A dispatch that sends the named fields of the state to every client of the round."""
    return lambda state, cohort, key: trees.broadcast(
        {name: getattr(state, name) for name in names}, problem.cohort_size
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PlainTraining:
    """The client update of FedAvg: train the received model and upload it. Clients keep no memory.

    Attributes:
      problem: the federation.
      train: the training of one client. None: `local.train`, and an addition may replace it (`transforms`).
    """

    problem: Problem
    train: Train | None = None

    def __call__(
        self, payload: Payload, memory: Memory, data: ClientData, round: jax.Array, key: jax.Array
    ) -> tuple[Payload, Memory, Metrics]:
        if self.train is not None:
            model, metrics = self.train(payload["model"], data, key)
        else:
            model, metrics = local.train(self.problem.model, self.problem.local, payload["model"], data, key)
        return {"model": model}, memory, metrics


def plain_training(problem: Problem, *, train: Train | None = None) -> ClientUpdate:
    """The client update of FedAvg, see `PlainTraining`."""
    return PlainTraining(problem, train)


def step_towards(old: Variables, mean: Variables, rate: jax.Array | float) -> Variables:
    """The server step old + rate (mean - old). Statistics are those of ``mean``: they are never extrapolated."""
    step = trees.scale(trees.subtract(mean["params"], old["params"]), rate)
    return mean | {"params": trees.add(old["params"], step)}


def nothing(state: State, client_id: jax.Array) -> tuple:
    """The personal part of a client whose personal model needs nothing from the server."""
    return ()


def kept_model(part: Any, /, memory: Memory, data: ClientData, key: jax.Array) -> Variables:
    """The personal model of a client that stores it in its memory as ``model``."""
    return memory.model


class LastModel(NamedTuple):
    """Memory of one client: its model after its last training."""

    model: Variables
    trained: jax.Array  # bool; until it is True, ``model`` has not been trained


def untrained(problem: Problem) -> LastModel:
    """The memory of a client that has not trained: a model of zeros."""
    return LastModel(trees.zeros_like(problem.model.shapes()), jnp.zeros((), bool))


def zero_params(problem: Problem) -> trees.Params:
    """Zeros like the parameters."""
    return trees.zeros_like(problem.model.shapes()["params"])


def public_samples(problem: Problem, method: str, *, labelled: bool = False) -> Samples:
    """The public samples of a method that cannot work without them.

    Raises:
      UserError: the server has no public samples, or they have no labels and ``labelled`` is set.
    """
    public = problem.public
    if public is None or (labelled and public.y is None):
        raise UserError(f"{method} needs {'labelled ' if labelled else ''}public data: pass public_share=0.1")
    return public


def no_targets(network: Model, count: int) -> jax.Array:
    """Zeros in place of the targets [P, ...] of unlabelled samples, which no loss reads."""
    return jnp.zeros((count, *network.task.target_shape(network.input_shape)), network.task.dtype)


def require_epochs(problem: Problem, method: str) -> None:
    """Refuse ``local_steps`` for a method whose algorithm counts epochs.

    Raises:
      UserError: the clients train a number of steps in place of epochs.
    """
    if problem.local.steps is not None:
        raise UserError(f"{method} counts epochs: leave out local_steps=, and set local_epochs=")


def participation(problem: Problem, cohort: Cohort) -> jax.Array:
    """The share of the N clients that upload in a round: K / N, less late clients, which have 0 samples."""
    return jnp.mean((cohort.sizes > 0).astype(jnp.float32)) * (problem.cohort_size / problem.num_present)


def kept_for_validation(problem: Problem) -> jax.Array:
    """The number of validation samples of each client [N]."""
    none = jnp.zeros_like(problem.sizes)
    return none if problem.validation_sizes is None else problem.validation_sizes


def own_starts(problem: Problem, key: jax.Array) -> Variables:
    """Initialise the network of each client [N, ...]; consumes ``key``."""
    clients = jnp.arange(problem.num_clients, dtype=jnp.int32)
    return jax.vmap(lambda client_id: own_start(problem, key, client_id))(clients)


def own_start(problem: Problem, key: jax.Array, client_id: jax.Array) -> Variables:
    """Initialise the network of one client; consumes ``key`` together with ``client_id``."""
    return problem.model.init(jax.random.fold_in(key, client_id), problem.architectures[client_id])


def models_sent(problem: Problem, models: Variables) -> tuple[Parcels, ...]:
    """Parcels of stacked models [R, ...]: one entry per network of the zoo, which counts the models of that network."""
    rows = jax.tree.leaves(models)[0].shape[0]
    sizes = problem.model.num_bytes()
    numbers = jnp.broadcast_to(problem.model.architecture(models), (rows,))
    counts = jnp.bincount(numbers, length=len(sizes))
    return tuple(Parcels.of(counts[number], size) for number, size in enumerate(sizes))


def copies_of_one(problem: Problem, key: jax.Array) -> Variables:
    """Stack K copies of one initialisation, M with asynchronous clients; consumes ``key``."""
    return trees.broadcast(problem.model.init(key), problem.num_branches)


def independent_starts(problem: Problem, key: jax.Array) -> Variables:
    """Stack K independent initialisations, M with asynchronous clients; consumes ``key``."""
    return jax.vmap(problem.model.init)(jax.random.split(key, problem.num_branches))


STARTS = {"copies": copies_of_one, "independent": independent_starts}
"""The initial models of methods with K models, by the value of their setting ``start``."""


def unit_permutations(key: jax.Array, num_units: int, count: int) -> jax.Array:
    """Draw an independent uniform permutation of 0..count-1 for each unit [num_units, count]; consumes ``key``."""
    rows = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (num_units, count))
    return jax.random.permutation(key, rows, axis=1, independent=True)


# --- The clients of a round -------------------------------------------------------------------------------------------

MOST_RANKED = 100_000  # with more clients, a cohort is drawn without a random word for each client


def select_uniformly(problem: Problem, key: jax.Array) -> Cohort:
    """Select K of the N clients uniformly without replacement, in random order; consumes ``key``.

    Absent clients are skipped: the others come in the order that they would have if all were present.
    """
    if problem.present is None and problem.num_clients > MOST_RANKED and 8 * problem.cohort_size <= problem.num_clients:
        ids = different_numbers(key, problem.num_clients, problem.cohort_size)
        return Cohort(ids, problem.sizes[ids])
    # Take the K largest of N random words. On CPU, top_k avoids a full sort only for floats (the sort takes 200 ms for
    # 100,000 words). So a first top_k runs on floats, with a few more than K candidates because floats are coarser.
    words, count = jax.random.bits(key, (problem.num_clients,)), problem.cohort_size
    ranked = words.astype(jnp.float32)
    if problem.present is not None:
        words, ranked = jnp.where(problem.present, words, 0), jnp.where(problem.present, ranked, -1.0)
    _, near = jax.lax.top_k(ranked, min(problem.num_clients, count + 8))
    ids = near[jax.lax.top_k(words[near], count)[1]]
    return Cohort(ids, problem.sizes[ids])


def different_numbers(key: jax.Array, high: int, count: int) -> jax.Array:
    """Draw ``count`` of the numbers 0..high-1 without replacement, in random order [count]; consumes ``key``.

    The time does not depend on ``high``, which must be at least eight times ``count``.
    """
    # The first ``count`` different numbers of independent draws are such a sample. 2 * count draws almost always hold
    # them; otherwise all are drawn again, which prefers no number.

    def draw(carry: tuple) -> tuple:
        key, draw_key = jax.random.split(carry[0])
        numbers = jax.random.randint(draw_key, (2 * count,), 0, high)
        order = jnp.argsort(numbers, stable=True)
        ascending = numbers[order]
        repeated = jnp.concatenate([jnp.zeros(1, bool), ascending[1:] == ascending[:-1]])[jnp.argsort(order)]
        first = jnp.argsort(repeated, stable=True)[:count]
        return key, numbers[first], jnp.sum(~repeated) >= count

    start = (key, jnp.zeros(count, jnp.int32), jnp.zeros((), bool))
    return jax.lax.while_loop(lambda carry: ~carry[2], draw, start)[1]


# --- A strategy inside a strategy -------------------------------------------------------------------------------------


def lifted(inner: Strategy) -> Strategy:
    """A strategy whose state has the state of ``inner`` in its field ``inner``, for transforms that keep a state, too.

    All members but ``init``, which the transform replaces, work on that field as those of ``inner``.
    """
    models = inner.models

    def reads(member: Callable | None) -> Any:
        return member and (lambda state, *rest: member(state.inner, *rest))

    def updates(member: Callable | None) -> Any:
        """Of a member that returns the new state and more."""

        def update(state: State, *rest: Any) -> tuple:
            assert member is not None
            new, *more = member(state.inner, *rest)
            return state._replace(inner=new), *more

        return member and update

    def traffic(usual: Traffic, state: State, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic:
        assert inner.traffic is not None
        return inner.traffic(usual, state.inner, uploads, cohort, round)

    return inner._replace(
        dispatch=reads(inner.dispatch),
        server_update=updates(inner.server_update),
        receive=updates(inner.receive),
        global_model=reads(inner.global_model),
        individual_models=reads(inner.individual_models),
        select=reads(inner.select),
        between_rounds=updates(inner.between_rounds),
        traffic=traffic if inner.traffic is not None else None,
        personal_model=inner.personal_model if inner.personal_part else reads(inner.personal_model),
        personal_part=reads(inner.personal_part),
        models=models
        and View(
            lambda state: models.get(state.inner),
            lambda state, new: state._replace(inner=models.set(state.inner, new)),
            models.stacked,
        ),
    )
