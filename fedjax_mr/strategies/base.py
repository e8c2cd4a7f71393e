"""The interface of a strategy: one NamedTuple of pure functions.

A strategy's state holds what its algorithm names and nothing else; counters, diaries and seconds are information, which
the functions return beside it. ``build(hyper, problem)`` is called anew inside every compiled program and for every
question about shapes (some sixteen times for two rounds of FedAvg), so it defines functions and computes nothing.

Letters used in every docstring: N clients, K clients of a round (the cohort), B batch, S local steps, C classes,
D devices. A model's state is the dictionary of all its Flax collections (`Variables`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.engine import local
from fedjax_mr.engine.local import ClientData, LocalSetting, Metrics, Samples
from fedjax_mr.models import Layer, Model, Variables

State = Any
Memory = Any
Payload = dict[str, Any]
"""Named objects on the way; the key ``model`` holds the network. Traffic is counted from these."""
Info = dict[str, Any]
"""A strategy's report of a round, by name, beside its state: scalars become columns of the metrics."""


class Cohort(NamedTuple):
    """The clients of a round, in the strategy's own order (in FedMR row j trains model j)."""

    ids: jax.Array  # [K] int32 in 0..N-1
    sizes: jax.Array  # [K] int32 training samples


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """The facts of a federation that a strategy may use; they do not change during a run.

    The arrays reach compiled code as arguments (this dataclass is a pytree), the other fields are static.

    Attributes:
      model: the network as pure functions; a `Zoo` where clients have different ones.
      local: epochs, batch size and optimiser of the clients.
      num_clients: N.
      cohort_size: K.
      num_classes: C.
      layers: the model's layers in forward order.
      sizes: training samples per client [N].
      label_counts: training samples per client and class [N, C].
      architectures: which network of the zoo each client starts with [N] int32; zeros without a zoo.
      public: the samples that the server holds, y None if they have no labels; None if there are none.
      validation_sizes: samples per client that it keeps for validation [N]; None: no client keeps any.
    """

    model: Model = dataclasses.field(metadata={"static": True})
    local: LocalSetting = dataclasses.field(metadata={"static": True})
    num_clients: int = dataclasses.field(metadata={"static": True})
    cohort_size: int = dataclasses.field(metadata={"static": True})
    num_classes: int = dataclasses.field(metadata={"static": True})
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    sizes: jax.Array
    label_counts: jax.Array
    architectures: jax.Array
    public: Samples | None = None
    validation_sizes: jax.Array | None = None


class Init(Protocol):
    """Return the server state (a NamedTuple of arrays) before the first round."""

    def __call__(self, key: jax.Array) -> State: ...


class InitMemory(Protocol):
    """Return what the clients keep between rounds: leaves [N, ...]."""

    def __call__(self, key: jax.Array) -> Memory: ...


class Select(Protocol):
    """Return the cohort of a round."""

    def __call__(self, state: State, key: jax.Array) -> Cohort: ...


class Dispatch(Protocol):
    """Return what each client of the cohort receives: leaves [K, ...]."""

    def __call__(self, state: State, cohort: Cohort, key: jax.Array) -> Payload: ...


class ClientUpdate(Protocol):
    """Train ONE client (no leading axis; the engine batches it): -> (upload, memory, metrics)."""

    def __call__(
        self, payload: Payload, memory: Memory, data: ClientData, round: jax.Array, key: jax.Array
    ) -> tuple[Payload, Memory, Metrics]: ...


class ServerUpdate(Protocol):
    """Fold the uploads [K, ...] into the state: -> (state, info)."""

    def __call__(
        self, state: State, uploads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Info]: ...


class BetweenRounds(Protocol):
    """Change the state between two rounds, on the host: -> (state, info); info may hold arrays, which the run keeps.

    ``client(i)`` is the data of client i, on the host, for what a simulation computes in the place of a client.
    """

    def __call__(
        self, state: State, round: int, key: jax.Array, client: Callable[[int], ClientData]
    ) -> tuple[State, Info]: ...


class CountTraffic(Protocol):
    """Return what travels in a round; ``usual`` is the payload and the upload of each of the K clients.

    ``state`` is the server's before the round.
    """

    def __call__(
        self, usual: "Traffic", state: State, uploads: Payload, cohort: Cohort, round: jax.Array
    ) -> "Traffic": ...


class PersonalPart(Protocol):
    """Return what the server gives ONE client for the client's own model."""

    def __call__(self, state: State, client_id: jax.Array) -> Any: ...


class PersonalModel(Protocol):
    """Return ONE client's own model; ``memory`` is the client's own row, ``part`` what the server gives it."""

    def __call__(self, part: Any, /, memory: Memory, data: ClientData, key: jax.Array) -> Variables: ...


class View(NamedTuple):
    """Where a server's state holds its model, or several stacked ones."""

    get: Callable[[State], Variables]
    set: Callable[[State, Variables], State]
    stacked: bool = False
    """Whether there are several, leaves [K, ...]."""


def view(name: str, *, stacked: bool = False) -> View:
    """The view of a field of the state."""
    return View(lambda state: getattr(state, name), lambda state, models: state._replace(**{name: models}), stacked)


class LayerExchange(NamedTuple):
    """An exchange of layers among the K clients of a round, in which the server has no part.

    The engine simulates it between the server and the clients; on real clients it is real.
    """

    mix: Callable[[Payload, jax.Array], tuple[Payload, Info]]
    """(payloads or uploads [K, ...], key) -> the same with the layers of ``model`` exchanged, and the round's info."""
    when: str
    """``before_upload``, ``before_training`` or ``both``."""
    share: float
    """The probability with which a client sends a layer."""
    repetitions: int
    """Exchanges each time."""

    @property
    def before_training(self) -> bool:
        """Whether the clients exchange layers of what they receive."""
        return self.when != "before_upload"

    @property
    def before_upload(self) -> bool:
        """Whether the clients exchange layers of what they send."""
        return self.when != "before_training"


class Strategy(NamedTuple):
    """A federated method as pure functions; the four without a default are enough for a new one."""

    init: Init
    dispatch: Dispatch
    client_update: ClientUpdate
    server_update: ServerUpdate
    global_model: Callable[[State], Variables] | None = None
    """The variables that are deployed and tested."""
    individual_models: Callable[[State], Variables] | None = None
    """K stacked models that are tested one by one beside the deployed one."""
    select: Select | None = None
    """Default: K clients uniformly without replacement, in random order."""
    init_memory: InitMemory | None = None
    """Default: clients keep nothing."""
    between_rounds: BetweenRounds | None = None
    """Host code between two rounds; its presence makes one round per compiled call."""
    traffic: CountTraffic | None = None
    """Default: the payloads and the uploads of the K clients."""
    personal_model: PersonalModel | None = None
    """A client's own model, tested on its own samples."""
    personal_part: PersonalPart | None = None
    """What `personal_model` gets from the server; default: the whole state, right where this is the model of all."""
    exchange: LayerExchange | None = None
    """Layers that the clients exchange among themselves; default: none."""
    models: View | None = None
    """The server's model or models, which an optimizer on the server may move; default: none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcels:
    """Objects of one size on their way.

    Attributes:
      count: how many travel in a round, int32; the engine adds up the rounds.
      size: bytes of each; static, so that no sum of bytes is limited by an integer type of the device.
    """

    count: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, count: jax.Array | int, size: int) -> "Parcels":
        """Return ``count`` objects of ``size`` bytes."""
        return cls(jnp.asarray(count, jnp.int32), int(size))


class Traffic(NamedTuple):
    """All that travels in a round, or in several."""

    down: tuple[Parcels, ...] = ()  # server to clients
    up: tuple[Parcels, ...] = ()  # clients to server
    peer: tuple[Parcels, ...] = ()  # from client to client

    def num_bytes(self) -> tuple[int, int, int]:
        """Return the bytes down, up and from client to client, on the host."""
        down, up, peer = (sum(int(parcels.count) * parcels.size for parcels in each) for each in self)
        return down, up, peer


def select_uniformly(problem: Problem, key: jax.Array) -> Cohort:
    """Return K of the N clients, uniformly without replacement and in random order; consumes ``key``."""
    # The K largest of N random words. On CPU only floats are spared a sort of all N (200 ms of 100,000), so the words'
    # order is first taken in floats, with a few more than K because these are coarser.
    words, count = jax.random.bits(key, (problem.num_clients,)), problem.cohort_size
    _, near = jax.lax.top_k(words.astype(jnp.float32), min(problem.num_clients, count + 8))
    ids = near[jax.lax.top_k(words[near], count)[1]]
    return Cohort(ids, problem.sizes[ids])


def usual_traffic(payloads: Payload, uploads: Payload) -> Traffic:
    """Return the payloads and uploads [K, ...] of a round, from arrays or from their shapes."""

    def rows(tree: Payload) -> tuple[Parcels, ...]:
        leaves = jax.tree.leaves(tree)
        return (Parcels.of(leaves[0].shape[0], trees.num_bytes(tree) // leaves[0].shape[0]),) if leaves else ()

    return Traffic(rows(payloads), rows(uploads))


class GlobalModel(NamedTuple):
    """The state of a server that keeps the global model alone."""

    model: Variables


Train = Callable[[Variables, ClientData, jax.Array], tuple[Variables, Metrics]]
"""(received variables, data, key) -> (trained variables, metrics), of ONE client."""


def averaging(problem: Problem, *, train: Train | None = None, weights: str = "samples") -> Strategy:
    """FedAvg: the clients train the global model, and the server takes the mean of theirs.

    McMahan et al., AISTATS 2017, Algorithm 1. Other methods replace members of it by ``_replace``. All but ``init``
    also do for a state with a field ``model`` and others beside it.

    Args:
      problem: the federation.
      train: how a client trains; defaults to `local.train`.
      weights: of the clients in the mean, their numbers of samples (``samples``) or all equal (``uniform``).
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


def to_all(problem: Problem, *names: str) -> Dispatch:
    """A dispatch that sends these fields of the state to every client of the round."""
    return lambda state, cohort, key: trees.broadcast(
        {name: getattr(state, name) for name in names}, problem.cohort_size
    )


def plain_training(problem: Problem, *, train: Train | None = None) -> ClientUpdate:
    """The client update of FedAvg: train the received model and send it back; nothing is kept."""
    train = train or (lambda received, data, key: local.train(problem.model, problem.local, received, data, key))

    def client_update(payload, memory, data, round, key):
        model, metrics = train(payload["model"], data, key)
        return {"model": model}, memory, metrics

    return client_update


def nothing(state: State, client_id: jax.Array) -> tuple:
    """The personal part where a client's own model needs nothing from the server."""
    return ()


def kept_for_validation(problem: Problem) -> jax.Array:
    """Return how many samples each client keeps for validation [N]."""
    none = jnp.zeros_like(problem.sizes)
    return none if problem.validation_sizes is None else problem.validation_sizes


def own_starts(problem: Problem, key: jax.Array) -> Variables:
    """Return each client's own network, freshly initialised, leaves [N, ...]; consumes ``key``."""
    return jax.vmap(problem.model.init)(jax.random.split(key, problem.num_clients), problem.architectures)


def models_sent(problem: Problem, models: Variables) -> tuple[Parcels, ...]:
    """Return the stacked models [R, ...] as parcels: of each network as many as are of it."""
    rows = jax.tree.leaves(models)[0].shape[0]
    sizes = problem.model.num_bytes()
    numbers = jnp.broadcast_to(problem.model.architecture(models), (rows,))
    counts = jnp.bincount(numbers, length=len(sizes))
    return tuple(Parcels.of(counts[number], size) for number, size in enumerate(sizes))


def copies_of_one(problem: Problem, key: jax.Array) -> Variables:
    """Return K copies of one initialisation, stacked; consumes ``key``."""
    return trees.broadcast(problem.model.init(key), problem.cohort_size)


def independent_starts(problem: Problem, key: jax.Array) -> Variables:
    """Return K independent initialisations, stacked; consumes ``key``."""
    return jax.vmap(problem.model.init)(jax.random.split(key, problem.cohort_size))


def unit_permutations(key: jax.Array, num_units: int, count: int) -> jax.Array:
    """Return one uniform permutation of 0..count-1 per unit [num_units, count], independent; consumes ``key``."""
    rows = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (num_units, count))
    return jax.random.permutation(key, rows, axis=1, independent=True)
