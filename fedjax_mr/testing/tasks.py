"""Every task with every strategy: what works, and the reason where one is refused."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np

from fedjax_mr import models
from fedjax_mr.client import local
from fedjax_mr.data import Dataset, FederatedData, Split
from fedjax_mr.data.federated import Public
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.round import RunConstants, begin, finish, start, train_client
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import adapters, layers
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.tasks import Classification, Language, Multilabel, Regression, Segmentation, Survival, Task
from fedjax_mr.testing.federations import SharingSimulator, ThinHead, default_hyper

SIZES = (7, 12, 1, 5, 9, 4)  # samples per client: uneven, one client with a single sample
WIDTH, TOKENS = 3, 7

KINDS: dict[str, Task] = {
    "classification": Classification(width=WIDTH),
    "multilabel": Multilabel(width=WIDTH),
    "regression": Regression(width=2, mean=(1.0, -1.0), std=(2.0, 0.5)),
    "segmentation": Segmentation(width=WIDTH),
    "language": Language(width=TOKENS),
    "survival": Survival(times=(0.2, 0.5, 0.8)),
}
"""One task of each kind."""


class Vectors(nn.Module):
    """A dense layer on the numbers of a sample."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        return nn.tanh(layers.Dense(5, name="dense")(x.reshape(x.shape[0], -1)))


class Positions(nn.Module):
    """A vector per pixel or per token, each from its own input and the mean of all."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        x = nn.Embed(TOKENS, 4, name="tokens")(x) if x.ndim == 2 else x
        z = layers.Dense(5, name="dense")(x)
        return nn.tanh(z + z.mean(axis=tuple(range(1, z.ndim - 1)), keepdims=True))


class OfVectors(models.BlockNet):
    """A network for tasks with one output per sample."""

    def blocks(self):
        return ("body", Vectors()), ("classifier", ThinHead(self.num_classes))


class OfPositions(models.BlockNet):
    """A network for tasks with an output per pixel or per token."""

    def blocks(self):
        return ("body", Positions()), ("classifier", ThinHead(self.num_classes))


@functools.cache
def federated(kind: str) -> FederatedData:
    """A small federation for a task, with a public set."""
    rng, count, spare = np.random.default_rng(0), sum(SIZES), 10
    task, total = KINDS[kind], sum(SIZES) + 10
    shape = (6,) if kind == "language" else (4, 4, 1)
    x = rng.integers(0, TOKENS, (total, *shape)) if kind == "language" else rng.normal(size=(total, *shape))
    x = x.astype(np.int32 if kind == "language" else np.float32)
    shape = (total, *task.target_shape(shape))
    if np.issubdtype(task.dtype, np.integer):
        y = rng.integers(0, 2 if kind == "multilabel" else task.width, shape)
    else:
        y = rng.random(shape)
    if kind == "survival":
        y[:, 1] = y[:, 1] < 0.7
    y = y.astype(task.dtype)
    dataset = Dataset(kind, x[spare:], y[spare:], x[spare:], y[spare:], task=task, vocabulary=TOKENS)
    split = Split.of(np.split(rng.permutation(count), np.cumsum(SIZES)[:-1]))
    return FederatedData(dataset, split, test=split, public=Public(x[:spare], y[:spare]))


@functools.cache
def network(kind: str, *, adapted: bool = False) -> models.Model:
    """The network for a task, or one with adapters on its dense layers."""
    dataset, task = federated(kind).dataset, KINDS[kind]
    family = OfVectors if task.outputs((4, 4, 1)) == (task.width,) else OfPositions
    dtype = np.int32 if kind == "language" else np.float32
    model = models.Model(family(num_classes=task.width), dataset.x.shape[1:], dtype, name=kind)
    return adapters.lora(model, 2, 4.0, key=random_key(0), targets="*kernel", head=True) if adapted else model


@functools.lru_cache(maxsize=40)
def simulator(strategy: str, kind: str, **options: object) -> Simulator:
    """A simulator of a strategy on the federation of a task. ``options`` are those of `Simulator`.

    Raises:
      UserError: the strategy does not suit the task.
    """
    row = STRATEGIES[strategy]
    return SharingSimulator(
        strategy,
        network(kind, adapted=row.adapters),
        federated(kind),
        cohort=5,
        local=local.setting(lr=0.05, epochs=2, batch_size=4),
        hyper=default_hyper(strategy),
        layout=Layout(devices=1, lanes=1),
        seed=1,
        **options,  # type: ignore[arg-type]
    )


def one_round(engine: Rounds) -> Callable[[RunConstants], object]:
    """A round as a function of the constants, to be traced."""

    def function(constants: RunConstants) -> object:
        progress = start(constants)
        plan, rows = begin(engine.axis, constants, progress)
        trained = jax.lax.map(lambda row: train_client(constants, progress.round, row), rows)
        return finish(constants, progress, plan, trained)

    return function


def refusal(strategy: str, kind: str) -> str | None:
    """Why a strategy refuses a task, in one line; None if it works. A round is traced, but not compiled."""
    try:
        engine = simulator(strategy, kind).rounds
        jax.eval_shape(one_round(engine), engine.constants)
    except UserError as error:
        return str(error)
    return None
