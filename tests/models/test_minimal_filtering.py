"""Minimal filtering, compared with sums in double precision and with the direct convolution."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from numpy.lib.stride_tricks import sliding_window_view
from numpy.testing import assert_allclose, assert_array_equal

from fedjax_mr import models
from fedjax_mr.errors import UserError
from fedjax_mr.models import minimal_filtering, platforms, windows
from fedjax_mr.models.minimal_filtering import OUTPUTS, TAPS, convolve, matrices


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def direct(x, kernel, pads):
    return lax.conv_general_dilated(x, kernel, (1, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def of_exact_numbers(x, kernel, gradient, pads):
    """Value, gradient of the images and gradient of the kernel in double precision."""
    x, kernel, gradient = (each.astype(np.float64) for each in (x, kernel, gradient))
    h, w = kernel.shape[:2]
    size = x.shape
    # A negative padding crops.
    edges = [(max(low, 0), max(high, 0)) for low, high in pads]
    kept = [slice(max(-low, 0), extent - max(-high, 0)) for (low, high), extent in zip(pads, size[1:3], strict=True)]
    padded = np.pad(x[:, kept[0], kept[1]], ((0, 0), *edges, (0, 0)))
    patches = sliding_window_view(padded, (h, w), (1, 2))  # [B, H', W', I, h, w]
    of_padded = np.zeros_like(padded)
    for row, column in np.ndindex(h, w):
        part = gradient @ kernel[row, column].T
        of_padded[:, row : row + part.shape[1], column : column + part.shape[2]] += part
    of_x = np.zeros(size)
    inner = [slice(low, extent - high) for (low, high), extent in zip(edges, padded.shape[1:3], strict=True)]
    of_x[:, kept[0], kept[1]] = of_padded[:, inner[0], inner[1]]
    y = np.einsum("byxihw,hwio->byxo", patches, kernel)
    return y, of_x, np.einsum("byxihw,byxo->hwio", patches, gradient)


def value_and_gradients(function, x, kernel, gradient):
    def both(x, kernel, gradient):
        y, pullback = jax.vjp(function, x, kernel)
        return y, *pullback(gradient)

    return jax.jit(both)(x, kernel, gradient)


def error(ours, exact):
    return np.sqrt(np.mean((np.asarray(ours, np.float64) - exact) ** 2) / np.mean(exact**2))


@pytest.mark.parametrize(("m", "r"), [*itertools.product(OUTPUTS, TAPS)])
def test_the_matrices_filter_a_signal(m, r):
    outputs, kernel, inputs = matrices(m, r)
    d, g = np.random.default_rng(0).standard_normal((2, m + r - 1))
    g = g[:r]
    assert_allclose(outputs.T @ ((kernel @ g) * (inputs @ d)), np.correlate(d, g, "valid"), rtol=1e-12)


def error_in_order(count):
    """The error of float32 sums of products of normal numbers that are added one after the other."""
    a, b = normal(count, 500), normal(count, 500, seed=1)
    return error(np.cumsum(a * b, axis=0)[-1], np.sum(a.astype(np.float64) * b, axis=0))


@pytest.mark.parametrize(("size", "window", "channels", "features", "pads", "tile", "times"), [
    ((16, 16), (5, 5), 32, 64, ((2, 2), (2, 2)), (4, 4), 8),  # McMahan's second convolution
    ((12, 9), (3, 3), 16, 32, ((1, 1), (1, 1)), (4, 4), 5),
    ((7, 10), (5, 3), 8, 16, ((0, 0), (0, 3)), (2, 4), 5),
    pytest.param((8, 8), (3, 3), 128, 128, ((1, 1), (1, 1)), (4, 4), 5, marks=pytest.mark.slow),
    pytest.param((6, 5), (3, 5), 8, 8, ((2, -1), (4, 0)), (4, 2), 5, marks=pytest.mark.slow),
    pytest.param((2, 1), (3, 3), 4, 8, ((1, 1), (1, 1)), (2, 2), 5, marks=pytest.mark.slow),
])  # fmt: skip
def test_errors_are_a_few_times_those_of_plain_sums(size, window, channels, features, pads, tile, times):
    """Of the value, of the gradient of the images and of that of the kernel: root mean squares, relative.

    The measure is a float32 sum of as many products in their usual order. The direct form on a CPU is none: its error
    depends on how many partial sums the library keeps for this processor, and may be half of it. At 8 points per
    direction (5x5 windows), errors are 4 to 6 times this measure, at 6 points 2 to 4 times. So tiles of 6 x 6 outputs
    of 3x3 windows fail, which need 8 points: their errors are 5 to 10 times it.
    """
    x, kernel = normal(6, *size, channels), normal(*window, channels, features, seed=1)
    gradient = normal(*direct(x, kernel, pads).shape, seed=2)
    exact = of_exact_numbers(x, kernel, gradient, pads)
    ours = value_and_gradients(lambda x, kernel: convolve(x, kernel, pads, tile), x, kernel, gradient)
    plain = value_and_gradients(lambda x, kernel: direct(x, kernel, pads), x, kernel, gradient)
    taps = window[0] * window[1]
    for mine, theirs, number, count in zip(
        ours, plain, exact, (taps * channels, taps * features, gradient[..., 0].size), strict=True
    ):
        assert error(mine, number) <= times * error_in_order(count) < 1e-5
        assert error(theirs, number) < 1e-6


@pytest.mark.parametrize("batch", [1, 7, 12])
def test_blocks_of_images_change_nothing(batch):
    """One image, blocks of all images (7 is prime), and several blocks."""
    pads, tile = ((1, 1), (1, 1)), (4, 4)
    x, kernel, gradient = normal(batch, 20, 20, 4), normal(3, 3, 4, 4, seed=1), normal(batch, 20, 20, 4, seed=2)
    function = lambda x, kernel: convolve(x, kernel, pads, tile)
    program = str(jax.make_jaxpr(function)(x, kernel))
    assert (f"f32[{batch // 4},4,20,20,4]" in program) == (batch == 12)
    ours = value_and_gradients(function, x, kernel, gradient)
    plain = value_and_gradients(lambda x, kernel: direct(x, kernel, pads), x, kernel, gradient)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-4, atol=1e-3), ours, plain)


def test_second_derivatives():
    x, kernel = normal(2, 6, 6, 3), normal(3, 3, 3, 4, seed=1)

    def curvature(convolution, x, kernel):
        inner = lambda x, kernel: jnp.sum(jnp.tanh(convolution(x, kernel, ((1, 1), (1, 1)))))
        total = lambda x, kernel: sum(jnp.sum(each**2) for each in jax.grad(inner, (0, 1))(x, kernel))
        return jax.grad(total, (0, 1))(x, kernel)

    both = jax.jit(lambda *args: [curvature(form, *args) for form in (lambda *args: convolve(*args, (4, 4)), direct)])
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-3, atol=1e-3), *both(x, kernel))


PADS = ((1, 1), (1, 1))


def train(x, kernel):
    """Three steps of images and kernel."""

    def step(_, both):
        loss = lambda both: jnp.mean(jnp.tanh(convolve(*both, PADS, (4, 4))) ** 2)
        return jax.tree.map(lambda each, gradient: each - gradient, both, jax.grad(loss)(both))

    return lax.fori_loop(0, 3, step, (x, kernel))


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
def test_clients_on_devices_and_side_by_side_equal_one_at_a_time(platform):
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("clients",))
    clients = 2 * len(devices)
    x, kernel = normal(clients, 10, 16, 16, 4), normal(clients, 3, 3, 4, 4, seed=1) / 6
    spec = PartitionSpec("clients")
    with platforms.tracing_for(platform):
        lanes = jax.jit(jax.shard_map(jax.vmap(train), mesh=mesh, in_specs=spec, out_specs=spec))(x, kernel)
        single = jax.jit(lambda *args: lax.map(lambda each: train(*each), args))(x, kernel)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-5, atol=1e-6), lanes, single)


def test_on_gpus_all_clients_are_one_batched_product_per_pass():
    """No loop, no convolution with groups: a product over the channels for 3 clients at 6 x 6 points."""
    x, kernel = normal(3, 10, 16, 16, 8), normal(3, 3, 3, 8, 16, seed=1)
    function = jax.vmap(lambda x, kernel: convolve(x, kernel, PADS, (4, 4)))
    with platforms.tracing_for("gpu"):
        text = jax.jit(jax.grad(lambda *args: function(*args).sum(), (0, 1))).lower(x, kernel).as_text()
    assert "convolution" not in text and "while" not in text
    products = [line for line in text.splitlines() if "dot_general" in line and "batching_dims" in line]
    shapes = ("tensor<3x6x6x160x8xf32>", "tensor<3x6x6x160x16xf32>")  # of tiles, with input and output channels
    assert len([line for line in products if any(shape in line for shape in shapes)]) == 2


def test_gradients_of_kernels_alone_need_no_gradient_of_the_images():
    x, kernel = normal(10, 16, 16, 8), normal(3, 3, 8, 16, seed=1)
    loss = lambda x, kernel: jnp.sum(convolve(x, kernel, PADS, (4, 4)) ** 2)
    operations = [
        jax.jit(jax.grad(loss, arguments)).lower(x, kernel).compile().as_text().count(" dot(")
        for arguments in ((0, 1), 1)
    ]
    assert operations[1] < operations[0]


# ---- The choice


def chosen(batch, size, window, channels, features, *, pads=None, dtype=jnp.float32):
    edge = window // 2
    x = jax.ShapeDtypeStruct((batch, size, size, channels), dtype)
    kernel = jax.ShapeDtypeStruct((window, window, channels, features), dtype)
    return minimal_filtering.tile(x, kernel, pads or ((edge, edge), (edge, edge)))


def test_the_choice_for_known_layers():
    assert chosen(50, 16, 5, 32, 64) == (4, 4)  # McMahan's second convolution
    assert chosen(50, 12, 5, 16, 32, pads=((0, 0), (0, 0))) == (4, 4)  # the FEMNIST CNN's
    assert chosen(50, 8, 3, 64, 64) == (4, 4) and chosen(50, 16, 3, 128, 128) == (4, 4)  # ResNet-20, VGG
    assert chosen(50, 32, 5, 3, 32) is None and chosen(50, 14, 5, 6, 16) is None  # few channels
    assert chosen(50, 2, 3, 512, 512) is None  # few tiles for many weights
    assert chosen(50, 16, 7, 64, 64) is None and chosen(50, 16, 1, 64, 64) is None
    assert chosen(50, 16, 5, 32, 64, dtype=jnp.bfloat16) is None


def has_convolution(function, *args):
    """Of a new function each time: JAX keeps what it has traced."""
    return "conv_general_dilated" in str(jax.make_jaxpr(lambda *args: function(*args))(*args))


def test_a_run_chooses():
    x, kernel = jnp.zeros((50, 16, 16, 32)), jnp.zeros((5, 5, 32, 64))
    assert not has_convolution(windows.conv, x, kernel)
    assert has_convolution(functools.partial(windows.conv, strides=2), x, kernel)
    with windows.convolutions("direct"):
        assert has_convolution(windows.conv, x, kernel)
    with platforms.tracing_for("gpu"):
        assert has_convolution(windows.conv, jnp.zeros((50, 32, 32, 64)), jnp.zeros((3, 3, 64, 64)))
        with windows.convolutions("minimal"):
            assert not has_convolution(windows.conv, jnp.zeros((50, 32, 32, 64)), jnp.zeros((3, 3, 64, 64)))
    with pytest.raises(UserError, match="convolution"), windows.convolutions("least"):
        pass


def test_networks_carry_the_choice():
    network = models.build("cnn_femnist", input_shape=(28, 28, 1), num_classes=5)
    other = models.base.with_fields(network, convolution="direct")
    x, variables = jax.ShapeDtypeStruct((50, 28, 28, 1), np.float32), network.shapes()
    assert network != other
    assert [str(jax.make_jaxpr(each.apply)(variables, x)).count("conv_general_") for each in (network, other)] == [1, 2]
    assert models.of_module(other, input_shape=(28, 28, 1), num_classes=5).convolution == "direct"
    zoo = models.base.with_fields(models.Zoo.of([network, network]), convolution="direct")
    assert [each.convolution for each in (zoo, *zoo.networks)] == ["direct"] * 3


def test_the_direct_form_is_untouched():
    """Its program is that of the convolution without a choice."""
    x, kernel = normal(50, 16, 16, 32), normal(5, 5, 32, 64, seed=1)
    with windows.convolutions("direct"):
        ours = jax.jit(lambda *args: windows.conv(*args))(x, kernel)
    before = jax.jit(lambda *args: windows._conv(*args, (1, 1), ((2, 2), (2, 2)), (1, 1), (1, 1)))
    assert_array_equal(ours, before(x, kernel))
