"""The interface of a strategy: one NamedTuple of pure functions.

Letters used in every docstring: N clients, K clients per round (the cohort), B samples per batch, S local steps,
C classes, D devices. A model's `Variables` are the dictionary of all its Flax collections.

The state of the server holds the quantities that the algorithm's box names, and nothing else. Counters, logs and
timings are information (`Info`), which functions return beside the state.

``build(hyper, problem)`` is called inside every compiled program and for every shape evaluation (about sixteen times in
two rounds of FedAvg). It must only define functions and must not compute anything.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.local import LocalSetting, Metrics
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.errors import UserError
from fedjax_mr.models import Layer, Model, Variables

MOST_RANKED = 100_000  # with more clients, a cohort is drawn without a random word for each client

State = Any
Memory = Any
Payload = dict[str, Any]
"""Named objects sent between server and clients; the key ``model`` holds the network. Traffic is counted from these."""
Info = dict[str, Any]
"""A strategy's report of one round, by name. Scalars become columns of the metrics."""


class Cohort(NamedTuple):
    """The clients of a round, in an order that the strategy chooses (in FedMR, client j trains model j)."""

    ids: jax.Array  # [K] int32 in 0..N-1
    sizes: jax.Array  # [K] int32 training samples
    branches: jax.Array | None = None  # [K] int32 in 0..M-1, see `Strategy.stale`. None: client j has model j
    freshness: jax.Array | None = None  # [K] float32, weight of an upload by its staleness. None: 1
    work: jax.Array | None = None  # [K] float32, share of its steps that a client has done. None: 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of a federation that a strategy may use. They are constant during a run.

    This dataclass is a pytree: arrays, the frozen variables of ``model`` and the numbers of ``local`` are arguments of
    the compiled program, the other fields are static.

    Attributes:
      model: the network as pure functions; a `Zoo` if clients have different networks.
      local: epochs, batch size and optimizer of the clients.
      num_clients: N.
      cohort_size: K.
      num_classes: C.
      layers: the model's layers in forward order; empty for a `Zoo`.
      sizes: training samples per client [N].
      label_counts: training samples per client and class [N, C].
      architectures: index of each client's initial network in the zoo [N] int32; zeros without a zoo.
      public: public samples held by the server, or None. ``y`` is None if they are unlabelled.
      validation_sizes: validation samples per client [N], or None if no client has any.
      samples_on_device: whether the samples of all clients are on the devices; otherwise a client sees its own alone.
      in_flight: M, asynchronous clients that train at the same time. None: rounds are synchronous.
    """

    model: Model
    local: LocalSetting
    num_clients: int = dataclasses.field(metadata={"static": True})
    cohort_size: int = dataclasses.field(metadata={"static": True})
    num_classes: int = dataclasses.field(metadata={"static": True})
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    sizes: jax.Array
    label_counts: jax.Array
    architectures: jax.Array
    public: Samples | None = None
    validation_sizes: jax.Array | None = None
    samples_on_device: bool = dataclasses.field(default=True, metadata={"static": True})
    in_flight: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def num_branches(self) -> int:
        """M, models that clients train at the same time."""
        return self.in_flight or self.cohort_size

    def in_round(self, round: jax.Array) -> "Problem":
        """The problem with the learning rate of a round."""
        return dataclasses.replace(self, local=self.local.in_round(round))


class Init(Protocol):
    """Initialise the server's state (a NamedTuple of arrays)."""

    def __call__(self, key: jax.Array) -> State: ...


class InitMemory(Protocol):
    """Initialise the memory that ONE client keeps between rounds (no leading axis; the engine batches the function).

    All clients receive the same ``key``. A client that needs random numbers of its own folds in its number.
    """

    def __call__(self, key: jax.Array, client_id: jax.Array) -> Memory: ...


class Select(Protocol):
    """Select the cohort of a round."""

    def __call__(self, state: State, key: jax.Array) -> Cohort: ...


class Dispatch(Protocol):
    """The payload for each client of the cohort: leaves [K, ...]."""

    def __call__(self, state: State, cohort: Cohort, key: jax.Array) -> Payload: ...


class ClientUpdate(Protocol):
    """Train ONE client (no leading axis; the engine batches the function): -> (upload, memory, metrics).

    It contains the loss, and all that a method adds to it. To replace it in an existing method removes the method's own
    term without an error: with a plain training, FedProx is FedAvg. See docs/recipes/own_loss.md.
    """

    def __call__(
        self, payload: Payload, memory: Memory, data: ClientData, round: jax.Array, key: jax.Array
    ) -> tuple[Payload, Memory, Metrics]: ...


class ServerUpdate(Protocol):
    """Update the state from the uploads [K, ...]: -> (state, info)."""

    def __call__(
        self, state: State, uploads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Info]: ...


class Receive(Protocol):
    """What the server does with the messages [K, ...] before `ServerUpdate`: -> (state, uploads [K, ...], info).

    ``payloads`` are what the clients received in this round. `channel.channel` makes this member.
    """

    def __call__(
        self, state: State, messages: Payload, payloads: Payload, cohort: Cohort, round: jax.Array, key: jax.Array
    ) -> tuple[State, Payload, Info]: ...


class History(NamedTuple):
    """The facts by which a server may choose clients for new jobs. The busy clients are passed beside it."""

    time: float  # seconds since the start of the run
    branches: np.ndarray  # [R] branches that wait for a client
    versions: np.ndarray  # [M] finished jobs of each branch
    starts: np.ndarray  # [N] jobs of each client that have started
    seconds: np.ndarray  # [N] mean duration of each client's finished jobs; 0 without any
    returned: np.ndarray  # clients that have just returned


class Choose(Protocol):
    """Choose idle clients for new jobs, on the host and before the training: -> clients [R], different from each other.

    ``busy`` [N]: clients that may not be chosen.
    """

    def __call__(self, history: History, busy: np.ndarray, key: jax.Array) -> np.ndarray: ...


class BetweenRounds(Protocol):
    """Update the state between two rounds, on the host: -> (state, info). Arrays in info are stored in the run folder.

    ``client(i)`` is the data of client i, in host memory. A simulation needs it if it computes something on the server
    that real clients would compute.
    """

    def __call__(
        self, state: State, round: int, key: jax.Array, client: Callable[[int], ClientData]
    ) -> tuple[State, Info]: ...


class CountTraffic(Protocol):
    """The traffic of a round. ``usual`` counts one payload and one upload for each of the K clients.

    ``state`` is the state of the server before the round.
    """

    def __call__(
        self, usual: "Traffic", state: State, uploads: Payload, cohort: Cohort, round: jax.Array
    ) -> "Traffic": ...


class PersonalPart(Protocol):
    """The part of the state that ONE client needs for its personal model."""

    def __call__(self, state: State, client_id: jax.Array) -> Any: ...


class PersonalModel(Protocol):
    """The personal model of ONE client, from its memory and its `PersonalPart`."""

    def __call__(self, part: Any, /, memory: Memory, data: ClientData, key: jax.Array) -> Variables: ...


class View(NamedTuple):
    """Access to the model, or to several stacked models, in a server's state."""

    get: Callable[[State], Variables]
    set: Callable[[State, Variables], State]
    stacked: bool = False
    """Whether there are several models, leaves [K, ...]."""


def view(name: str, *, stacked: bool = False) -> View:
    """A view of one field of the state."""
    return View(lambda state: getattr(state, name), lambda state, models: state._replace(**{name: models}), stacked)


class LayerExchange(NamedTuple):
    """An exchange of layers among the K clients of a round, without the server.

    In a simulation the engine performs it. Real clients send each other encrypted messages.
    """

    mix: Callable[[Payload, jax.Array], tuple[Payload, Info]]
    """(payloads or uploads [K, ...], key) -> (the same with the layers of ``model`` exchanged, info)."""
    when: str
    """``before_upload``, ``before_training`` or ``both``."""
    share: float
    """Probability that a client sends a given layer."""
    repetitions: int
    """Number of exchanges in a row."""

    @property
    def before_training(self) -> bool:
        """Whether the clients exchange layers of the models that they receive."""
        return self.when != "before_upload"

    @property
    def before_upload(self) -> bool:
        """Whether the clients exchange layers of the models that they send."""
        return self.when != "before_training"

    def parcels(self, models: Variables) -> "Parcels":
        """Each selected layer is sent and another one received: expected bytes, without the overhead of encryption.

        Args:
          models: the models of the K clients, leaves [K, ...].
        """
        exchanges = self.repetitions * (2 if self.when == "both" else 1)
        return Parcels.of(1, int(2 * self.share * exchanges * trees.num_bytes(models) + 0.5))


class Strategy(NamedTuple):
    """A federated method as pure functions. Only the four members without a default are required."""

    init: Init
    dispatch: Dispatch
    client_update: ClientUpdate
    server_update: ServerUpdate
    global_model: Callable[[State], Variables] | None = None
    """The deployed model, which is tested on the test set. Default: there is none."""
    individual_models: Callable[[State], Variables] | None = None
    """K stacked models that are tested one by one, in addition to the deployed model. Default: there are none."""
    select: Select | None = None
    """Default: K clients uniformly without replacement, in random order."""
    init_memory: InitMemory | None = None
    """Default: clients keep no memory."""
    between_rounds: BetweenRounds | None = None
    """Host code between two rounds. With it, each compiled call runs a single round. Default: there is none."""
    traffic: CountTraffic | None = None
    """Default: the payloads and uploads of the K clients."""
    personal_model: PersonalModel | None = None
    """A client's personal model, tested on the client's samples. Default: there is none."""
    personal_part: PersonalPart | None = None
    """The argument ``part`` of `personal_model`. Default: the whole state, which suits a single global model."""
    exchange: LayerExchange | None = None
    """Exchange of layers among the clients. Default: there is none."""
    receive: Receive | None = None
    """Default: the uploads are the messages as they arrive."""
    models: View | None = None
    """The models that a server optimizer updates. Default: there are none, and a server optimizer is refused."""
    increments: tuple[str, ...] = ()
    """Uploads that a client also adds to its memory, such as changes of control variates. A refused one counts as zero,
    see `channel.base`. Default: there are none."""
    stale: str = "rebased"
    """How `server_update` takes uploads of asynchronous clients. ``rebased``: their changes, weighted by their
    freshness, are added to the model that the server would send now. ``uploaded``: as they are, with
    `Cohort.freshness`. ``branches``: as they are, and the server keeps M models, of which each client trains one
    (`Cohort.branches`); the model that returns is the next to be sent. ``lost``: it uses only what is trained in the
    current round, so asynchronous clients are refused. ``renewed``: it makes new factors of its adapters in each
    update, to which no older change fits, so they are refused, too."""
    choose: Choose | None = None
    """How asynchronous clients are chosen. Default: uniformly among those that are idle."""


def kept_models(strategy: Strategy, state: State) -> Variables | None:
    """The models that the server keeps side by side, leaves [K, ...], or None if it keeps a single one."""
    if strategy.individual_models is not None:
        return strategy.individual_models(state)
    if strategy.models is not None:
        return strategy.models.get(state) if strategy.models.stacked else None
    while hasattr(state, "inner"):  # of a transform with a state of its own
        state = state.inner
    return getattr(state, "models", None)


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

    def traffic(usual: "Traffic", state: State, uploads: Payload, cohort: Cohort, round: jax.Array) -> "Traffic":
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcels:
    """A number of sent objects that have the same size.

    Attributes:
      count: number of objects in a round, int32. The engine sums it over rounds.
      size: bytes per object. It is static, so that byte totals cannot overflow an integer type of the device.
    """

    count: jax.Array
    size: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, count: jax.Array | int, size: int) -> "Parcels":
        """Parcels of ``count`` objects of ``size`` bytes each."""
        return cls(jnp.asarray(count, jnp.int32), int(size))


class Traffic(NamedTuple):
    """Objects sent in one or more rounds."""

    down: tuple[Parcels, ...] = ()  # server to clients
    up: tuple[Parcels, ...] = ()  # clients to server
    peer: tuple[Parcels, ...] = ()  # from client to client

    def num_bytes(self) -> tuple[int, int, int]:
        """Bytes (down, up, client to client); host code."""
        down, up, peer = (sum(int(parcels.count) * parcels.size for parcels in each) for each in self)
        return down, up, peer


def select_uniformly(problem: Problem, key: jax.Array) -> Cohort:
    """Select K of the N clients uniformly without replacement, in random order; consumes ``key``."""
    if problem.num_clients > MOST_RANKED and 8 * problem.cohort_size <= problem.num_clients:
        ids = different_numbers(key, problem.num_clients, problem.cohort_size)
        return Cohort(ids, problem.sizes[ids])
    # Take the K largest of N random words. On CPU, top_k avoids a full sort only for floats (the sort takes 200 ms for
    # 100,000 words). So a first top_k runs on floats, with a few more than K candidates because floats are coarser.
    words, count = jax.random.bits(key, (problem.num_clients,)), problem.cohort_size
    _, near = jax.lax.top_k(words.astype(jnp.float32), min(problem.num_clients, count + 8))
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


def usual_traffic(payloads: Payload, uploads: Payload) -> Traffic:
    """Traffic of the payloads and uploads [K, ...] of a round, given as arrays or as shapes."""

    def rows(tree: Payload) -> tuple[Parcels, ...]:
        leaves = jax.tree.leaves(tree)
        return (Parcels.of(leaves[0].shape[0], trees.num_bytes(tree) // leaves[0].shape[0]),) if leaves else ()

    return Traffic(rows(payloads), rows(uploads))


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


def plain_training(problem: Problem, *, train: Train | None = None) -> ClientUpdate:
    """The client update of FedAvg: train the received model and upload it. Clients keep no memory."""
    train = train or (lambda received, data, key: local.train(problem.model, problem.local, received, data, key))

    def client_update(payload, memory, data, round, key):
        model, metrics = train(payload["model"], data, key)
        return {"model": model}, memory, metrics

    return client_update


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


def participation(problem: Problem, cohort: Cohort) -> jax.Array:
    """The share of the N clients that upload in a round: K / N, less late clients, which have 0 samples."""
    return jnp.mean((cohort.sizes > 0).astype(jnp.float32)) * (problem.cohort_size / problem.num_clients)


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
