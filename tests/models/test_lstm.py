"""The custom gradient of the LSTM, compared with the gradient of plain operations."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.testing import assert_allclose

from fedjax_mr.models.lstm import recurrence


def plain_recurrence(inputs, kernel):
    def step(carry, inputs):
        hidden, cell = carry
        admit, forget, candidate, emit = jnp.split(inputs + hidden @ kernel, 4, axis=-1)
        cell = nn.sigmoid(forget) * cell + nn.sigmoid(admit) * jnp.tanh(candidate)
        hidden = nn.sigmoid(emit) * jnp.tanh(cell)
        return (hidden, cell), hidden

    zeros = jnp.zeros((inputs.shape[1], kernel.shape[0]), inputs.dtype)
    return lax.scan(step, (zeros, zeros), inputs)[1]


def loss(function, inputs, kernel):
    outputs = function(inputs, kernel)
    return jnp.sum(outputs * jnp.sin(jnp.arange(outputs.size, dtype=outputs.dtype)).reshape(outputs.shape))


def arguments(*batch):
    draw = np.random.default_rng(0).standard_normal
    return jnp.asarray(draw((*batch, 7, 3, 20)), jnp.float32), jnp.asarray(draw((*batch, 5, 20)), jnp.float32)


def test_outputs_and_gradients_are_those_of_plain_operations():
    own, plain = (
        jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1)))(*arguments())
        for function in (recurrence, plain_recurrence)
    )
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-5, atol=1e-5), own, plain)


def test_clients_side_by_side_are_one_client_at_a_time():
    gradient = jax.jit(jax.grad(functools.partial(loss, recurrence), (0, 1)))
    inputs, kernels = arguments(2)
    together = jax.jit(jax.vmap(gradient))(inputs, kernels)
    for client in range(2):
        own = jax.tree.map(lambda leaf, client=client: leaf[client], together)
        jax.tree.map(
            functools.partial(assert_allclose, rtol=1e-5, atol=1e-5), own, gradient(inputs[client], kernels[client])
        )


def test_second_derivatives():
    inputs, kernel = arguments()

    def curvature(function):
        slope = jax.grad(lambda kernel: loss(function, inputs, kernel))
        return jax.jit(jax.grad(lambda kernel: jnp.sum(slope(kernel) * jnp.cos(kernel))))(kernel)

    assert_allclose(curvature(recurrence), curvature(plain_recurrence), rtol=1e-4, atol=1e-4)
