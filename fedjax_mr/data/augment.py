"""Data augmentation of a batch of images, inside the compiled step.

A user adds one as ``fmr.AUGMENTATIONS["mine"] = fmr.Augmentation(build, Settings)``. One that mixes each image with
another of the batch only says which pixels are kept: the client's training mixes the images and their losses.
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


def cutmix(key: jax.Array, x: jax.Array, *, alpha: float, probability: float) -> jax.Array:
    """Choose the box that each image gets from another image of the batch.

    Yun et al.: CutMix, ICCV 2019. The box has the shape of the image and the share 1 - lambda of its area, with lambda
    from Beta(alpha, alpha). Its centre is uniform, so the border may cut off a part of it. As in the paper, all images
    of a batch have the same box.

    Args:
      key: consumed.
      x: images [B, H, W, channels], of which only the shape counts.
      alpha: of the Beta distribution.
      probability: of a batch to be mixed.

    Returns:
      Which pixels are kept [1, H, W, 1] bool.
    """
    share_key, row_key, column_key, mixed_key = jax.random.split(key, 4)
    # Beta(1, 1) is uniform, and compiles in a tenth of the time.
    share = jax.random.uniform(share_key) if alpha == 1 else jax.random.beta(share_key, alpha, alpha)
    side = jnp.where(jax.random.bernoulli(mixed_key, probability), jnp.sqrt(1 - share), 0.0)

    def within(key: jax.Array, length: int) -> jax.Array:
        """Which of the positions 0..length-1 the box covers [length]."""
        centre, half = jax.random.randint(key, (), 0, length), (side * length).astype(jnp.int32) // 2
        position = jnp.arange(length)
        return (position >= centre - half) & (position < centre + half)

    rows, columns = within(row_key, x.shape[1]), within(column_key, x.shape[2])
    return ~(rows[None, :, None, None] & columns[None, None, :, None])


@dataclasses.dataclass(frozen=True)
class CutMix:
    """The settings of `cutmix`."""

    cutmix_alpha: float = field(
        1.0, "cutmix: alpha of the distribution Beta(alpha, alpha) of the share that an image keeps", low=0.01,
        high=1000, source="Yun et al., ICCV 2019", group="Local training", needs=("augment", "cutmix"), static=True,
    )  # fmt: skip
    cutmix_probability: float = field(
        1.0, "cutmix: probability that a batch is mixed", low=0, high=1, source="Yun et al.; their code for CIFAR: 0.5",
        group="Local training", needs=("augment", "cutmix"), static=True,
    )  # fmt: skip


class Augmentation(NamedTuple):
    """A registered augmentation.

    Attributes:
      build: settings -> a function of (key, raw images [B, H, W, channels]). It returns images of the same shape and
        dtype, or if ``mixes``, how much of each pixel is kept ([B, H, W, 1] or [1, H, W, 1]): truth values cut, numbers
        in 0..1 blend. Another image of the batch fills the rest, and has the rest of the loss.
      settings: the dataclass of its settings, or None.
      mixes: whether it mixes the images of a batch.
    """

    build: Callable[[Any], Callable[[jax.Array, jax.Array], jax.Array]]
    settings: type | None = None
    mixes: bool = False


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `AUGMENTATIONS`. Raises a UserError: it is not an `Augmentation`."""
    if not isinstance(row, Augmentation) or not callable(row.build):
        raise UserError(f"fmr.AUGMENTATIONS[{name!r}] takes fmr.Augmentation(build, Settings or None)")


@functools.cache  # the same function in every run, so compiled programs are reused
def _crop_flip(settings: CropFlip) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(crop_flip, pad=settings.augment_pad)


@functools.cache
def _cutmix(settings: CutMix) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return functools.partial(cutmix, alpha=settings.cutmix_alpha, probability=settings.cutmix_probability)


AUGMENTATIONS = Registry(
    "augmentation",
    "fmr.AUGMENTATIONS",
    check_row,
    {"crop_flip": Augmentation(_crop_flip, CropFlip), "cutmix": Augmentation(_cutmix, CutMix, mixes=True)},
)
"""Every augmentation by its name."""
