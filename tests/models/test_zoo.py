"""Several networks behind the interface of one: operations on the zoo equal those on its networks."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import models
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData
from fedjax_mr.errors import UserError
from fedjax_mr.testing.federations import numbers_like


@pytest.fixture(scope="module")
def constants(federation):
    return federation("thin,linear,perceptron", sizes=(7, 5), cohort=2)


@pytest.fixture(scope="module")
def zoo(constants):
    return constants.problem.model


def data_of(constants, client):
    samples, index, offsets = constants.federation
    size = np.int32(np.diff(offsets)[client])
    return ClientData(samples, jnp.asarray(index), np.int32(offsets[client]), size, np.int32(client))


def pack(zoo, variables, number):
    return jax.jit(zoo.pack, static_argnums=1)(variables, number)


def unpack(zoo, packed, number):
    return jax.jit(zoo.unpack, static_argnums=1)(packed, number)


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_packing_is_undone(zoo, equal, number):
    variables = jax.jit(zoo.networks[number].init)(jax.random.key(number))
    packed = pack(zoo, variables, number)
    equal(unpack(zoo, packed, number), variables)
    equal(jax.jit(lambda packed: zoo.train_compact(packed, None, lambda loss, own: (own, None))[0])(packed), packed)
    equal(jax.jit(zoo.init)(jax.random.key(number), number), packed)
    described = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)
    assert described(packed) == described(zoo.shapes())


def test_a_number_in_the_data_picks_the_network(zoo, constants, close):
    """One trace serves all networks, also for a batch of clients, with the same logits, features and heads."""
    x = jnp.asarray(constants.federation.samples.x[:4])
    rows = [jax.device_get(pack(zoo, numbers_like(model.shapes()), n)) for n, model in enumerate(zoo.networks)]
    packed = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    apply = jax.jit(jax.vmap(zoo.apply, in_axes=(0, None)))
    logits = apply(packed, x)
    one = jax.jit(zoo.apply)
    headed = jax.jit(lambda row, x: zoo.head(row, zoo.features(row, x)))
    for number, model in enumerate(zoo.networks):
        row = jax.tree.map(lambda leaf, number=number: leaf[number], packed)
        alone = jax.jit(model.apply)(unpack(zoo, row, number), x)
        close(logits[number], alone)
        close(one(row, x), alone)
        close(headed(row, x), alone)
    assert apply._cache_size() == one._cache_size() == 1


@pytest.mark.parametrize("number", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2))])
def test_training_equals_that_of_the_network_itself(zoo, constants, close, number):
    """Includes BatchNorm's statistics, dropout, momentum and uneven batches. Padding remains zero."""
    model, setting, key = zoo.networks[number], constants.problem.local, jax.random.key(3)
    start = numbers_like(model.shapes())

    def train_and_score(network, variables):
        @jax.jit
        def program(variables):
            trained, metrics = local.train(network, setting, variables, data_of(constants, 0), key)
            return trained, metrics, local.score(network, trained, data_of(constants, 1), batch_size=2)

        return program(variables)

    trained, metrics, score = train_and_score(zoo, pack(zoo, start, number))
    plain, own, its_score = train_and_score(model, start)
    close(unpack(zoo, trained, number), plain)
    close(metrics, own)
    close(trained, pack(zoo, plain, number))
    close(score, its_score)


@pytest.mark.slow
@pytest.mark.parametrize("devices, lanes", [(2, 1), pytest.param(1, 6, marks=pytest.mark.slow)])
def test_clients_of_different_networks_train_alike_on_every_layout(engine, close, devices, lanes):
    one, other = (
        engine("local", "linear,perceptron", cohort=6),
        engine("local", "linear,perceptron", cohort=6, devices=devices, lanes=lanes),
    )
    first, report = one.run(one.init(), 2)
    second, other_report = other.run(other.init(), 2)
    close(first, second, rtol=1e-3, atol=1e-4)
    close(report, other_report, rtol=1e-3)
    assert {program.traces for program in (*one.programs.values(), *other.programs.values())} == {1}


def test_no_branch_of_another_network_runs_in_one_lane(engine):
    """The compiled clients select by a conditional; they do not compute all networks."""
    engine = engine("local", "linear,perceptron", cohort=6, devices=2, lanes=1)
    engine.run(engine.init(), 1)
    assert "conditional" in engine.programs.compiled("clients").as_text()


class Counting(nn.Module):
    """A network with an integer variable."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        self.variable("batch_stats", "count", lambda: jnp.zeros((), jnp.int32))
        return jnp.zeros((x.shape[0], 3))


def test_whole_numbers_among_the_variables_are_refused():
    with pytest.raises(UserError, match="counting has variables that are not floats"):
        models.Zoo.of([models.Model(Counting(), (4, 4, 1), name="counting")])


def test_sizes(zoo):
    assert zoo.num_parameters() == max(model.num_parameters() for model in zoo.networks)
    assert zoo.num_bytes().tolist() == [
        sum(4 * leaf.size for leaf in jax.tree.leaves(model.shapes())) for model in zoo.networks
    ]
    assert zoo.layers() == ()
