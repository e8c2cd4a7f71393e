"""Slices of networks: their contents, their training, and errors for layers that cannot be cut."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_mr import models, trees
from fedjax_mr.errors import UserError
from fedjax_mr.models import MODELS, Model
from fedjax_mr.models.__main__ import multiply_adds
from fedjax_mr.models.slices import Level, floor, slices

HALVES = Level(1.0), Level(0.5), Level(0.3, full=0.5)
SHARES = Level(1.0), Level(0.5), Level(0.3)


class Branches(nn.Module):
    """A network with all structures that slices support: shortcut, concatenation, flattening, normalisation."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Conv(4, (3, 3), name="first")(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, name="norm")(x))
        y = nn.Conv(4, (3, 3), name="second")(y) + x
        y = jnp.concatenate([nn.relu(y), nn.tanh(nn.Conv(2, (1, 1), name="third")(x))], axis=-1)
        return nn.Dense(3, name="last")(y.reshape(y.shape[0], -1))


def network(module, shape=(2, 2, 1)):
    return Model(module, shape, name="net")


def test_a_slice_follows_shortcuts_concatenations_and_flattening():
    parts = slices(network(Branches()), HALVES)
    half, most = jax.device_get(jax.jit(lambda: [parts.masks(level) for level in (1, 2)])())
    masks = half["params"]
    four, two = [True, True, False, False], [True, False]
    assert masks["first"]["bias"].tolist() == masks["norm"]["scale"].tolist() == four
    np.testing.assert_array_equal(masks["second"]["kernel"][0, 0], np.outer(four, four))
    np.testing.assert_array_equal(masks["third"]["kernel"][0, 0], np.outer(four, two))
    np.testing.assert_array_equal(masks["last"]["kernel"][:, 0], 4 * (four + two))
    assert masks["last"]["bias"].shape == (3,) and masks["last"]["bias"].all()
    assert half["batch_stats"]["norm"]["mean"].tolist() == four
    # The third level has half of three blocks, one, whole: 4, then ceil(0.3 x 4) = 2, then ceil(0.3 x 2) = 1.
    assert most["params"]["first"]["bias"].all()
    np.testing.assert_array_equal(most["params"]["second"]["bias"], four)
    # 1x3x3x4+4, 4x4, 4x3x3x4+4, 4x2+2, 24x3+3 numbers; each convolution at 4 places.
    assert parts.numbers()[0] == 40 + 16 + 148 + 10 + 75
    assert parts.numbers(collections=("params",))[1] == 20 + 4 + 38 + 3 + 39
    np.testing.assert_array_equal(parts.multiply_adds[:2], [4 * (36 + 144 + 8) + 72, 4 * (18 + 36 + 2) + 36])
    assert parts.within().tolist() == [[True, False, False], [True, True, True], [True, False, True]]


def gradient_outside(model, parts, level, key):
    """The largest absolute gradient of a slice's loss outside the slice."""
    variables = jax.tree.map(lambda leaf: leaf + 0.1, model.init(key))
    variables = parts.cut(variables, level)
    state = {name: tree for name, tree in variables.items() if name != "params"}
    x = jax.random.normal(key, (4, *model.input_shape))

    def loss(params):
        return jnp.sum(jnp.square(model.train_apply(params, state, x, mask=jnp.ones(4), key=key)[0]))

    outside = lambda gradient, mask: jnp.max(jnp.where(mask, 0.0, jnp.abs(gradient)))
    largest = jax.tree.map(outside, jax.grad(loss)(variables["params"]), parts.masks(level)["params"])
    return jax.tree.reduce(jnp.maximum, largest)


@pytest.mark.parametrize(
    "name",
    [
        "perceptron",
        pytest.param("thin", marks=pytest.mark.slow),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("cnn_digits", "lenet5", "cnn_mcmahan", "resnet20", "resnet20_he", "pfedhr_m4")
        ),
    ],
)
def test_a_slice_trains_as_a_network_of_its_own(federation, name):
    """There is no gradient outside the slice, even without `confine`."""
    if name in MODELS:
        entry = MODELS[name]
        model = models.build(name, input_shape=entry.input_shape, num_classes=entry.num_classes)
    else:
        model = federation(name).problem.model
    parts = slices(model, SHARES)
    assert parts.multiply_adds[0] == multiply_adds(model)
    assert parts.numbers()[0] == trees.num_bytes(model.shapes()) // 4
    outside = jax.jit(lambda level, key: gradient_outside(model, parts, level, key))
    for level in range(len(SHARES)):
        assert float(outside(jnp.int32(level), jax.random.key(level))) == 0.0


@pytest.mark.slow
def test_a_confined_loss_has_no_gradient_outside():
    """Also with a shortcut that is wider than the output added to it."""
    model = network(Branches())
    parts, variables = slices(model, HALVES), model.init(jax.random.key(0))
    loss = lambda params: jnp.sum(model.apply(variables | {"params": params}, jnp.ones((1, 2, 2, 1))))
    gradient = jax.jit(jax.grad(parts.confine(loss, jnp.int32(2))))(variables["params"])["second"]["kernel"]
    assert np.any(gradient[..., :2]) and not np.any(gradient[..., 2:])


@pytest.mark.slow
def test_a_slice_computes_what_a_network_of_half_the_width_does():
    facts = {"input_shape": (32, 32, 3), "num_classes": 10}
    whole, half = (models.build(name, **facts) for name in ("lenet5", "lenet5_small"))
    parts = slices(whole, (Level(0.5),))
    assert parts.numbers()[0] == half.num_parameters()
    variables, x = whole.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (3, 32, 32, 3))
    masks = jax.tree.map(lambda leaf, mask: np.broadcast_to(mask, leaf.shape), variables, parts.masks(jnp.int32(0)))
    own = jax.tree.map(lambda leaf, mask, shape: leaf[mask].reshape(shape.shape), variables, masks, half.shapes())
    np.testing.assert_allclose(whole.apply(parts.cut(variables, 0), x), half.apply(own, x), atol=1e-6)


def test_rounding():
    assert [floor(0.4 * each) for each in (1, 5, 64)] == [1, 2, 25]


class Grouped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.GroupNorm(2)(nn.Dense(4)(x)))


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Embed(5, 4)(x).mean(1))


class InGroups(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (1,), feature_group_count=2, name="split")(nn.Dense(4)(x)[:, None])
        return nn.Dense(3)(x[:, 0])


@pytest.mark.parametrize(
    "module, message",
    [(Grouped(), "norm=batch"), (Embedded(), "use another network"), (InGroups(), "mixes its channels in groups")],
)
def test_what_cannot_be_narrowed_is_refused_with_one_line(module, message):
    model = Model(module, (4,), np.int32 if isinstance(module, Embedded) else np.float32, name="net")
    with pytest.raises(UserError, match=f"net cannot be narrowed: layer .* {message}") as refused:
        slices(model, HALVES)
    assert "\n" not in str(refused.value)
