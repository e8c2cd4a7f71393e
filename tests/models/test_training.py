"""Networks inside compiled local training: their convolutions in XLA, and one round of FedMR with each."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_mr import models
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, Samples
from fedjax_mr.data import Split
from fedjax_mr.engine import rounds
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.settings import bind
from fedjax_mr.strategies import STRATEGIES, Problem

CONVOLUTIONAL = [
    name
    for name, row in models.MODELS.items()
    if len(row.input_shape) == 3 and not name.startswith(("mlp", "logistic", "vit"))
]
QUICK = ("lenet5",)
THIN = {"width": 4, "heads": 2, "groups": 1, "hidden": 16}
"""Smaller values of attributes, which change sizes but no operation."""


def thin(name):
    model = models.as_in_source(name)
    smaller = {key: value for key, value in THIN.items() if hasattr(model.module, key)}
    return models.Model(model.module.clone(**smaller), model.input_shape, model.input_dtype, name, task=model.task)


def some_marked_slow(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def training(model):
    """The program of the training of one client."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    index = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    y = index((20, *model.task.target_shape(model.input_shape)))
    samples = Samples(shape((20, *model.input_shape)), y, shape((1,)), shape((1,)))
    data = ClientData(samples, index((20,)), index(()), index(()), index(()))
    setting = local.LocalSetting(optax.sgd(0.1, 0.5), epochs=2, batch_size=4, max_size=20)

    def train(variables, data):
        return local.train(model, setting, variables, data, jax.random.key(0))

    return jax.jit(train).lower(model.shapes(), data)


def orders(program):
    """The dimension orders of all convolutions in the program that XLA compiles."""
    return set(re.findall(r"dim_labels=(\S+_\S+->\w+)", program.compile().as_text()))


@pytest.mark.parametrize("name", some_marked_slow(CONVOLUTIONAL))
def test_only_convolutions_in_the_fast_order_and_no_scatter(name):
    program = training(thin(name))
    assert orders(program) == {"b01f_01io->b01f"}
    assert "select_and_scatter" not in program.as_text()  # XLA:CPU compiles it to a loop without a name
    assert "reduce_window" not in program.as_text()


class Plain(nn.Module):
    """A network of Flax layers."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        x = nn.max_pool(nn.Conv(4, (3, 3))(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


def test_flax_s_own_layers_would_fail_that_test():
    program = training(models.Model(Plain(), (8, 8, 1)))
    assert len(orders(program)) > 1
    assert "select_and_scatter" in program.as_text()


def rounds_of_fedmr(model, *, lanes):
    """The engine of FedMR for three clients with a cohort of two."""
    sizes, rng = np.array([5, 3, 4]), np.random.default_rng(0)
    classes = model.module.num_classes
    x = rng.integers(0, classes, (12, *model.input_shape)).astype(model.input_dtype)
    x = x if model.module.takes == "tokens" else x / np.float32(classes)
    y = rng.integers(0, classes, (12, *model.task.target_shape(model.input_shape))).astype(np.int32)
    first = y.reshape(12, -1)[:, 0]
    split = Split.of(np.split(np.arange(12), np.cumsum(sizes)[:-1]))
    problem = Problem(
        model=model,
        local=local.LocalSetting(optax.sgd(0.01, 0.5), epochs=1, batch_size=4, max_size=5),
        num_clients=3,
        cohort_size=2,
        num_classes=classes,
        layers=model.layers(),
        sizes=jnp.asarray(sizes, jnp.int32),
        label_counts=jnp.asarray([np.bincount(first[split.rows(i)], minlength=classes) for i in range(3)], jnp.int32),
        architectures=jnp.zeros(3, jnp.int32),
    )
    samples = Samples(x, y, np.ones(1, np.float32), np.zeros(1, np.float32))
    row, federation = STRATEGIES["fedmr"], rounds.Federation(samples, split.index, split.offsets)
    constants = rounds.RunConstants(bind(row.build, row.hyper()), problem, federation, jax.random.key(0))
    axis = client_axis(devices=1, lanes=lanes, cohort_size=2)
    return rounds.Rounds(constants, axis)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mlp" else pytest.mark.slow) for name in models.MODELS]
)
def test_one_round_of_fedmr_is_the_same_in_one_lane_and_in_two(name, close):
    model = thin(name)
    alone, together = (rounds_of_fedmr(model, lanes=lanes) for lanes in (1, 2))
    start = alone.init()
    before = jax.device_get(start.server)
    after, report = alone.run(start, 1)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, jax.device_get(after.server))
    assert any(jax.tree.leaves(changed))
    assert np.isfinite(report.train_loss)
    assert int(report.bad_client) == -1
    close(after.server, together.run(together.init(), 1)[0].server)
