"""A real client: it joins, receives the facts of the federation, trains on request, and tests its own model.

Flower starts a process for each message, so everything that must persist is on the client's disk (storage.py). A
repeated request gets the same answer: it has the random key, and names the round of the memory that it starts from.

The server is not trusted with this client's machine: its flags cannot make it read a file or run code. The files and
the code are those of the node's own settings.
"""

import dataclasses
import functools
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr.client.samples import ClientData, Samples, one_client
from fedjax_mr.config import config as configuration
from fedjax_mr.config import imports
from fedjax_mr.config.config import Config
from fedjax_mr.data.facts import Facts
from fedjax_mr.deploy import protocol, relay, wire
from fedjax_mr.deploy.protocol import Member, RemoteData, RunManifest
from fedjax_mr.deploy.samples import ClientSamples
from fedjax_mr.deploy.storage import ClientStorage
from fedjax_mr.deploy.transport import Message
from fedjax_mr.deploy.wire import Content
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.personal import part_of, test_client
from fedjax_mr.engine.round import dispatch
from fedjax_mr.engine.simulator import normalised, problem_of
from fedjax_mr.errors import UserError
from fedjax_mr.experiment.architectures import architectures as architectures_of
from fedjax_mr.experiment.method import local_setting, strategy_of
from fedjax_mr.experiment.resolve import resolve
from fedjax_mr.keys import key_from_data, random_key
from fedjax_mr.models import Model
from fedjax_mr.settings import HIGHEST, LARGEST_INT32
from fedjax_mr.strategies.interface import Cohort, Problem, Strategy


class NodeSettings(NamedTuple):
    """Settings of a node; they are never sent."""

    client: int
    data: Path
    state: Path
    imports: str = ""  # files and modules with strategies or networks of the run, separated by commas
    pretrained: str = ""  # folder with the weights from which the run's network starts

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "NodeSettings":
        """Read the settings from Flower's ``--node-config``.

        Raises:
          UserError: a setting is missing or has the wrong type.
        """
        hint = 'flower-supernode --node-config \'client-id=3 data="mine.npz" state="FOLDER"\''
        own = {name: settings.get(name, "") for name in ("import", "pretrained")}
        for name, example in (("import", "FILE.py"), ("pretrained", "FOLDER")):
            if type(own[name]) is not str:
                raise UserError(f'{name} in the node settings must be a text: {name}="{example}"')
        for name, kind in (("client-id", int), ("data", str), ("state", str)):
            if type(settings.get(name)) is not kind:
                raise UserError(f"the node settings need {name}, {_A[kind]}: {hint}")
        return cls(settings["client-id"], Path(settings["data"]), Path(settings["state"]), *own.values())


KINDS = ("join", "rejected", "begin", "train", "evaluate", relay.KIND)
"""The kinds of messages that a client answers. All but the last are methods of `Client`."""

_A = {int: "a whole number", str: "a text"}


def answer(message: Message, node_settings: Mapping[str, Any], run_settings: Mapping[str, Any]) -> Content:
    """Answer a message of the server.

    Args:
      message: message of one of the `KINDS`.
      node_settings: settings of this node (`NodeSettings`).
      run_settings: configuration of the app: ``flags`` for the run.

    Raises:
      UserError: any error, as one line for the server's log. It is also printed, for the log of this node.
    """
    who = f"client {node_settings.get('client-id', 'without client-id')}"
    try:
        node = NodeSettings.of(node_settings)
        flags = protocol.trusted_flags(str(run_settings["flags"]), node.imports)
        set_up_jax(devices=1, cohort_size=1)
        _config(flags)  # reads the node's own code, which may have the task of the manifest
        client = Client(node, RunManifest.of(message.content), flags)
        if message.kind not in KINDS:
            raise UserError(f"unknown request {message.kind!r}: is the server of another version?")
        with client.storage:
            if message.kind == relay.KIND:
                return client.relay(message, settings=node_settings)
            return getattr(client, message.kind)(message)
    except UserError as error:
        line = str(error) if str(error).startswith(f"{who} ") else f"{who}: {error}"
    except Exception as error:  # broad: for any message, the server gets one line, and this node's log the traceback
        traceback.print_tb(error.__traceback__)
        what = imports.blame(error) or f"{type(error).__name__}: {error}"
        line = f"{who} cannot answer the request to {message.kind}: {what}"
    print(wire.one_line(f"fedjax-mr: {line}", 5 * wire.LONGEST_LINE), file=sys.stderr, flush=True)
    raise UserError(wire.one_line(line))


class Client:
    """One client of one run, handling one message."""

    def __init__(self, node: NodeSettings, manifest: RunManifest, flags: tuple[str, ...]) -> None:
        """Read the client's samples; ``flags`` are those of `facts.trusted_flags`.

        Raises:
          UserError: the samples are missing, damaged or of another kind, or the configuration cannot be read or names
            weights that are not in the node's settings.
        """
        self.node, self.manifest, self.flags = node, manifest, flags
        if (weights := _config(flags).pretrained) is not None and weights != node.pretrained:
            raise UserError(
                f'a client only reads files that its node settings name: add pretrained="{weights}" if this folder has '
                "the weights of the run"
            )
        if not node.data.is_file():
            raise UserError(f"there is no file {node.data}: correct data in --node-config and restart the SuperNode")
        self.samples = _share(node.data, node.data.stat().st_mtime_ns, manifest.facts)
        self.storage = ClientStorage(node.state, manifest.run)

    # --- the messages

    def join(self, message: Message) -> Content:
        """Report the numbers of samples, after checking that client and server run the same.

        Raises:
          UserError: settings, versions or networks differ, or the samples have changed during this run.
        """
        ours = protocol.agreement(_config(self.flags), _model(self.flags, self.manifest.facts))
        if different := protocol.disagreement(ours, self.manifest.agreement):
            raise UserError(f"it does not match the server; install the same versions and code: {different}")
        share, same = self.samples, np.frombuffer(self.samples.fingerprint().encode(), np.uint8)
        if (self.storage.folder / "samples.npz").exists() and not np.array_equal(
            self.storage.read("samples")["of"], same
        ):
            raise UserError(
                f"the samples in {self.node.data} have changed since this client joined the run: restore the file, or "
                "start a new run"
            )
        self.storage.write("samples", {"of": same})
        counts = np.bincount(share.y, minlength=self.manifest.facts.num_classes) if self.manifest.label_counts else []
        member = Member(
            self.node.client, len(share.y), len(share.validation_y), len(share.test_y), tuple(map(int, counts))
        )
        return {"member": member.record()}

    def rejected(self, message: Message) -> Content:
        """Report why the server does not admit this client; only the server knows the other clients.

        Raises:
          UserError: always, with the server's reason.
        """
        why = message.content.get("why")
        raise UserError(f"the server does not admit it: {why.get('line') if isinstance(why, Mapping) else 'no reason'}")

    def begin(self, message: Message) -> Content:
        """Store the facts of the federation.

        Raises:
          UserError: they are malformed.
        """
        facts = self.manifest.facts
        federation = protocol.checked_federation(message.content.get("federation"), client=self.node.client)
        own = (len(self.samples.y), len(self.samples.validation_y))
        if (sent := tuple(int(federation[name][self.node.client]) for name in ("sizes", "validation_sizes"))) != own:
            raise UserError(
                f"according to the server this client has {sent[0]} + {sent[1]} samples; it has {own[0]} + {own[1]}"
            )
        self.storage.write("federation", federation)
        self.storage.write("public", protocol.checked_public(message.content.get("public"), facts))
        self._problem()
        return {"ready": {"client": self.node.client}}

    def train(self, message: Message) -> Content:
        """Train on the server's payload, store the memory, and return the upload and the training metrics."""
        built, problem = self._problem()
        strategy = built.build(problem)
        payload = wire.unpack(message.content.get("payload", {}), built.payload(problem), who="the server's payload",
                              finite=built.finite)  # fmt: skip
        key, last = self._secret_key(message) if built.noisy else self._key(message), self._last(message)
        memory = self._memory(built, problem, last)
        round = np.int32(message.round)
        upload, memory, metrics = jax.device_get(built.train(problem, payload, memory, self._data(problem), round, key))
        if strategy.init_memory is not None:
            self.storage.write_memory(message.round, memory, before=last)
        if strategy.exchange is not None:  # the model's layers go to other clients before the server gets them
            self.storage.write_last("outbox", message.round, wire.pack(upload.pop("model")))
        return {"upload": wire.pack(upload), "metrics": wire.pack(metrics)}

    def relay(self, message: Message, *, settings: Mapping[str, Any]) -> Content:
        """Exchange layers of the model trained in the message's round with other clients."""
        built, problem = self._problem()
        exchange, name = built.build(problem).exchange, f"outbox-{message.round}"
        if exchange is None:
            raise UserError("the strategy of this run does not exchange layers")
        shapes, folder = problem.model.shapes(), self.storage.folder
        return relay.answer(
            message,
            settings,
            folder,
            client=self.node.client,
            model=lambda: wire.unpack(
                self.storage.read(name), shapes, who=str(self.storage.folder / name), finite=False
            ),
            layers=problem.layers,
            share=exchange.share,
            repetitions=exchange.repetitions,
        )

    def evaluate(self, message: Message) -> Content:
        """Test the client's own model on its own samples."""
        built, problem = self._problem()
        strategy = built.build(problem)
        part = wire.unpack(message.content.get("part", {}), built.part(problem), who="the server's part of the model",
                           finite=built.finite)  # fmt: skip
        memory = self._memory(built, problem, self._last(message)) if strategy.init_memory else None
        epochs = _number(message, "epochs", high=HIGHEST["epochs"])
        scores = built.test(problem, part, memory, self._data(problem), self._test(problem), self._key(message), epochs)
        return {"scores": wire.pack(jax.device_get(scores))}

    # --- their inputs

    def _problem(self) -> tuple["CompiledClient", Problem]:
        """The compiled functions and the problem of this client, which only knows its own label counts."""
        record = self.storage.read("federation")
        numbers = [tuple(map(int, record[name])) for name in ("sizes", "validation_sizes", "architectures")]
        built = _built(self.flags, self.manifest.facts, *numbers, tuple(map(int, record["memory_key"])))
        counts = np.zeros((len(numbers[0]), self.manifest.facts.num_classes), np.int32)
        if "classes" in self.manifest.facts.learned.provides:
            counts[self.node.client] = np.bincount(self.samples.y, minlength=counts.shape[1])
        public = self.storage.read("public")
        samples = None
        if "x" in public:
            y, unknown = public.get("y"), self.manifest.facts.dataset(len(public["x"])).y
            found = normalised(built.problem_dataset, public["x"], unknown if y is None else y)
            samples = found._replace(y=None) if y is None else found
        return built, built.problem_with(counts, samples)

    def _data(self, problem: Problem) -> ClientData:
        """The training samples followed by those for validation, padded to the size of the largest client."""
        own = self.samples
        x = np.concatenate([own.x, own.validation_x])
        y = np.concatenate([own.y, own.validation_y])
        kept = 0 if problem.validation_sizes is None else np.asarray(problem.validation_sizes)
        most = int(np.max(np.asarray(problem.sizes) + kept))
        return self._rows(x, y, most, len(own.y), len(own.validation_y))

    def _test(self, problem: Problem) -> ClientData:
        return self._rows(
            self.samples.test_x, self.samples.test_y, max(1, len(self.samples.test_y)), len(self.samples.test_y), 0
        )

    def _rows(self, x: np.ndarray, y: np.ndarray, most: int, size: int, kept: int) -> ClientData:
        fill = max(0, most - len(y))
        x = np.concatenate([x, np.zeros((fill, *x.shape[1:]), x.dtype)])
        y = np.concatenate([y, np.zeros((fill, *y.shape[1:]), y.dtype)])
        samples: Samples = normalised(self.manifest.facts.dataset(1), x, y)
        return one_client(samples, client_id=self.node.client, size=size, validation_size=kept)

    def _memory(self, built: "CompiledClient", problem: Problem, last: int) -> Any:
        """The memory after the round ``last``; -1 means before the first round."""
        if built.build(problem).init_memory is None:
            return None
        first = built.first_memory(problem, np.int32(self.node.client))
        return first if last < 0 else self.storage.memory(last, first)

    def _key(self, message: Message) -> jax.Array:
        record = wire.unpack(message.content.get("key", {}), {"key": _KEY}, who="the server's key")
        return key_from_data(jnp.asarray(record["key"]))

    def _secret_key(self, message: Message) -> jax.Array:
        """The key of a round with noise, from a secret of this client and all that the server has sent.

        The server cannot compute the noise. It cannot get the same noise for another payload either, whose upload minus
        this one would be free of it. A repeated request gets the same noise.
        """
        if not (self.storage.folder / "secret.npz").exists():
            self.storage.write("secret", {"secret": np.frombuffer(os.urandom(32), np.uint8)})
        drawn = hashlib.blake2b(key=self.storage.read("secret")["secret"].tobytes(), digest_size=8)
        drawn.update(repr(message.round).encode())
        for name, record in sorted(message.content.items()):
            for each, value in sorted(record.items()):
                array = np.asarray(value)
                drawn.update(repr((name, each, array.dtype.str, array.shape)).encode() + array.tobytes())
        return key_from_data(jnp.asarray(np.frombuffer(drawn.digest(), np.uint32)))

    def _last(self, message: Message) -> int:
        return _number(message, "last", low=-1)


_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)


def _number(message: Message, name: str, *, low: int = 0, high: int = LARGEST_INT32) -> int:
    numbers = message.content.get("numbers")
    value = numbers.get(name) if isinstance(numbers, Mapping) else None
    if type(value) is not int or not low <= value <= high:
        raise UserError(f"a request of the server is malformed ({name})")
    return value


# --- Shared by the messages that one process answers ------------------------------------------------------------------


class CompiledClient:
    """The strategy of a run and its compiled functions, shared by clients in one process."""

    def __init__(self, config: Config, problem: Problem, dataset: Any, memory_key: jax.Array) -> None:
        """Prepare the functions; each is compiled at its first call."""
        self.finite, self.noisy = not config.allow_nonfinite, config.dp_noise > 0
        self.build = strategy_of(config)
        self.problem_dataset = dataset
        self._problem, self._memory_key = problem, memory_key
        self._known_shapes: dict[str, Any] = {}
        self.train = jax.jit(
            lambda problem, payload, memory, data, round, key: self.build(problem.in_round(round)).client_update(
                payload, memory, data, round, key
            )
        )
        self._test = jax.jit(
            lambda problem, part, memory, data, test, key, epochs: test_client(
                self.build(problem), problem, part, memory, data, test, key, epochs=epochs
            ),
            static_argnums=6,
        )
        self._first = jax.jit(
            lambda problem, key, client: self.build(problem).init_memory(key, client)  # type: ignore[misc]
        )

    def problem_with(self, label_counts: np.ndarray, public: Samples | None) -> Problem:
        """The problem with one client's label counts and public data."""
        return dataclasses.replace(self._problem, label_counts=jnp.asarray(label_counts), public=public)

    def test(self, *arguments: Any) -> Any:
        """The scores of a client's own model and the number of its network, by name."""
        tested, validation, architecture = self._test(*arguments)
        return {"test": tested, "validation": validation, "architecture": architecture}

    def first_memory(self, problem: Problem, client: np.int32) -> Any:
        """A client's memory before the first round."""
        return self._first(problem, self._memory_key, client)

    def payload(self, problem: Problem) -> Any:
        """The shapes of the payload that a client receives."""
        return self._shapes("payload", lambda problem: _payload(self.build(problem), problem), problem)

    def part(self, problem: Problem) -> Any:
        """The shapes of the server's part of a client's own model."""
        state = lambda problem: self.build(problem).init(random_key(0))
        return self._shapes("part", lambda problem: part_of(self.build(problem), state(problem), 0), problem)

    def _shapes(self, name: str, function: Callable[[Problem], Any], problem: Problem) -> Any:
        if name not in self._known_shapes:
            self._known_shapes[name] = jax.eval_shape(function, problem)
        return self._known_shapes[name]


def _payload(strategy: Strategy, problem: Problem) -> Any:
    cohort = Cohort(jnp.arange(problem.cohort_size, dtype=jnp.int32), problem.sizes[: problem.cohort_size])
    sent = dispatch(strategy, strategy.init(random_key(0)), cohort, random_key(0))
    return jax.tree.map(lambda leaf: leaf[0], sent)


@functools.lru_cache(maxsize=8)
def _config(flags: tuple[str, ...]) -> Config:
    config = configuration.parse(flags)
    return resolve(dataclasses.replace(config, log=None, tensorboard=False)).config  # the server alone writes logs


@functools.lru_cache(maxsize=8)
def _model(flags: tuple[str, ...], facts: Facts) -> Model:
    return protocol.network_of(_config(flags), facts)


@functools.lru_cache(maxsize=16)
def _share(path: Path, changed: int, facts: Facts) -> ClientSamples:
    return ClientSamples.read(path, facts)


@functools.lru_cache(maxsize=4)
def _built(
    flags: tuple[str, ...],
    facts: Facts,
    sizes: tuple[int, ...],
    validation_sizes: tuple[int, ...],
    architectures: tuple[int, ...],
    memory_key: tuple[int, ...],
) -> CompiledClient:
    config = _config(flags)
    # The server decides which network each client has; the runs on which it based the choice need not be here.
    config = dataclasses.replace(config, architectures=",".join(map(str, architectures)), architectures_from=())
    federated = RemoteData.of_sizes(facts.dataset(1), np.array(sizes), validation_sizes=np.array(validation_sizes))
    problem = problem_of(
        _model(flags, facts),
        local_setting(config, federated.dataset),
        federated,
        cohort=config.cohort,
        architectures=architectures_of(config.architectures, len(config.networks), len(sizes), seed=config.seed),
        samples_on_device=False,
    )
    return CompiledClient(config, problem, facts.dataset(1), key_from_data(jnp.array(memory_key, jnp.uint32)))
