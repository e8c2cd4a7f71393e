"""Layers, compared with the layers of Flax and the conventions of PyTorch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr.errors import UserError
from fedjax_mr.keys import threefry
from fedjax_mr.models import layers, platforms, windows
from fedjax_mr.testing.federations import numbers_like


def images(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def init(layer, x):
    """Initialise the variables of a layer in one compiled program."""
    return jax.device_get(jax.jit(layer.init)(jax.random.key(0), x))


# ---- Initialisation


@pytest.mark.parametrize(
    ("layer", "shape", "fan_in"), [(layers.Conv(64, 3), (1, 8, 8, 16), 144), (layers.Dense(500), (1, 100), 100)]
)
def test_default_initialisation_is_pytorch_s(layer, shape, fan_in):
    params = init(layer, np.zeros(shape, np.float32))["params"]
    bound = fan_in**-0.5
    for leaf in params.values():
        assert np.abs(leaf).max() <= bound
        assert_allclose(np.std(leaf), bound / 3**0.5, rtol=0.15)


def test_other_initialisations():
    x = np.zeros((1, 8, 8, 16), np.float32)
    flax_params = init(layers.Conv(64, 3, initialisation="flax"), x)["params"]
    assert_allclose(np.std(flax_params["kernel"]), (1 / 144) ** 0.5, rtol=0.05)
    he = init(layers.Conv(64, 3, initialisation="he"), x)["params"]
    assert_allclose(np.std(he["kernel"]), (2 / (9 * 64)) ** 0.5, rtol=0.05)
    assert not flax_params["bias"].any()
    assert not he["bias"].any()
    with pytest.raises(UserError, match="did you mean 'torch'"):
        layers.initializers("toch", 1)


# ---- Normalisation


@pytest.fixture(scope="module")
def batch_norm():
    module = layers.BatchNorm(scale_init=0.5)
    variables = init(module, np.zeros((1, 3, 3, 4), np.float32))
    apply = jax.jit(lambda v, x, mask: module.apply(v, x, train=True, mask=mask, mutable=["batch_stats"]))
    return module, variables, apply


def test_batch_norm_counts_only_true_samples(batch_norm):
    _, variables, apply = batch_norm
    x = images(5, 3, 3, 4)
    padded = np.concatenate([x, 100 + images(3, 3, 3, 4, seed=1)])
    mask = np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32)
    y, state = apply(variables, x, None)
    padded_y, padded_state = apply(variables, padded, mask)
    assert_allclose(np.asarray(padded_y)[:5], y, rtol=1e-5, atol=1e-6)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-5, atol=1e-6), padded_state, state)

    def loss(x, mask):
        y, _ = apply(variables, x, mask)
        return jnp.sum(y[:5] ** 3)

    gradient = np.asarray(jax.jit(jax.grad(loss))(padded, mask))
    assert_allclose(gradient[:5], jax.jit(jax.grad(loss))(x, None), rtol=1e-4, atol=1e-6)
    assert_array_equal(gradient[5:], 0)


def test_batch_norm_without_true_samples_keeps_the_statistics(batch_norm):
    _, variables, apply = batch_norm
    y, state = apply(variables, images(2, 3, 3, 4), np.zeros(2, np.float32))
    jax.tree.map(assert_array_equal, state["batch_stats"], variables["batch_stats"])
    assert np.isfinite(y).all()


def test_batch_norm_is_pytorch_s(batch_norm):
    torch = pytest.importorskip("torch", reason="parity with PyTorch needs the extra: pip install 'fedjax-mr[parity]'")
    module, variables, apply = batch_norm
    twin = torch.nn.BatchNorm2d(4)
    torch.nn.init.constant_(twin.weight, 0.5)
    for seed in range(3):
        x = 2 + 3 * images(4, 3, 3, 4, seed=seed)
        y, state = apply(variables, x, None)
        variables = {**variables, **state}
        expected = twin(torch.tensor(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        assert_allclose(y, expected.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert_allclose(state["batch_stats"]["mean"], twin.running_mean.numpy(), rtol=1e-5)
    assert_allclose(state["batch_stats"]["var"], twin.running_var.numpy(), rtol=1e-5)
    expected = twin.eval()(torch.tensor(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
    assert_allclose(jax.jit(module.apply)(variables, x), expected.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_batch_norm_counts_batches_without_effect(batch_norm):
    _, variables, apply = batch_norm
    module = layers.BatchNorm(scale_init=0.5, counted=True)
    x = images(4, 3, 3, 4)
    train = jax.jit(lambda v, mask: module.apply(v, x, train=True, mask=mask, mutable=["batch_stats"]))
    counted, everyone = init(module, x), np.ones(4, np.float32)
    for seen in (1, 2):
        y, state = train(counted, everyone)
        counted = {**counted, **state}
        assert state["batch_stats"]["count"] == seen
    _, state = train(counted, np.zeros(4, np.float32))
    assert state["batch_stats"]["count"] == 2
    assert_allclose(y, apply(variables, x, everyone)[0], rtol=1e-5, atol=1e-6)


def test_group_norm_ignores_the_rest_of_the_batch():
    module = layers.norm_layer("group")
    x = images(3, 4, 4, 6)
    variables = init(module, x)
    assert set(variables) == {"params"}
    together = np.asarray(jax.jit(lambda v: module.apply(v, x, train=True, mask=jnp.ones(3)))(variables))
    assert_allclose(together[1:2], jax.jit(module.apply)(variables, x[1:2]), rtol=1e-5, atol=1e-6)
    groups = together.reshape(3, 16, 2, 3)
    assert_allclose(groups.mean((1, 3)), 0, atol=1e-5)
    assert_allclose(groups.var((1, 3)), 1, rtol=1e-3)


def test_unknown_normalisation_is_refused():
    with pytest.raises(UserError, match="unknown norm 'bach'; did you mean 'batch'"):
        layers.norm_layer("bach")


def test_layers_have_flax_s_parameter_names():
    def names(layer, *shape):
        return set(jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.zeros(shape)))["params"])

    assert names(layers.Conv(2), 1, 4, 4, 1) == {"kernel", "bias"}
    assert names(layers.Conv(2, use_bias=False), 1, 4, 4, 1) == {"kernel"}
    assert names(layers.Dense(2), 1, 4) == {"kernel", "bias"}


@pytest.mark.parametrize("strides", [None, 1])
def test_pooling_before_the_bias_changes_nothing(strides):
    x = images(2, 6, 6, 3)
    conv = layers.Conv(4, 3)
    variables = numbers_like(jax.eval_shape(conv.init, jax.random.key(0), x))

    def after(variables):
        return windows.max_pool(conv.apply(variables, x), 2, strides=strides)

    def before(variables):
        return layers.Conv(4, 3, pool=2, pool_strides=strides).apply(variables, x)

    weights = images(*jax.eval_shape(before, variables).shape, seed=1)

    @jax.jit
    def outputs_and_gradients(variables):
        return [(f(variables), jax.grad(lambda v, f=f: jnp.sum(weights * f(v)))(variables)) for f in (before, after)]

    (found, gradient), (expected, its_gradient) = outputs_and_gradients(variables)
    assert_allclose(found, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-5), gradient, its_gradient)


def test_dense_is_flax_s():
    x = images(3, 5)
    variables = numbers_like(jax.eval_shape(layers.Dense(4).init, jax.random.key(0), x))
    ours, theirs = (jax.jit(layer.apply)(variables, x) for layer in (layers.Dense(4), nn.Dense(4)))
    assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("mask", [(1, 1, 1, 1, 0, 0), (1, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1)])
def test_batch_norm_for_accelerators_is_that_of_cpus(mask):
    """One pass with explicit gradients equals two passes with autodiff, including running statistics."""
    rng = np.random.default_rng(0)
    x = (3 * rng.normal(size=(6, 5, 5, 4)) + 10).astype(np.float32)
    target, mask = rng.normal(size=x.shape).astype(np.float32), np.array(mask, np.float32)
    norm = layers.BatchNorm()
    params = {"scale": np.array([1, 2, 0.5, -1], np.float32), "bias": np.ones(4, np.float32)}
    statistics = {"mean": np.array([9, 10, 0, 12], np.float32), "var": np.ones(4, np.float32)}

    def loss(params, x):
        variables = {"params": params, "batch_stats": statistics}
        out, new = norm.apply(variables, x, train=True, mask=mask, mutable=["batch_stats"])
        new = new["batch_stats"]
        return jnp.sum(jnp.sin(out) * target) + jnp.sum(new["mean"] ** 2) + jnp.sum(new["var"] ** 2), new

    def all_of(platform):
        with platforms.tracing_for(platform):
            return jax.jit(jax.value_and_grad(lambda *args: loss(*args), argnums=(0, 1), has_aux=True))(params, x)

    jax.tree.map(
        lambda a, b: assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max()),
        all_of("gpu"),
        all_of("cpu"),
    )


# ---- Products of sequences


def test_the_gradients_of_products_are_those_of_jax():
    rng = np.random.default_rng(0)
    for shapes in (((7, 5), (5, 3)), ((7, 3), (3, 5)), ((2, 4, 7, 5), (2, 4, 5, 3)), ((2, 4, 7, 3), (2, 4, 3, 5))):
        a, b = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
        own, plain = (
            jax.jit(jax.value_and_grad(lambda a, b, f=function: jnp.sum(jnp.sin(f(a, b))), (0, 1)))(a, b)
            for function in (layers.product, jnp.matmul)
        )
        jax.tree.map(functools.partial(assert_allclose, rtol=1e-5, atol=1e-6), own, plain)


def test_second_derivatives_of_a_dense_layer_of_sequences():
    layer, x = layers.Dense(3), np.random.default_rng(0).normal(size=(2, 4, 5)).astype(np.float32)
    params = init(layer, x)["params"]
    plain = lambda params: jnp.sum(jnp.tanh(x @ params["kernel"] + params["bias"].reshape(1, 1, -1)) ** 3)
    ours = lambda params: jnp.sum(jnp.tanh(layer.apply({"params": params}, x)) ** 3)
    own, expected = (
        jax.jit(jax.grad(lambda p, f=f: sum(map(jnp.sum, jax.tree.leaves(jax.grad(f)(p))))))(params)
        for f in (ours, plain)
    )
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-5), own, expected)


def test_the_gradient_of_a_kernel_is_not_computed_from_transposed_sequences():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(3):
                x = x + nn.tanh(layers.Dense(16)(nn.LayerNorm()(x)))
            return x

    x = np.zeros((3, 7, 16), np.float32)
    params = init(Layers(), x)["params"]
    loss = lambda params: jnp.sum(jnp.square(Layers().apply({"params": params}, x)))
    text = jax.jit(jax.grad(loss)).lower(params).compile().as_text()
    assert "f32[21,16]" in text and "f32[16,21]" not in text  # 3 x 7 tokens


# ---- Dropout


def test_dropout_draws_the_blocks_of_threefry():
    key, count = jax.random.key(3), np.arange(24, dtype=np.uint32)
    words = threefry(jax.random.key_data(key), (count, count + np.uint32(24)))
    expected = threefry_2x32(jax.random.key_data(key), np.arange(48, dtype=np.uint32))
    assert_array_equal(np.concatenate(words), expected)
    first = threefry(jax.random.key_data(key), (count, np.zeros_like(count)))[0]
    assert_array_equal(layers.are_kept(0.75, key, (2, 3, 4)), (np.asarray(first) < 0.75 * 2**32).reshape(2, 3, 4))


def test_dropout_keeps_the_mean_and_draws_independently():
    x, keys = jnp.ones((100, 200)), jax.random.split(jax.random.key(0), 2)
    first, second = (np.asarray(jax.jit(layers.dropped, static_argnums=1)(x, 0.1, key)) for key in keys)
    assert_allclose(np.unique(first), [0, 1 / 0.9], rtol=1e-6)
    assert_allclose(first.mean(), 1, atol=5 * (1 / 9 / x.size) ** 0.5)
    assert_allclose(((first == 0) & (second == 0)).mean(), 0.01, atol=5 * (0.01 / x.size) ** 0.5)
    assert_allclose(((first[1:] == 0) & (first[:-1] == 0)).mean(), 0.01, atol=5 * (0.01 / x.size) ** 0.5)
    assert layers.are_kept(1.0, keys[0], (500,)).all()
    drop = layers.Dropout(0.5)
    apply = lambda train: drop.apply({}, x, train=train, rngs={"dropout": keys[0]})
    assert apply(train=False) is x and (np.asarray(apply(train=True)) == 0).any()
