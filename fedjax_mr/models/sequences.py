"""Networks for sequences of numbers, such as measurements over time: recurrent layers and a classifier.

Sources: Cho et al., "Learning phrase representations using RNN encoder-decoder" (EMNLP 2014) for the gated recurrent
unit; Hochreiter and Schmidhuber (1997) for the LSTM. Sizes are ours.

A sequence that is shorter than T is padded with zeros at its end. Its length is the last step with a value other than
zero, plus one. So zeros in between are measurements, and zeros in all columns at the end are padding.
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_mr.models import layers
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import head
from fedjax_mr.models.lstm import LSTM
from fedjax_mr.models.transformer import Pooling, Tokens


class Lengths(nn.Module):
    """Mark the padding at the end of sequences."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> Tokens:
        """Find the steps [B, T] of sequences [B, T, F] up to the last one with a value other than zero."""
        steps = jnp.arange(x.shape[1])[None]
        length = jnp.max(jnp.where(jnp.any(x != 0, axis=-1), steps + 1, 0), axis=1, keepdims=True)
        return Tokens(x, steps < length)


class GRU(nn.Module):
    """One layer of gated recurrent units, started from zeros. Parameters and gates are PyTorch's: reset, update, new.

    Parameters: ``kernel`` [I, 3H], ``recurrent_kernel`` [H, 3H], ``bias`` and ``recurrent_bias`` [3H].

    Attributes:
      features: H.
      initialisation: ``torch`` (uniform with fan-in H for every tensor) or ``flax`` (LeCun normal, orthogonal, zeros).
    """

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute the outputs of all steps [B, T, H] for sequences of vectors [B, T, I]."""
        kernel_init, bias_init = layers.initializers(self.initialisation, self.features)
        recurrent_init = nn.initializers.orthogonal() if self.initialisation == "flax" else kernel_init
        size, wide = self.features, 3 * self.features
        kernel = self.param("kernel", kernel_init, (x.shape[-1], wide), jnp.float32)
        recurrent_kernel = self.param("recurrent_kernel", recurrent_init, (size, wide), jnp.float32)
        bias = self.param("bias", bias_init, (wide,), jnp.float32).reshape(1, -1)
        recurrent_bias = self.param("recurrent_bias", bias_init, (wide,), jnp.float32).reshape(1, -1)

        def step(hidden: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            own = hidden @ recurrent_kernel + recurrent_bias
            reset, update = jnp.split(nn.sigmoid(inputs[:, : 2 * size] + own[:, : 2 * size]), 2, axis=-1)
            new = jnp.tanh(inputs[:, 2 * size :] + reset * own[:, 2 * size :])
            hidden = (1 - update) * new + update * hidden
            return hidden, hidden

        # One product serves the inputs of all steps, as in `lstm.LSTM`.
        batch, steps, width = x.shape
        rows = jnp.swapaxes(x, 0, 1).reshape(-1, width) @ kernel + bias
        inputs = rows.reshape(steps, batch, wide)
        _, outputs = lax.scan(step, jnp.zeros_like(inputs[0, :, :size]), inputs)
        return jnp.swapaxes(outputs, 0, 1)


CELLS = {"gru": GRU, "lstm": LSTM}


class Recurrent(nn.Module):
    """A recurrent layer of sequences with padding at their end, which no earlier step sees.

    Attributes:
      cell: a key of `CELLS`.
      features, initialisation: see `GRU`.
    """

    cell: str
    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: Tokens, *, train: bool = False, mask: jax.Array | None = None) -> Tokens:
        """Compute the outputs of all steps [B, T, H]."""
        return Tokens(CELLS[self.cell](self.features, self.initialisation, name="cell")(x.vectors), x.valid)


class RecurrentNetwork(BlockNet):
    """A GRU or LSTM over sequences of numbers [T, F], and a classifier of the last step that is not padding.

    Attributes:
      cell: ``gru`` or ``lstm``.
      depth: number of recurrent layers.
      hidden: H.
    """

    takes: ClassVar[str] = "sequences"
    cell: str = "gru"
    depth: int = 1
    hidden: int = 64

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        return (
            ("lengths", Lengths()),
            *(
                (f"{self.cell}{i + 1}", Recurrent(self.cell, self.hidden, self.initialisation))
                for i in range(self.depth)
            ),
            ("last", Pooling("last")),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )
