"""Convolution and pooling, compared with JAX's operations and PyTorch's conventions."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr.errors import UserError
from fedjax_mr.models import platforms, windows

NHWC = ("NHWC", "HWIO", "NHWC")


def plain_conv(x, kernel, *, strides=1, padding="SAME"):
    if isinstance(padding, int):
        padding = ((padding, padding), (padding, padding))
    return lax.conv_general_dilated(x, kernel, (strides, strides), padding, dimension_numbers=NHWC)


def images(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def value_and_gradients(function, *arguments):
    """The value, and the gradients of a sum with a different weight for every output."""

    def loss(*arguments):
        y = function(*arguments)
        return jnp.sum(y * np.sin(np.arange(y.size, dtype=np.float32)).reshape(y.shape)), y

    (_, value), gradients = jax.value_and_grad(loss, tuple(range(len(arguments))), has_aux=True)(*arguments)
    return value, gradients


def of_both(one, other, *arguments):
    """`value_and_gradients` of two functions, in one program."""
    return jax.jit(lambda *each: (value_and_gradients(one, *each), value_and_gradients(other, *each)))(*arguments)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("padding", ["SAME", "VALID", 1, ((2, 0), (1, 3))])
@pytest.mark.parametrize("strides", [1, 2])
def test_convolution_and_its_gradients_are_the_plain_ones(strides, padding, kernel):
    x, w = images(2, 6, 7, 3), images(kernel, kernel, 3, 4, seed=1)
    options = {"strides": strides, "padding": padding}
    results = of_both(functools.partial(windows.conv, **options), functools.partial(plain_conv, **options), x, w)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-5), *results)


@pytest.mark.parametrize(("extent", "window", "padding", "strides"), [
    ((9, 14), 5, "VALID", 1), ((8, 13), 3, "SAME", 1), ((8, 16), 3, 1, 2), ((7, 9), 1, 0, 1), ((6, 6), 5, 2, 2),
])  # fmt: skip
@pytest.mark.parametrize("features", [4, 40, 300])  # runs of all columns, of a few, and of one
def test_the_convolution_of_gpus_is_the_plain_one(extent, window, padding, strides, features):
    x, w = images(2, *extent, 3), images(window, window, 3, features, seed=1)
    options = {"strides": strides, "padding": padding}
    with platforms.tracing_for("gpu"):
        own = functools.partial(windows.conv, **options)
        program = str(jax.make_jaxpr(own)(x, w))
        results = of_both(own, functools.partial(plain_conv, **options), x, w)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-4), *results)
    assert "conv_general_dilated" not in program


def test_a_large_convolution_of_gpus_is_that_of_the_library():
    x, w = np.zeros((50, 32, 32, 64), np.float32), np.zeros((3, 3, 64, 64), np.float32)
    with platforms.tracing_for("gpu"):
        assert "conv_general_dilated" in str(jax.make_jaxpr(windows.conv)(x, w))
        assert "conv_general_dilated" not in str(jax.make_jaxpr(windows.conv)(x[:10], w))


@pytest.mark.parametrize(("extent", "window", "padding", "strides"), [
    ((1, 1), 3, 1, 1), ((2, 2), 3, 1, 1), ((2, 2), 3, 1, 2), ((1, 4), 3, "SAME", 1), ((3, 3), 5, 2, 2),
    ((2, 1), 5, ((2, 4), (3, 1)), 1), ((4, 4), 5, ((0, 1), (2, 0)), 1),
])  # fmt: skip
def test_images_smaller_than_the_kernel_are_not_multiplied_with_their_padding(extent, window, padding, strides):
    x, w = images(2, *extent, 3), images(window, window, 3, 4, seed=1)
    options = {"strides": strides, "padding": padding}
    own = functools.partial(windows.conv, **options)
    results = of_both(own, functools.partial(plain_conv, **options), x, w)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-5), *results)
    products = [each for each in jax.make_jaxpr(own)(x, w).eqns if each.primitive.name == "dot_general"]
    outputs = results[0][0][0].size
    assert [math.prod(each.invars[1].aval.shape) for each in products] == [3 * math.prod(extent) * outputs]
    with windows.convolutions("direct"):  # each output has all taps
        program = jax.make_jaxpr(functools.partial(windows.conv, **options))(x, w)
    assert "custom_vjp_call" in [each.primitive.name for each in program.eqns]


def test_second_derivatives_of_the_convolution():
    x, w = images(2, 5, 5, 2), images(3, 3, 2, 3, seed=1)

    def curvature(conv, x, w):
        inner = jax.grad(lambda w: jnp.sum(jnp.tanh(conv(x, w, strides=2, padding=1))))
        return jax.grad(lambda w: jnp.sum(inner(w) ** 2))(w)

    both = jax.jit(lambda x, w: [curvature(conv, x, w) for conv in (windows.conv, plain_conv)])
    assert_allclose(*both(x, w), rtol=1e-4, atol=1e-5)


def test_vmap_over_kernels_of_clients_inside_a_loop_equals_one_client_at_a_time():
    x, w = images(3, 2, 6, 6, 2), images(3, 3, 3, 2, 2, seed=1)

    def train(x, w):
        def step(_, w):
            return w - 0.1 * jax.grad(lambda w: jnp.mean(windows.conv(x, w, strides=2, padding=1) ** 2))(w)

        return lax.fori_loop(0, 3, step, w)

    assert_allclose(
        jax.jit(jax.vmap(train))(x, w),
        jax.jit(lambda x, w: lax.map(lambda each: train(*each), (x, w)))(x, w),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "size", [pytest.param(6, marks=pytest.mark.slow), 2]
)  # a small image goes the way of a product
def test_convolution_inside_shard_map(size):
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("clients",))
    x, w = images(len(devices), 2, size, size, 2), images(len(devices), 3, 3, 2, 2, seed=1)

    def gradients(x, w):
        return jax.vmap(jax.grad(lambda w, x: jnp.sum(windows.conv(x, w) ** 2)))(w, x)

    spec = PartitionSpec("clients")
    sharded = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(spec, spec), out_specs=spec))(x, w)
    assert_allclose(sharded, jax.jit(gradients)(x, w), rtol=1e-5, atol=1e-5)

    shared = jax.shard_map(
        lambda x, w: windows.conv(x[0], w)[None], mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    one_by_one = jax.jit(lambda x, w: jnp.stack([windows.conv(each, w) for each in x]))
    w = w[0]
    assert_allclose(jax.jit(shared)(x, w), one_by_one(x, w), rtol=1e-5, atol=1e-5)


def reduce_windows(x, window, strides, padding):
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, strides, strides, 1), pads)


@pytest.mark.parametrize(("window", "strides", "padding"), [(2, 2, 0), (3, 3, 0), (2, 1, 0), (3, 2, 0), (3, 1, 1)])
def test_pooling_is_reduce_window(window, strides, padding):
    x = images(2, 6, 7, 3)  # without ties, so that the gradients agree too
    own = lambda x: windows.max_pool(x, window, strides=strides, padding=padding)
    results = of_both(own, lambda x: reduce_windows(x, window, strides, padding), x)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-6), *results)


@pytest.mark.parametrize("window", [2, pytest.param((3, 2), marks=pytest.mark.slow)])
def test_second_derivatives_of_pooling(window):
    x = images(2, 7, 6, 3)

    def curvature(pool):
        inner = jax.grad(lambda x: jnp.sum(jnp.sin(pool(x))))
        return jax.jit(jax.grad(lambda x: jnp.sum(inner(x) ** 2)))(x)

    def plain(x):
        h, w = windows.pair(window)
        tiles = x[:, : 7 // h * h].reshape(2, 7 // h, h, 6 // w, w, 3)
        return jnp.max(tiles, axis=(2, 4))

    assert_allclose(curvature(lambda x: windows.max_pool(x, window)), curvature(plain), rtol=1e-5, atol=1e-6)


def test_pooling_inside_shard_map():
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("clients",))
    x = images(len(devices), 2, 4, 4, 3)
    gradients = jax.vmap(jax.grad(lambda x: jnp.sum(windows.max_pool(x, 2) ** 2)))
    spec = PartitionSpec("clients")
    sharded = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec))(x)
    assert_allclose(sharded, jax.jit(gradients)(x), rtol=1e-6)


def test_the_first_of_equal_maxima_takes_the_gradient():
    images = np.array([[0, 1], [1, -1]], np.float32).reshape(1, 2, 2, 1)
    gradient = jax.jit(jax.grad(lambda x: windows.max_pool(x, 2).sum()))(images)
    assert_array_equal(np.ravel(gradient), [0.0, 1.0, 0.0, 0.0])


def test_pooling_shows_what_is_not_a_number():
    pool = jax.jit(lambda x: windows.max_pool(x, 2))
    for position in range(4):
        image = np.ones(4, np.float32)
        image[position] = np.nan
        assert np.isnan(pool(image.reshape(1, 2, 2, 1))).all()


def test_no_window_gradient_scatters():
    for strides in (1, 2):
        text = (
            jax.jit(jax.grad(lambda x, s=strides: windows.max_pool(x, 2, strides=s).sum()))
            .lower(images(1, 4, 4, 1))
            .as_text()
        )
        assert "scatter" not in text


def test_too_small_images_are_refused():
    with pytest.raises(UserError, match="5x5 convolution does not fit into feature maps of 4x9"):
        windows.conv(images(1, 4, 9, 1), images(5, 5, 1, 1), padding="VALID")
    with pytest.raises(UserError, match="2x2 pooling window does not fit into feature maps of 1x4"):
        windows.max_pool(images(1, 1, 4, 1), 2)


@pytest.mark.parametrize(
    ("channels", "features"),
    [(1, 6), (6, 16), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, 6), (16, 32)))],
)
@pytest.mark.parametrize(("extent", "window", "padding"), [(14, 5, "VALID"), (13, 5, 0), (9, 3, 1), (8, 4, "SAME")])
def test_folded_blocks_change_nothing(extent, window, padding, channels, features):
    x, w = images(2, extent, extent, channels), images(window, window, channels, features, seed=1)
    options = {"padding": padding}
    results = of_both(functools.partial(windows.conv, **options), functools.partial(plain_conv, **options), x, w)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-4), *results)
