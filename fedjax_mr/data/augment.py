"""Data augmentation of a batch of images, inside the compiled step.

A user adds one as ``fmr.AUGMENTATIONS["mine"] = fmr.Augmentation(build, Settings)``.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr.errors import UserError
from fedjax_mr.registry import Registry
from fedjax_mr.settings import field


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


@dataclasses.dataclass(frozen=True)
class CropFlip:
    """The settings of `crop_flip`."""

    augment_pad: int = field(
        4, "crop_flip: width of the black border from which the crop is taken", unit="pixels", low=1, high=256,
        source="the usual one of CIFAR; FedMe's code: 2", group="Local training", needs=("augment", "crop_flip"),
    )  # fmt: skip


class Augmentation(NamedTuple):
    """A registered augmentation.

    Attributes:
      build: settings -> ((key, raw images [B, H, W, channels]) -> images of the same shape and dtype).
      settings: the dataclass of its settings, or None.
    """

    build: Callable[[Any], Callable[[jax.Array, jax.Array], jax.Array]]
    settings: type | None = None


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `AUGMENTATIONS`. Raises a UserError: it is not an `Augmentation`."""
    if not isinstance(row, Augmentation) or not callable(row.build):
        raise UserError(f"fmr.AUGMENTATIONS[{name!r}] takes fmr.Augmentation(build, Settings or None)")


@functools.cache  # the same function in every run, so compiled programs are reused
def _crop_flip(settings: CropFlip) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(crop_flip, pad=settings.augment_pad)


AUGMENTATIONS = Registry(
    "augmentation", "fmr.AUGMENTATIONS", check_row, {"crop_flip": Augmentation(_crop_flip, CropFlip)}
)
"""Every augmentation by its name."""
