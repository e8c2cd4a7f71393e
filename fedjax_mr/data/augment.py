"""Data augmentation of a batch of images, inside the compiled step."""

import jax
import jax.numpy as jnp


def crop_flip(key: jax.Array, x: jax.Array, *, pad: int) -> jax.Array:
    """Pad every image with zeros, crop it to its size at a random position, and mirror it with probability 1/2.

    The usual augmentation of CIFAR (pad 4; FedMe's code: 2). Zeros are black pixels, so it must precede normalisation.

    Args:
      key: consumed.
      x: images [B, H, W, channels] of any dtype.
      pad: pixels on each side, at least 1.

    Returns:
      Images of the same shape and dtype. Position and mirroring are drawn for each image.
    """
    batch, height, width, channels = x.shape
    corner_key, flip_key = jax.random.split(key)
    corners = jax.random.randint(corner_key, (batch, 2), 0, 2 * pad + 1)
    padded = jnp.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))

    def crop(image: jax.Array, corner: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(
            image, (corner[0], corner[1], jnp.zeros_like(corner[0])), (height, width, channels)
        )

    cropped = jax.vmap(crop)(padded, corners)
    flip = jax.random.bernoulli(flip_key, 0.5, (batch, 1, 1, 1))
    return jnp.where(flip, cropped[:, :, ::-1], cropped)
