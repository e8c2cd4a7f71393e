"""Training without labels: SimCLR's loss on two random views of each sample.

Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020. As in pFedHR's code, the
loss applies to the C outputs. Views are a horizontal flip, a resized crop of 0.8 to 1 of the area, colour jitter (0.4,
0.4, 0.4, 0.1) with probability 0.8, and greyscale with probability 0.2. Deviations from that code: views are computed
from raw pixels, where the code uses normalised pixels, which overflow. The operations of the jitter have a fixed order,
not a random one. The hue is rotated in YIQ space.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.client import local

GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue in brightness (ITU-R BT.601)
TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
MAX_HUE_ANGLE = 2 * float(np.pi) * 0.1
MAX_LOG_RATIO = float(np.log(4 / 3))  # of the sides of a crop


def nt_xent(logits: jax.Array, mask: jax.Array, *, temperature: float) -> jax.Array:
    """The normalised temperature-scaled cross-entropy of outputs [2B, C], in nats.

    Args:
      logits: outputs for one view of each sample, then for the other views.
      mask: [2B], 1 for true samples. Padding is not used as a negative.
      temperature: tau.
    """
    count = logits.shape[0]
    lengths = jnp.sqrt(jnp.maximum(jnp.sum(logits * logits, axis=1, keepdims=True), 1e-12))
    z = logits / lengths
    candidates = (mask[None, :] > 0) & ~jnp.eye(count, dtype=bool)
    similarities = jnp.where(candidates, (z @ z.T) / temperature, -1e9)
    partner = (jnp.arange(count) + count // 2) % count
    return local.masked_mean(optax.softmax_cross_entropy_with_integer_labels(similarities, partner), mask)


def view(key: jax.Array, x: jax.Array, *, low: float, high: float) -> jax.Array:
    """A random view of each raw image [B, H, W, channels] as float32. Samples that are not images are not changed.

    Images without three channels change only in brightness and contrast.

    Args:
      key: consumed.
      x: raw pixels.
      low: smallest possible pixel value.
      high: largest possible pixel value.
    """
    if x.ndim != 4:
        return x
    unit = (x.astype(jnp.float32) - low) / (high - low)
    keys = jax.random.split(key, x.shape[0])
    return jnp.clip(jax.vmap(_view)(keys, unit), 0.0, 1.0) * (high - low) + low


def _view(key: jax.Array, x: jax.Array) -> jax.Array:
    flip, crop, jitter, amounts, grey = jax.random.split(key, 5)
    x = _crop(crop, jnp.where(jax.random.bernoulli(flip), x[:, ::-1], x))
    jittered = jax.random.bernoulli(jitter, 0.8)
    x = jnp.where(jittered, _jitter(amounts, x), x)
    return jnp.where(jax.random.bernoulli(grey, 0.2), jnp.broadcast_to(_brightness(x), x.shape), x)


def _crop(key: jax.Array, x: jax.Array) -> jax.Array:
    """Crop 0.8 to 1 of the area, with a ratio of sides of 3/4 to 4/3, at a random position; resize bilinearly."""
    area_key, ratio_key, place_key = jax.random.split(key, 3)
    area = jax.random.uniform(area_key, minval=0.8, maxval=1.0)
    ratio = jnp.exp(jax.random.uniform(ratio_key, minval=-MAX_LOG_RATIO, maxval=MAX_LOG_RATIO))
    sides = jnp.minimum(jnp.sqrt(jnp.stack([area * ratio, area / ratio])), 1.0)
    corner = jax.random.uniform(place_key, (2,)) * (1.0 - sides)
    size = jnp.array(x.shape[:2], jnp.float32)
    return jax.image.scale_and_translate(
        x, x.shape, (0, 1), 1.0 / sides, -corner * size / sides, method="linear", antialias=False
    )


def _jitter(key: jax.Array, x: jax.Array) -> jax.Array:
    brightness, contrast, saturation = 1.0 + jax.random.uniform(key, (3,), minval=-0.4, maxval=0.4)
    x = jnp.clip(x * brightness, 0.0, 1.0)
    x = jnp.clip(contrast * x + (1 - contrast) * jnp.mean(_brightness(x)), 0.0, 1.0)
    if x.shape[-1] != 3:
        return x
    x = jnp.clip(saturation * x + (1 - saturation) * _brightness(x), 0.0, 1.0)
    angle = jax.random.uniform(jax.random.fold_in(key, 1), minval=-MAX_HUE_ANGLE, maxval=MAX_HUE_ANGLE)
    cos, sin, one, zero = jnp.cos(angle), jnp.sin(angle), jnp.ones(()), jnp.zeros(())
    rotation = jnp.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos]).reshape(3, 3)
    to_rgb = jnp.asarray(np.linalg.inv(np.array(TO_YIQ)), jnp.float32)
    return x @ functools.reduce(jnp.matmul, (to_rgb, rotation, jnp.asarray(TO_YIQ, jnp.float32))).T


def _brightness(x: jax.Array) -> jax.Array:
    """The brightness [H, W, 1] of an image."""
    if x.shape[-1] != 3:
        return jnp.mean(x, axis=-1, keepdims=True)
    return jnp.sum(x * jnp.asarray(GREY, jnp.float32).reshape(1, 1, 3), axis=-1, keepdims=True)
