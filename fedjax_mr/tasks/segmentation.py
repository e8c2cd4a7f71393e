"""A class for each pixel: cross-entropy plus Dice."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_mr.errors import UserError
from fedjax_mr.tasks.base import Task, check_range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segmentation(Task):
    """Targets y [H, W] int32, the class of each pixel; the outputs [H, W, C] are logits.

    The loss is the mean cross-entropy of the pixels plus one minus the mean soft Dice coefficient of the classes that
    the image has, both with weight 1, as in nnU-Net (Isensee et al., 2021). A target of -1 is unknown.
    """

    name: ClassVar[str] = "segmentation"
    provides: ClassVar[frozenset[str]] = frozenset({"logits", "pixels"})
    default_metrics: ClassVar[tuple[str, ...]] = ("dice", "iou", "pixel_accuracy")
    predicted: ClassVar[str] = "probabilities of the classes of each pixel"
    formula: ClassVar[str] = "jax.nn.softmax(outputs)"

    def outputs(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Logits of each pixel: [H, W, C]."""
        return (*shape[:2], self.width)

    def loss(self, outputs: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """Cross-entropy of the pixels plus 1 - Dice of each image [B]."""
        del mask
        known = (targets >= 0).astype(outputs.dtype)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(targets, 0))
        cross_entropy = jnp.sum(losses * known, axis=(1, 2)) / jnp.maximum(jnp.sum(known, axis=(1, 2)), 1.0)
        return cross_entropy + self._dice_loss(jax.nn.softmax(outputs) * known[..., None], targets)

    def _dice_loss(self, shares: jax.Array, targets: jax.Array) -> jax.Array:
        """1 - Dice of each image [B]; 0 if all of its pixels are unknown."""
        true = jax.nn.one_hot(targets, self.width)  # zeros where the target is unknown
        both, each = jnp.sum(shares * true, axis=(1, 2)), jnp.sum(shares + true, axis=(1, 2))
        present = jnp.any(true > 0, axis=(1, 2)).astype(shares.dtype)
        dice = 2 * both / jnp.maximum(each, 1e-6)
        return jnp.sum((1 - dice) * present, axis=-1) / jnp.maximum(jnp.sum(present, axis=-1), 1.0)

    def predict(self, outputs: jax.Array) -> jax.Array:
        """The probabilities of the classes of each pixel [B, H, W, C]."""
        return jax.nn.softmax(outputs)

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One class per pixel: [H, W]."""
        return shape[:2]

    @classmethod
    def of(cls, y: np.ndarray) -> Task:
        """As many classes as the largest one says."""
        return cls(width=int(y.max(initial=0)) + 1)

    def check(self, x: np.ndarray, y: np.ndarray, where: str) -> None:
        """Check masks [M, H, W]. Raises a UserError: the samples are no images, or a class is outside 0..C-1."""
        if x.ndim != 4:
            raise UserError(f"{where} needs images [height, width, channels] for segmentation, not {x.shape[1:]}")
        super().check(x, y, where)
        check_range(y, self.width, where, unknown=True)
