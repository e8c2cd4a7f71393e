"""Ways to compute a strategy by hand: whole rounds in PyTorch and float64, and single steps on a tiny network."""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import models, trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, Samples, one_client
from fedjax_mr.engine import round as one_round
from fedjax_mr.strategies.interface import Cohort, Problem
from fedjax_mr.testing.federations import ThinHead, first_cohort

FEDERATION = dict(sizes=(6, 3, 5, 2), cohort=3, batch_size=6, epochs=3, lr=0.1, momentum=0.5)  # full batches


@functools.lru_cache(maxsize=8)  # tests with one engine share it
def beginning(engine, payloads):
    """The beginning of a round: who takes part, and on request what is sent to whom."""

    if not payloads and engine.strategy.select is None:
        return lambda constants, progress: (uniform_plan(constants.problem, constants.key, progress.round), None)

    def begin(constants, progress):
        if not payloads:
            return one_round.plan(engine.axis, constants, progress.server, progress.round), None
        plan, rows = one_round.begin(engine.axis, constants, progress)
        return plan, rows.payload

    return jax.jit(begin)


@jax.jit  # strategies share it
def uniform_plan(problem, key, round):
    cohort = one_round.select_uniformly(problem, one_round.round_key(key, one_round.SELECT, round))
    return one_round.CohortPlan(cohort, None)


class Transcription:
    """A strategy's compiled rounds and what it takes to compute them by hand.

    The network is a perceptron with 5 tanh units; a state is a list of float64 tensors in the order of its leaves.
    Between two rounds ``progress`` is on the host, where reading a part of it compiles nothing.
    """

    def __init__(self, engine, torch, **federation):
        self.torch, self.engine = torch, engine
        self.progress = jax.device_get(engine.init())
        data = jax.tree.map(np.asarray, engine.constants.federation)
        rows = [data.index[start:stop] for start, stop in zip(data.offsets, data.offsets[1:], strict=False)]
        self.x = [torch.tensor(data.samples.x[each].reshape(len(each), -1), dtype=torch.float64) for each in rows]
        self.y = [torch.tensor(data.samples.y[each], dtype=torch.int64) for each in rows]
        self.sizes = [len(each) for each in rows]
        self.settings = FEDERATION | federation

    def read(self, variables):
        """A model's parameters, or any tree like them, as tensors."""
        leaves = jax.tree.leaves(variables.get("params", variables))
        return [self.torch.tensor(np.asarray(leaf, np.float64)) for leaf in leaves]

    def rounds(self, count, *, payloads=False):
        """Run rounds and yield the clients of each; ``progress`` is the result.

        With ``payloads`` the clients' are kept as ``received``; they take a larger program.
        """
        for _ in range(count):
            progress = self.engine.place(self.progress)
            plan, sent = beginning(self.engine, payloads)(self.engine.constants, progress)
            clients = np.asarray(plan.cohort.ids).tolist()
            if payloads:
                slots, sent = np.asarray(plan.slots).tolist(), jax.device_get(sent)
                self.received = [trees.take(sent, slots.index(row)) for row in range(len(clients))]
            progress, self.report = self.engine.run(progress, 1)
            self.progress = jax.device_get(progress)
            yield clients

    def features(self, weights, x):
        _, _, bias, kernel = weights  # classifier/dense/{bias,kernel}, hidden/dense/{bias,kernel}
        return self.torch.tanh(x @ kernel + bias)

    def head(self, weights, z):
        return z @ weights[1] + weights[0]

    def cross_entropy(self, weights, client):
        logits = self.head(weights, self.features(weights, self.x[client]))
        return self.torch.nn.functional.cross_entropy(logits, self.y[client])

    def gradient(self, loss, weights):
        weights = [each.detach().clone().requires_grad_() for each in weights]
        return list(self.torch.autograd.grad(loss(weights), weights))

    def train(self, weights, client, *, loss=None, gradient=None, lr=None):
        """The weights after a client's epochs of SGD on a loss or gradient, functions of the weights."""
        lr = self.settings["lr"] if lr is None else lr
        loss = loss or (lambda weights: self.cross_entropy(weights, client))
        gradient = gradient or (lambda weights: self.gradient(loss, weights))
        velocity = [self.torch.zeros_like(each) for each in weights]
        for _ in range(self.settings["epochs"]):
            velocity = [self.settings["momentum"] * v + g for v, g in zip(velocity, gradient(weights), strict=True)]
            weights = [w - lr * v for w, v in zip(weights, velocity, strict=True)]
        return [each.detach() for each in weights]

    def mean(self, models, weights=None):
        weights = np.ones(len(models)) if weights is None else np.asarray(weights, np.float64)
        return [
            sum(w * each for w, each in zip(weights / weights.sum(), leaves, strict=True))
            for leaves in zip(*models, strict=True)
        ]

    def sizes_of(self, clients):
        return [self.sizes[client] for client in clients]

    def check(self, variables, expected):
        """Compare a model of the strategy with one computed by hand."""
        for ours, theirs in zip(self.read(variables), expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="session")
def transcription(engine):
    """(strategy, hyper) -> Transcription."""
    torch = pytest.importorskip("torch", reason="the equations are written in PyTorch: pip install 'fedjax_mr[parity]'")
    torch.set_num_threads(1)  # of several, all but one would wait, because tensors have a few numbers

    def make(strategy, hyper=None, **federation):
        settings = FEDERATION | federation
        return Transcription(engine(strategy, "perceptron", hyper=hyper, **settings), torch, **federation)

    return make


@pytest.fixture(scope="session")
def sent_after():
    """(strategy, problem) -> the models [K, ...] that a server sends after two rounds with random uploads.

    Two methods whose clients train alike are the same if their servers send the same, and no client need train.
    """

    def sent(strategy, problem):
        rng, cohort = np.random.default_rng(0), first_cohort(problem)
        shapes = jax.tree.map(lambda leaf: (2, problem.cohort_size, *leaf.shape), problem.model.shapes())
        uploads = jax.tree.map(lambda shape: rng.random(shape, np.float32), shapes, is_leaf=lambda x: type(x) is tuple)

        @jax.jit
        def after(uploads, key):
            state = strategy.init(key)
            for round in range(2):
                models, own = {"model": trees.take(uploads, round)}, jax.random.fold_in(key, round)
                state, _ = strategy.server_update(state, models, cohort, jnp.int32(round), own)
            return strategy.dispatch(state, cohort, key)["model"]

        return after(uploads, jax.random.key(0))

    return sent


class Layer(nn.Module):
    """A dense layer without a bias. Width 0: the identity."""

    width: int

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        return nn.Dense(self.width, use_bias=False, name="dense")(x) if self.width else x


class TinyNetwork(models.BlockNet):
    """One or two linear layers: logits = x @ hidden @ head, where the width 0 of ``hidden`` omits it."""

    width: int = 0
    takes = "numbers"

    def blocks(self):
        return ("hidden", Layer(self.width)), ("head", Layer(self.num_classes))


@functools.cache  # a model keeps its shapes
def tiny_network(classes, width):
    return models.Model(TinyNetwork(classes, width=width), (2,), name="tiny")


class Tiny:
    """Clients, problems and models that a hand can follow: two features, linear layers, no bias.

    If the head is zero, all C classes have probability 1/C. Then the gradient of the head is the mean over the samples
    of x (1/C - onehot), and the loss is log C.
    """

    @staticmethod
    def problem(sizes=(1, 3, 2), cohort=2, *, steps=1, lr=1.0, momentum=0.0, classes=2, width=0, counts=None, **fields):
        """A problem whose clients take ``steps`` steps of SGD in a round."""
        setting = local.setting(lr=lr, momentum=momentum, epochs=steps, batch_size=8)
        return Problem(
            model=tiny_network(classes, width),
            local=dataclasses.replace(setting, max_size=8),
            num_clients=len(sizes),
            cohort_size=cohort,
            num_classes=classes,
            layers=(),
            sizes=jnp.asarray(sizes, jnp.int32),
            label_counts=jnp.asarray(np.ones((len(sizes), classes)) if counts is None else counts, jnp.int32),
            architectures=jnp.zeros(len(sizes), jnp.int32),
            **fields,
        )

    @staticmethod
    def model(head, hidden=None):
        layers = {"head": head} | ({} if hidden is None else {"hidden": hidden})
        return {"params": {name: {"dense": {"kernel": jnp.asarray(k, jnp.float32)}} for name, k in layers.items()}}

    @staticmethod
    def params(head):
        """Parameters, or a change of them."""
        return Tiny.model(head)["params"]

    @staticmethod
    def head(tree):
        """The kernel of the head in a model, or in parameters."""
        return np.asarray(tree.get("params", tree)["head"]["dense"]["kernel"])

    @staticmethod
    def hidden(tree):
        return np.asarray(tree["params"]["hidden"]["dense"]["kernel"])

    @staticmethod
    def client(x=((1.0, 0.0),), y=(0,), *, client_id=0, size=None, work=None):
        """The data of a client. Rows from ``size`` on are padding."""
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        data = one_client(
            Samples(np.asarray(x, np.float32), np.asarray(y, np.int32), one, zero), client_id=client_id, size=size
        )
        return data if work is None else data._replace(work=jnp.float32(work))

    @staticmethod
    def train(strategy, payload, memory=None, *, data=None, round=0, key=0):
        """The upload, memory and metrics of a client."""
        data = Tiny.client() if data is None else data
        return strategy.client_update(payload, memory, data, jnp.int32(round), jax.random.key(key))

    @staticmethod
    def train_in_one_program(strategy, payload, memory=None, *, data=None):
        """As `train`, for clients whose operations hardly any other test has: one by one they compile longer."""
        data = Tiny.client() if data is None else data
        train = jax.jit(lambda payload, memory: Tiny.train(strategy, payload, memory, data=data))
        return train(payload, memory)


def in_full_batches(local_step, setting, start, data, key):
    """`local.run` as a plain loop: each epoch is one step on all rows of the client, in their order."""
    samples, size = data.samples, int(data.size)
    position = np.arange(len(samples.y), dtype=np.int32)
    mask = jnp.asarray(position < size, jnp.float32)
    batch = local.Batch(jnp.asarray(samples.x), jnp.asarray(samples.y), mask, jnp.asarray(position))
    steps = setting.epochs * -(-size // setting.batch_size)
    steps = steps if data.work is None else round(float(data.work) * steps)
    carry, total = local_step.init(start), jnp.zeros(())
    for number in range(steps):
        carry, value = local_step.step(carry, batch, jax.random.fold_in(key, number))
        total = total + value * jnp.sum(mask)
    metrics = local.Metrics(total, jnp.int32(steps * size), jnp.int32(steps), jnp.int32(-1))
    return local_step.result(carry), metrics


@pytest.fixture
def tiny(monkeypatch):
    """`Tiny`, whose clients train without a compiled program."""
    monkeypatch.setattr(local, "run", in_full_batches)
    return Tiny


class Rows(nn.Module):
    """A trained representation of two numbers for each of ``count`` tokens."""

    count: int

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        return self.param("z", nn.initializers.zeros, (self.count, 2), jnp.float32)[x[:, 0]]


class Table(models.BlockNet):
    """The network of `Tokens`: a representation for each token, and a dense layer with two classes."""

    count: int = 0
    takes = "tokens"

    def blocks(self):
        return ("body", Rows(self.count)), ("classifier", ThinHead(self.num_classes))


class Tokens:
    """A federation whose sample k is the token k, so a network is a table of one representation per sample.

    With the head of ``model``, an identity, a representation is also the logits of its sample: with (log 3, 0), class 0
    has probability 3/4. ``labels`` are those of each client. Public samples are the tokens after those of the clients.
    """

    def __init__(self, labels, *, public=(), batch_size=2, epochs=1, lr=1.0):
        y, sizes = np.concatenate([*labels, public]).astype(np.int32), np.array([*map(len, labels)], np.int32)
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        self.offsets = np.cumsum([0, *sizes])
        count, own = len(y), int(self.offsets[-1])
        x = np.arange(count, dtype=np.int32)[:, None]
        self.samples, self.index = Samples(x[:own], y[:own], one, zero), np.arange(own, dtype=np.int32)
        setting = local.LocalSetting("sgd", epochs, batch_size, max_size=int(sizes.max()), lr=np.float32(lr))
        self.problem = Problem(
            models.Model(Table(num_classes=2, count=count), (1,), np.int32, name="table"),
            setting,
            num_clients=len(labels),
            cohort_size=len(labels),
            num_classes=2,
            layers=(),
            sizes=sizes,
            label_counts=np.array([[sum(np.equal(each, c)) for c in range(2)] for each in labels], np.int32),
            architectures=np.zeros(len(labels), np.int32),
            public=Samples(x[own:], y[own:], one, zero) if len(public) else None,
        )
        self.cohort = Cohort(np.arange(len(labels), dtype=np.int32), sizes)

    @staticmethod
    def point(number):
        """A model that is a single number, for tests that only ask which model goes where."""
        return {"params": {"w": np.float32(number)}}

    def client(self, i):
        begin, end = map(np.int32, self.offsets[i : i + 2])
        return ClientData(self.samples, self.index, begin, end - begin, np.int32(i))

    def model(self, z, *, kernel=((1, 0), (0, 1)), bias=(0, 0)):
        """The network with these representations; rows that are not given are zeros."""
        table = np.zeros((len(self.samples.y) + (0 if self.problem.public is None else len(self.problem.public.y)), 2))
        table[: len(z)] = z
        dense = {"kernel": np.array(kernel, np.float32), "bias": np.array(bias, np.float32)}
        return {"params": {"body": {"z": table.astype(np.float32)}, "classifier": {"dense": dense}}}

    def batch(self, *tokens, labels, mask=None, position=None):
        """A batch of these tokens. By default all are samples, at the positions of their tokens."""
        x, y = np.array(tokens, np.int32)[:, None], np.array(labels, np.int32)
        mask = np.ones(len(x), np.float32) if mask is None else np.array(mask, np.float32)
        return local.Batch(x, y, mask, x[:, 0] if position is None else np.array(position, np.int32))


@pytest.fixture(scope="session")
def tokens():
    return Tokens


@pytest.fixture
def trainings(monkeypatch):
    """Calls of `local.train`, which here adds 1 to each number of the start instead of training it."""
    calls = []

    def train(model, setting, variables, data, key, **options):
        calls.append(
            types.SimpleNamespace(model=model, setting=setting, start=variables, data=data, key=key, **options)
        )
        one, zero = np.float32(1), np.int32(0)
        moved = jax.tree.map(lambda leaf: np.asarray(leaf) + np.asarray(1, np.asarray(leaf).dtype), variables)
        return moved, local.Metrics(one, data.size, one.astype(np.int32), zero - 1)

    monkeypatch.setattr(local, "train", train)
    return calls
