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
from fedjax_mr.client.local import LocalSetting, Metrics
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.models import Layer, Model, Variables
from fedjax_mr.strategies.traffic import Parcels, Traffic

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
      num_classes: C, classes, or for other tasks the width of the outputs. ``model.task`` is the task.
      layers: the model's layers in forward order; empty for a `Zoo`.
      sizes: training samples per client [N].
      label_counts: training samples per client and class [N, C]; without classes, per group (`Dataset.groups`).
      architectures: index of each client's initial network in the zoo [N] int32; zeros without a zoo.
      public: public samples held by the server, or None. ``y`` is None if they are unlabelled.
      validation_sizes: validation samples per client [N], or None if no client has any.
      samples_on_device: whether the samples of all clients are on the devices; otherwise a client sees its own alone.
      in_flight: M, asynchronous clients that train at the same time. None: rounds are synchronous.
      present: which of the N clients exist [N] bool, with at least K of them. None: all. The others keep their numbers,
        have no samples and are never selected, as if the federation had been made without them.
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
    present: jax.Array | None = None

    @property
    def num_present(self) -> jax.Array | int:
        """The number of clients that exist: N, unless some are absent."""
        return self.num_clients if self.present is None else jnp.sum(self.present.astype(jnp.float32))

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
    """Select the cohort of a round (int32, counted from 0)."""

    def __call__(self, state: State, round: jax.Array, key: jax.Array) -> Cohort: ...


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

    def __call__(self, usual: Traffic, state: State, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic: ...


class PersonalPart(Protocol):
    """The part of the state that ONE client needs for its personal model."""

    def __call__(self, state: State, client_id: jax.Array) -> Any: ...


class PersonalModel(Protocol):
    """The personal model of ONE client, from its memory and its `PersonalPart`."""

    def __call__(self, part: Any, /, memory: Memory, data: ClientData, key: jax.Array) -> Variables: ...


class Received(NamedTuple):
    """Which models the clients of a method without a server receive from their neighbours in a round."""

    ids: jax.Array  # [N, S] int32, in empty places the client itself
    shares: (
        jax.Array
    )  # [N, S] float32, weights of their models; 0 in empty places and for clients that do not take part
    counts: jax.Array  # [N] int32, neighbours of each client if all take part
    least: int  # the smallest of ``counts`` over all rounds
    most: int  # the largest


class Combine(Protocol):
    """What clients without a server make of their parameters and those that they receive: -> (params [N], info)."""

    def __call__(self, params: trees.Params, received: Received) -> tuple[trees.Params, Info]: ...


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

    def parcels(self, models: Variables) -> Parcels:
        """Each selected layer is sent and another one received: expected bytes, without the overhead of encryption.

        Args:
          models: the models of the K clients, leaves [K, ...].
        """
        exchanges = self.repetitions * (2 if self.when == "both" else 1)
        return Parcels.of(1, int(2 * self.share * exchanges * trees.num_bytes(models) + 0.5))


class Strategy(NamedTuple):
    """A federated method as pure functions.

    A round: the server dispatches a payload to each client of the cohort, each client updates it on its samples, and
    the server updates its state from the uploads. Only these three and ``init`` are required. The other members say
    what else the server does, what else a client does, and what is tested and counted.
    """

    init: Init
    dispatch: Dispatch
    client_update: ClientUpdate
    server_update: ServerUpdate

    # --- What else the server does

    select: Select | None = None
    """Default: K clients uniformly without replacement, in random order."""
    receive: Receive | None = None
    """Default: the uploads are the messages as they arrive."""
    between_rounds: BetweenRounds | None = None
    """Host code between two rounds. With it, each compiled call runs a single round. Default: there is none."""
    models: View | None = None
    """The models that a server optimizer updates. Default: there are none, and a server optimizer is refused."""
    stale: str = "rebased"
    """How `server_update` takes uploads of asynchronous clients. ``rebased``: their changes, weighted by their
    freshness, are added to the model that the server would send now. ``uploaded``: as they are, with
    `Cohort.freshness`. ``branches``: as they are, and the server keeps M models, of which each client trains one
    (`Cohort.branches`); the model that returns is the next to be sent. ``lost``: it uses only what is trained in the
    current round, so asynchronous clients are refused. ``renewed``: it makes new factors of its adapters in each
    update, to which no older change fits, so they are refused, too."""
    choose: Choose | None = None
    """How asynchronous clients are chosen. Default: uniformly among those that are idle."""

    neighbours: Callable[[Combine], ServerUpdate] | None = None
    """Of a method without a server: `server_update` with another rule than the mean of the neighbours' models. It
    raises a `UserError` if the method has no other. Default: there is a server."""

    # --- What else a client does

    init_memory: InitMemory | None = None
    """Default: clients keep no memory."""
    increments: tuple[str, ...] = ()
    """Uploads that a client also adds to its memory, such as changes of control variates. A refused one counts as zero,
    see `channel.base`. Default: there are none."""
    exchange: LayerExchange | None = None
    """Exchange of layers among the clients of a round. Default: there is none."""
    personal_model: PersonalModel | None = None
    """A client's personal model, tested on the client's samples. Default: there is none."""
    personal_part: PersonalPart | None = None
    """The argument ``part`` of `personal_model`. Default: the whole state, which suits a single global model."""

    # --- Tests and traffic

    global_model: Callable[[State], Variables] | None = None
    """The deployed model, which is tested on the test set. Default: there is none."""
    individual_models: Callable[[State], Variables] | None = None
    """K stacked models that are tested one by one, in addition to the deployed model. Default: there are none."""
    traffic: CountTraffic | None = None
    """Default: the payloads and uploads of the K clients."""


def kept_models(strategy: Strategy, state: State) -> Variables | None:
    """The models that the server keeps side by side, leaves [K, ...], or None if it keeps a single one."""
    if strategy.individual_models is not None:
        return strategy.individual_models(state)
    if strategy.models is not None:
        return strategy.models.get(state) if strategy.models.stacked else None
    while hasattr(state, "inner"):  # of a transform with a state of its own
        state = state.inner
    return getattr(state, "models", None)
