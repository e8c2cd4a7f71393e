"""Equations written down a second time, in PyTorch and float64, beside the compiled rounds of a strategy."""

import functools

import jax
import numpy as np
import pytest

from fedjax_mr import trees
from fedjax_mr.engine import rounds

FEDERATION = dict(sizes=(6, 3, 5, 2), cohort=3, batch_size=6, epochs=3, lr=0.1, momentum=0.5)  # full batches


@functools.lru_cache(maxsize=8)  # tests with one engine share it
def beginning(engine, payloads):
    """The compiled beginning of a round: who takes part, and on request what is sent to whom."""

    def begin(constants, progress):
        if not payloads:
            return rounds.plan(engine.axis, constants, progress.server, progress.round), None
        plan, rows = rounds.begin(engine.axis, constants, progress)
        return plan, rows.payload

    return jax.jit(begin)


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

    def make(strategy, hyper=None, **federation):
        settings = FEDERATION | federation
        return Transcription(engine(strategy, "perceptron", hyper=hyper, **settings), torch, **federation)

    return make
