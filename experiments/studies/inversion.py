"""Gradient inversion: restore the images of a batch from the gradient that they caused.

Zhu, Liu, Han: Deep Leakage from Gradients, NeurIPS 2019, with the objective of Geiping, Bauermeister, Droege, Moeller:
Inverting Gradients - How easy is it to break privacy in federated learning?, NeurIPS 2020: one minus the cosine of the
two gradients plus the total variation of the images, minimised by Adam along the signs of its gradient. Labels are
known, as they can be read off the last layer's gradient for small batches (Zhao, Mopuri, Bilen: iDLG, 2020).

Images are optimised as brightnesses in 0..1, the range of all pixels, and one program attacks any choice of tensors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from fedjax_mr import trees
from fedjax_mr.client import local
from fedjax_mr.client.samples import Samples
from fedjax_mr.keys import random_key
from fedjax_mr.models import Model, Variables

TOTAL_VARIATION = 0.1  # weight, for brightnesses in 0..1
LR = 0.03  # first learning rate, in brightness per step
MOMENTUM = 0.9  # of the signs; the second moment of Adam is 1 for signs
SMALLEST_ERROR = 1e-10  # mean squared error of images that count as equal: 100 dB


class Pixels(NamedTuple):
    """From brightnesses in 0..1 to the input of a network: x = brightness * scale + shift."""

    scale: jax.Array  # [channels] or [1]
    shift: jax.Array  # [channels] or [1]

    @classmethod
    def of(cls, samples: Samples, low: float, high: float) -> "Pixels":
        """Those of samples whose raw values lie between ``low`` and ``high``."""
        scale, shift = jnp.asarray(samples.scale), jnp.asarray(samples.shift)
        return cls(scale * jnp.float32(high - low), scale * jnp.float32(low) + shift)

    def inputs(self, brightness: jax.Array) -> jax.Array:
        """The inputs of the network for images [B, height, width, channels]."""
        shape = (1,) * (brightness.ndim - 1) + self.scale.shape
        return brightness * self.scale.reshape(shape) + self.shift.reshape(shape)

    def brightness(self, inputs: jax.Array) -> jax.Array:
        """The inverse of `inputs`."""
        shape = (1,) * (inputs.ndim - 1) + self.scale.shape
        return (inputs - self.shift.reshape(shape)) / self.scale.reshape(shape)


def gradient(model: Model, variables: Variables, x: jax.Array, y: jax.Array) -> trees.Params:
    """The gradient of the mean loss of one batch, x [B, ...] and y [B], with respect to the parameters."""
    params, state = local.trained_and_state(variables)
    batch = local.Batch(x, y, jnp.ones(y.shape, jnp.float32))
    loss = local.supervised(model)
    return jax.grad(lambda params: loss(params, state, batch, random_key(0))[0])(params)


def cosine(a: trees.Params, b: trees.Params, weights: trees.Params) -> jax.Array:
    """The cosine of two trees in which the squares of each tensor count with its weight (a tree of scalars)."""

    def inner(a: trees.Params, b: trees.Params) -> jax.Array:
        products = jax.tree.map(lambda weight, a, b: weight * jnp.sum(a * b), weights, a, b)
        return functools.reduce(jnp.add, jax.tree.leaves(products))

    return inner(a, b) * jax.lax.rsqrt(inner(a, a) * inner(b, b) + 1e-30)


def total_variation(images: jax.Array) -> jax.Array:
    """The mean absolute difference of neighbouring pixels of images [B, height, width, channels]."""
    if images.shape[1] < 2 or images.shape[2] < 2:
        return jnp.zeros(())
    return jnp.mean(jnp.abs(jnp.diff(images, axis=1))) + jnp.mean(jnp.abs(jnp.diff(images, axis=2)))


def inverter(
    model: Model, pixels: Pixels, *, steps: int, smoothness: float = TOTAL_VARIATION, lr: float = LR
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """A compiled attack on the gradients of V batches, one after the other.

    Args:
      model: the network.
      pixels: brightnesses of its inputs.
      steps: optimizer steps. The learning rate falls to zero along a half cosine.
      smoothness: weight of the total variation.
      lr: first learning rate.

    Returns:
      A function (variables, gradients [V, ...], labels [V, B], weights of the tensors, key) -> (brightnesses
      [V, B, height, width, channels] in 0..1, cosines with the gradients [V]).
    """

    def one(
        variables: Variables, target: trees.Params, y: jax.Array, weights: trees.Params, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def agreement(images: jax.Array) -> jax.Array:
            return cosine(gradient(model, variables, pixels.inputs(images), y), target, weights)

        def objective(images: jax.Array) -> jax.Array:
            return 1 - agreement(images) + smoothness * total_variation(images)

        def step(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
            images, momentum = carry
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * jnp.sign(jax.grad(objective)(images))
            length = lr / 2 * (1 + jnp.cos(jnp.pi * number / steps)) / (1 - MOMENTUM ** (number + 1))
            return (jnp.clip(images - length * momentum, 0.0, 1.0), momentum), None

        start = jnp.clip(0.5 + 0.2 * jax.random.normal(key, (*y.shape, *model.input_shape)), 0.0, 1.0)
        numbers = jnp.arange(steps, dtype=jnp.float32)
        images, _ = jax.lax.scan(step, (start, jnp.zeros_like(start)), numbers)[0]
        return images, agreement(images)

    @jax.jit
    def attack(
        variables: Variables, targets: trees.Params, labels: jax.Array, weights: trees.Params, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(key, labels.shape[0])
        return jax.lax.map(lambda each: one(variables, each[0], each[1], weights, each[2]), (targets, labels, keys))

    return attack


def largest_tensor(params: trees.Params) -> trees.Params:
    """Weights for `cosine`: 1 for the tensor with the most numbers, 0 for the others."""
    leaves, structure = jax.tree.flatten(params)
    largest = int(np.argmax([leaf.size for leaf in leaves]))
    return jax.tree.unflatten(structure, [jnp.float32(number == largest) for number in range(len(leaves))])


def all_tensors(params: trees.Params) -> trees.Params:
    """Weights for `cosine`: 1 for every tensor."""
    return jax.tree.map(lambda leaf: jnp.float32(1), params)


def psnr(a: Any, b: Any) -> np.ndarray:
    """The peak signal-to-noise ratio in dB of images in 0..1, over their last three axes."""
    error = np.mean(np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64)), axis=(-3, -2, -1))
    return -10 * np.log10(np.maximum(error, SMALLEST_ERROR))


def order(restored: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """The image of a batch [B, ...] for each restored image [B, ...]: the order with the largest mean PSNR."""
    return scipy.optimize.linear_sum_assignment(psnr(restored[:, None], batch[None, :]), maximize=True)[1]


def best_psnr(restored: np.ndarray, batch: np.ndarray) -> float:
    """The mean PSNR of restored images [B, ...] and the images of a batch [B, ...], in the order that fits best."""
    return float(psnr(restored, batch[order(restored, batch)]).mean())


def most_similar(restored: np.ndarray, batches: np.ndarray) -> int:
    """The number of the batch [K, B, ...] that restored images [B, ...] correlate with the most.

    The correlation ignores brightness and contrast, which gradients determine badly. Images are matched in the best
    order.
    """

    def standard(images: np.ndarray) -> np.ndarray:
        flat = images.reshape(*images.shape[:-3], -1).astype(np.float64)
        flat = flat - flat.mean(axis=-1, keepdims=True)
        return flat / np.maximum(np.linalg.norm(flat, axis=-1, keepdims=True), 1e-12)

    tables = [standard(restored) @ standard(batch).T for batch in batches]
    pairs = [(table, scipy.optimize.linear_sum_assignment(table, maximize=True)) for table in tables]
    return int(np.argmax([table[pair].mean() for table, pair in pairs]))
