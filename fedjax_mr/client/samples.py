"""The samples of the federation as arrays, which of them belong to a client, and the input of a network from them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


@jax.tree_util.register_static
class Shape(tuple[int, ...]):
    """The shape of one sample, such as (32, 32, 3). Static: a compiled program depends on it."""


class Trigger(NamedTuple):
    """The trigger of a backdoor: a pattern of pixels that some of M images carry.

    `gather` draws it into a batch, so the images themselves are not copied. `backdoored` makes one.
    """

    rows: Array  # [M] bool, which samples carry it
    mask: Array  # [height, width, 1] bool, its pixels
    value: Array  # scalar, their raw value

    def drawn(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """Draw the trigger on those of the raw images x [B, height, width, channels] of ``rows`` [B] that carry it."""
        here = jnp.asarray(self.rows)[rows].reshape(-1, 1, 1, 1) & jnp.asarray(self.mask)[None]
        return jnp.where(here, jnp.asarray(self.value).astype(x.dtype), x)


class Samples(NamedTuple):
    """All M samples of the federation. A batch is gathered and normalised inside the compiled step.

    The input of a network is ``x * scale + shift``; tokens are passed unchanged.
    """

    x: Array  # [M, ...], or [M, rows, row] after `in_rows`; uint8, float32 or int32 (tokens)
    y: Array  # [M, ...] targets in the form of the task: [M] int32 for a class per sample
    scale: Array  # [channels] or [1]
    shift: Array  # [channels] or [1]
    shape: Shape | None = None  # shape of one sample if x is in rows
    trigger: Trigger | None = None  # of a backdoor; see `backdoored`

    def in_rows(self) -> "Samples":
        """Reshape each image into rows of at most 128 numbers: x [M, rows, row].

        TPUs read rows of 128. With x [40000, 32, 32, 3], every program would first copy all images into another layout,
        which costs 4 ms and 0.5 GB.
        """
        shape = Shape(self.x.shape[1:])
        if len(shape) != 3:
            return self
        size = math.prod(shape)
        row = max(number for number in range(1, 129) if size % number == 0)
        return self._replace(x=self.x.reshape(len(self.x), size // row, row), shape=shape)


class ClientData(NamedTuple):
    """The data of one client.

    ``index[offset : offset + size]`` are its training rows of ``samples``. The next ``validation_size`` entries of
    ``index`` are its validation rows (see `validation`).
    """

    samples: Samples
    index: Array  # [sum of all sizes] int32
    offset: jax.Array  # scalar int32
    size: jax.Array  # scalar int32
    client_id: jax.Array  # scalar int32
    validation_size: jax.Array | int = 0  # scalar int32
    work: jax.Array | None = None  # share of its steps after which the client stops, in 0..1; None: all of them


def one_client(
    samples: Samples,
    *,
    client_id: Array | int = 0,
    size: Array | int | None = None,
    validation_size: Array | int = 0,
) -> ClientData:
    """Samples that all belong to one client, such as the server's public set.

    Args:
      samples: M samples, first for training, then for validation.
      client_id: number of the client.
      size: number of training samples. Default: M.
      validation_size: number of validation samples.
    """
    count = samples.y.shape[0]
    number = lambda value: jnp.asarray(value, jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    size = count if size is None else size
    return ClientData(samples, index, number(0), number(size), number(client_id), number(validation_size))


def validation(data: ClientData) -> ClientData:
    """The validation samples of a client as its data, or its training samples if it has no validation samples."""
    some = jnp.asarray(data.validation_size) > 0
    return data._replace(
        offset=jnp.where(some, data.offset + data.size, data.offset),
        size=jnp.where(some, data.validation_size, data.size),
        validation_size=jnp.zeros((), jnp.int32),
    )


def gather(samples: Samples, rows: jax.Array, *, change: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """The network input for sample ``rows`` [B]: pixels after ``change`` and normalisation, tokens unchanged."""
    x = raw(samples, rows)
    return normalised(samples, x if change is None or are_tokens(x) else change(x), rows)


def raw(samples: Samples, rows: jax.Array) -> jax.Array:
    """The sample ``rows`` [B] as they are stored, without a trigger: [B, ...]."""
    x = jnp.asarray(samples.x)[rows]
    return x if samples.shape is None else x.reshape(x.shape[:-2] + samples.shape)


def normalised(samples: Samples, x: jax.Array, rows: jax.Array) -> jax.Array:
    """The network input [B, ...] for raw samples x [B, ...], which are the ``rows`` [B] after an augmentation.

    A trigger is drawn here, so that an augmentation does not move it.
    """
    if are_tokens(x):
        return x
    x = x if samples.trigger is None else samples.trigger.drawn(x, rows)
    channels = (1,) * (x.ndim - 1) + samples.scale.shape
    return x.astype(jnp.float32) * samples.scale.reshape(channels) + samples.shift.reshape(channels)


def are_tokens(x: jax.Array) -> bool:
    """Whether samples are tokens, which are neither normalised nor augmented."""
    return jnp.issubdtype(x.dtype, jnp.signedinteger)


def backdoored(samples: Samples, rows: Array, target: int) -> Samples:
    """The samples with a trigger on the images ``rows`` [M] bool, whose labels become ``target``.

    The trigger is a white square in the lower right corner. Its side is an eighth of the shorter side of the image, at
    least one pixel. White is 255 for uint8 images and 1 for others.
    """
    height, width = (samples.x.shape[1:] if samples.shape is None else samples.shape)[:2]
    side = max(1, round(min(height, width) / 8))
    mask = np.zeros((height, width, 1), bool)
    mask[-side:, -side:] = True
    white = np.asarray(255 if samples.x.dtype == np.uint8 else 1, samples.x.dtype)
    rows, y = jnp.asarray(rows), jnp.asarray(samples.y)
    return samples._replace(y=jnp.where(rows, jnp.int32(target), y), trigger=Trigger(rows, mask, white))
