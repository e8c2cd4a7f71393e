"""The U-Net: shapes, skip connections, gradients, sizes of any kind, and a round of FedMR with the loss of its task."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr import models, tasks, trees
from fedjax_mr.errors import UserError
from fedjax_mr.models import unet
from fedjax_mr.models.blocks import ConvBlock, head
from fedjax_mr.strategies import fedmr
from fedjax_mr.strategies.parts import Models
from fedjax_mr.testing.federations import first_cohort, network_of, numbers_like

TASK = tasks.Segmentation(width=3)


def small(shape=(6, 5, 2), levels=2, **options):
    return models.Model(unet.UNet(3, width=2, levels=levels, **options), shape, name="unet", task=TASK)


@functools.cache
def started(norm="batch"):
    model = small(norm=norm)
    return model, numbers_like(model.shapes())


class PixelByPixel(models.BlockNet):
    """A linear function of each pixel."""

    def blocks(self):
        return ("conv", ConvBlock(2, 1)), ("classifier", head(3, initialisation="torch", flatten=False))


def images(count, shape=(6, 5, 2)):
    return np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (8, 8, 1)])
@pytest.mark.parametrize("levels", [2, 4])
def test_an_image_of_any_size_has_logits_for_each_pixel(shape, levels):
    assert small(shape, levels=levels).output_shape() == (*shape[:2], 3)


def test_the_layers_stand_in_forward_order_and_each_level_has_its_width():
    model = models.build("unet", input_shape=(16, 16, 1), task=TASK)
    parts = ["conv1", "norm1", "conv2", "norm2"]
    levels = ["down1", "down2", "down3", "up2", "up1"]
    expected = [f"{level}/{part}" for level in levels for part in parts]
    assert [layer.name for layer in model.layers()] == [*expected, "classifier/dense"]
    params = model.shapes()["params"]
    shapes = [params[level]["conv1"]["kernel"].shape[2:] for level in levels]
    assert shapes == [(1, 16), (16, 32), (32, 64), (64 + 32, 32), (32 + 16, 16)]
    assert model.head_name() == "classifier"


def test_pooling_and_enlarging_of_odd_sizes():
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3, 1)
    halved, doubled = jax.jit(unet.halved), jax.jit(unet.doubled)
    assert_array_equal(halved(x)[0, :, :, 0], [[4, 5]])
    assert_array_equal(halved(-x)[0, :, :, 0], [[0, -2]])  # the padding is never the maximum
    assert_array_equal(doubled(x)[0, :, :, 0], np.repeat(np.repeat(np.arange(6).reshape(2, 3), 2, 0), 2, 1))


def test_every_level_reaches_the_output():
    """A pixel's logits depend on its own level, by the skip connection, and on pixels far away, by the coarsest one."""
    model = small((16, 16, 1), levels=3, norm="group")
    variables = numbers_like(model.shapes())
    apply = jax.jit(model.apply)
    for level in ("down1", "down2", "down3"):
        nothing = jax.tree.map(np.zeros_like, variables["params"][level])
        without = variables | {"params": variables["params"] | {level: nothing}}
        both = [apply(each, images(1, (16, 16, 1))) for each in (variables, without)]
        assert np.abs(both[0] - both[1]).max() > 1e-3, level


def written_plainly(params, x):
    """The network of two levels with GroupNorm, of JAX's own operations."""

    def level(name, x):
        for number in (1, 2):
            kernel, norm = params[name][f"conv{number}"]["kernel"], params[name][f"norm{number}"]
            x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            groups = x.reshape(*x.shape[:3], 2, -1)
            mean, var = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
            x = ((groups - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
            x = nn.relu(x * norm["scale"][None, None, None] + norm["bias"][None, None, None])
        return x

    fine = level("down1", x)
    coarse = level("down2", nn.max_pool(fine, (2, 2), (2, 2), "SAME"))
    large = jnp.repeat(jnp.repeat(coarse, 2, 1), 2, 2)[:, : x.shape[1], : x.shape[2]]
    dense = params["classifier"]["dense"]
    return level("up1", jnp.concatenate([fine, large], -1)) @ dense["kernel"] + dense["bias"][None, None, None]


def test_outputs_and_gradients_are_those_of_plain_operations():
    model, variables = started("group")
    x, y, mask = images(3), np.random.default_rng(1).integers(0, 3, (3, 6, 5)).astype(np.int32), np.ones(3, np.float32)
    ours = lambda params: model.train_apply(params, {}, x, mask=mask, key=jax.random.key(0))[0]
    plain = lambda params: written_plainly(params, x)
    results = [
        jax.jit(jax.value_and_grad(lambda params, f=function: TASK.loss(f(params), y, mask).sum()))(variables["params"])
        for function in (ours, plain)
    ]
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-5), *results)


def test_padding_of_a_batch_changes_nothing():
    """Neither the outputs nor the statistics of BatchNorm."""
    model, variables = started()
    state = {"batch_stats": variables["batch_stats"]}
    train = lambda x, mask: model.train_apply(variables["params"], state, x, mask=mask, key=jax.random.key(0))
    alone = jax.jit(train)(images(3), np.ones(3, np.float32))
    padded = jax.jit(train)(images(5), np.array([1, 1, 1, 0, 0], np.float32))
    assert_allclose(padded[0][:3], alone[0], rtol=1e-4, atol=1e-4)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-5), padded[1], alone[1])


@pytest.mark.slow
def test_a_round_of_fedmr_learns_and_mixes_whole_layers(federation):
    """Three clients take steps on masks of their own images, then the server exchanges layers."""
    model, variables = started("group")
    x = images(3)
    y = (x[..., 0] > 0).astype(np.int32) + (x[..., 1] > 1)
    problem = dataclasses.replace(federation("linear").problem, model=model, layers=model.layers(), cohort_size=3)
    strategy = fedmr.build(fedmr.Hyper(unit="layer"), problem)

    def loss(params, x, y):
        outputs, _ = model.train_apply(params, {}, x[None], mask=jnp.ones(1), key=jax.random.key(0))
        return TASK.objective(outputs, y[None], jnp.ones(1))[0]

    @jax.jit
    def train(models, x, y):
        def step(params, _):
            value, gradient = jax.value_and_grad(loss)(params, x, y)
            return trees.add(params, trees.scale(gradient, -0.3)), value

        params, losses = jax.lax.scan(step, models["params"], length=25)
        return {"params": params}, losses

    start = jax.tree.map(lambda leaf: np.stack([leaf] * 3), variables)
    trained, losses = jax.device_get(jax.vmap(train)(start, x, y.astype(np.int32)))
    assert np.all(losses[:, -1] < 0.8 * losses[:, 0])
    update = jax.jit(strategy.server_update)
    mixed, _ = update(Models(start), {"model": trained}, first_cohort(problem), 0, jax.random.key(0))
    before, after = jax.tree.leaves(trained), jax.tree.leaves(mixed.models)
    owners = []
    for layer in model.layers():
        rows = [b"".join(np.asarray(before[leaf][row]).tobytes() for leaf in layer.leaves) for row in range(3)]
        new = [b"".join(np.asarray(after[leaf][row]).tobytes() for leaf in layer.leaves) for row in range(3)]
        owners.append(tuple(map(rows.index, new)))
    assert all(sorted(each) == [0, 1, 2] for each in owners)
    assert len(set(owners)) > 2


def test_what_does_not_fit_is_one_line():
    for name, options, message in (
        ("mlp", {"task": TASK}, "mlp returns 3 numbers per sample, but segmentation needs 16x16x3: use unet"),
        ("unet", {"num_classes": 3}, "unet returns 16x16x3 numbers per sample, but classification needs 3: use a net"),
        ("unet", {"task": TASK, "projection": 8}, "projection=8: unet has no representation to project"),
        ("unet", {"task": TASK, "authors_state": True}, "authors_state=True does not apply to the model unet"),
        ("unet", {"task": TASK, "input_shape": (16,)}, "unet needs images"),
        ("mlp", {}, "a network needs num_classes= or task="),
    ):
        with pytest.raises(UserError) as error:
            models.build(name, **({"input_shape": (16, 16, 1)} | options))
        assert message in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.slow
def test_networks_of_a_zoo_learn_one_task():
    zoo = models.Zoo.of([small(norm="group"), models.Model(PixelByPixel(3), (6, 5, 2), name="pixels", task=TASK)])
    assert zoo.task == TASK and zoo.output_shape() == (6, 5, 3)
    variables = jax.jit(zoo.pack, static_argnums=1)(numbers_like(zoo.networks[1].shapes()), 1)
    headed = lambda variables, x: zoo.head(variables, zoo.features(variables, x))
    both = jax.jit(lambda *arguments: (headed(*arguments), zoo.apply(*arguments)))
    assert_allclose(*both(variables, images(2)), rtol=1e-5, atol=1e-6)
    linear = network_of("linear")
    with pytest.raises(UserError, match=r"several networks must learn one task, but unet learns .*segmentation"):
        models.Zoo.of([small(), dataclasses.replace(linear, input_shape=(6, 5, 2))])
