"""Networks for characters and texts: an embedding, stacked LSTM layers, and a classifier of the last or of each step.

Sources: Hochreiter and Schmidhuber, "Long short-term memory" (1997); McMahan et al. (AISTATS 2017) for the task;
FedMe's code (Matsuda et al., 2022) for the sizes. Flax's LSTM cell is not used because it has one bias per gate, and
PyTorch's has two. The published parameter counts include both, and with two the bias moves twice as far per SGD step.
"""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_mr.models import layers
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import head

PADDING = 0
"""The token that pads short sequences. Its embedding is zero and is not trained."""


class Embedding(nn.Module):
    """An embedding of tokens, with the parameter ``embedding`` [tokens, features].

    Attributes:
      tokens: size of the vocabulary, including `PADDING`.
      features: width of a vector.
      padded_at_end: whether to move the padding from the end of a sequence to its start. The last step is then a word,
        and not padding, in which a recurrent network forgets the words.
    """

    tokens: int
    features: int
    padded_at_end: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Look up the vectors [B, T, features] of token sequences [B, T]."""

        def initialize(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jax.random.normal(key, shape, jnp.float32).at[PADDING].set(0.0)

        table = self.param("embedding", initialize, (self.tokens, self.features))
        x = padding_first(x) if self.padded_at_end else x
        return jnp.where((x == PADDING)[..., None], 0.0, table[x])


def padding_first(x: jax.Array) -> jax.Array:
    """Move the padding at the end of sequences [B, T] to their start."""
    steps = jnp.arange(x.shape[1])[None]
    length = jnp.max(jnp.where(x != PADDING, steps + 1, 0), axis=1, keepdims=True)
    return jnp.take_along_axis(x, (steps + length) % x.shape[1], axis=1)


class LSTM(nn.Module):
    """One LSTM layer, started from zeros. Parameters and order of the gates are PyTorch's: input, forget, cell, output.

    Parameters: ``kernel`` [I, 4H], ``recurrent_kernel`` [H, 4H], ``bias`` and ``recurrent_bias`` [4H].

    Attributes:
      features: H.
      initialisation: ``torch`` (uniform with fan-in H for every tensor) or ``flax`` (LeCun normal, orthogonal, zeros).
    """

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the outputs of all steps [B, T, H] for sequences of vectors [B, T, I]."""
        kernel_init, bias_init = layers.initializers(self.initialisation, self.features)
        recurrent_init = nn.initializers.orthogonal() if self.initialisation == "flax" else kernel_init
        wide = 4 * self.features
        kernel = self.param("kernel", kernel_init, (x.shape[-1], wide), jnp.float32)
        recurrent_kernel = self.param("recurrent_kernel", recurrent_init, (self.features, wide), jnp.float32)
        bias = self.param("bias", bias_init, (wide,), jnp.float32)
        recurrent_bias = self.param("recurrent_bias", bias_init, (wide,), jnp.float32)

        # One product serves the inputs of all steps: only the recurrence must be a loop. Time becomes the first axis
        # before the product, where vectors are narrower than the gates. Inputs are the rows of a matrix so that the
        # gradient is a plain product, too.
        batch, steps, width = x.shape
        rows = jnp.swapaxes(x, 0, 1).reshape(-1, width) @ kernel + (bias + recurrent_bias).reshape(1, -1)
        inputs = rows.reshape(steps, batch, wide)
        return jnp.swapaxes(recurrence(inputs, recurrent_kernel), 0, 1)


@jax.custom_vjp
def recurrence(inputs: jax.Array, recurrent_kernel: jax.Array) -> jax.Array:
    """Outputs of all steps of an LSTM [T, B, H], from a zero state.

    The custom gradient computes the kernel's gradient for all steps in one product after the loop. JAX's gradient of
    the loop would add a matrix [H, 4H] in every step.

    Args:
      inputs: contribution of the inputs to the gates before activation [T, B, 4H].
      recurrent_kernel: [H, 4H].
    """
    return _forward(inputs, recurrent_kernel)[0]


def _forward(inputs: jax.Array, recurrent_kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The outputs, and the residuals of the gradient: outputs, cells [T, B, H], gates [T, B, 4H] and the kernel."""
    # sigmoid(z) = (1 + tanh(z/2)) / 2, so all four gates use tanh and stay in one array.
    candidate = jnp.arange(inputs.shape[-1]) // recurrent_kernel.shape[0] == 2
    either = lambda one, other: jnp.where(candidate, one, other).reshape(1, -1).astype(inputs.dtype)
    scale, shift = either(1.0, 0.5), either(0.0, 0.5)

    def step(carry: tuple[jax.Array, jax.Array], inputs: jax.Array):
        hidden, cell = carry
        gates = scale * jnp.tanh(scale * (inputs + hidden @ recurrent_kernel)) + shift
        admit, forget, candidate, emit = jnp.split(gates, 4, axis=-1)
        cell = forget * cell + admit * candidate
        hidden = emit * jnp.tanh(cell)
        return (hidden, cell), (hidden, cell, gates)

    zeros = jnp.zeros_like(inputs[0, :, : recurrent_kernel.shape[0]])
    _, (outputs, cells, gates) = lax.scan(step, (zeros, zeros), inputs)
    return outputs, (outputs, cells, gates, recurrent_kernel)


def _backward(residuals: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    outputs, cells, gates, recurrent_kernel = residuals
    before = lambda steps: jnp.concatenate([jnp.zeros_like(steps[:1]), steps[:-1]])

    def step(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, ...]):
        to_hidden, to_cell = carry
        gradient, gates, cell, cell_before = at
        admit, forget, candidate, emit = jnp.split(gates, 4, axis=-1)
        to_hidden = to_hidden + gradient
        squashed = jnp.tanh(cell)
        to_cell = to_cell + to_hidden * emit * (1.0 - squashed * squashed)
        to_inputs = jnp.concatenate(
            [
                to_cell * candidate * admit * (1.0 - admit),
                to_cell * cell_before * forget * (1.0 - forget),
                to_cell * admit * (1.0 - candidate * candidate),
                to_hidden * squashed * emit * (1.0 - emit),
            ],
            axis=-1,
        )
        return (to_inputs @ recurrent_kernel.T, to_cell * forget), to_inputs

    zeros = jnp.zeros_like(outputs[0])
    _, to_inputs = lax.scan(step, (zeros, zeros), (gradient, gates, cells, before(cells)), reverse=True)
    rows = lambda steps: steps.reshape(-1, steps.shape[-1])
    return to_inputs, rows(before(outputs)).T @ rows(to_inputs)


recurrence.defvjp(_forward, _backward)


class LastStep(nn.Module):
    """The output of the last step."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Select the last step [B, H] of sequences [B, T, H]."""
        return x[:, -1]


class CharacterLSTM(BlockNet):
    """FedMe's networks for Shakespeare: one to four LSTM layers.

    Attributes:
      vocabulary: number of tokens. 0 or C: the network predicts the next character. Otherwise it classifies texts,
        which may be padded at the end.
      depth: number of LSTM layers.
      embedding_width: width of the vector of a character.
      hidden: H.
      per_position: whether to predict from each step: logits [T, C]. The variables are the same. Padding stays at the
        end, where no earlier step sees it.
    """

    takes: ClassVar[str] = "tokens"
    vocabulary: int = 0
    depth: int = 2
    embedding_width: int = 8
    hidden: int = 256
    per_position: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        tokens = self.vocabulary or self.num_classes
        texts = tokens != self.num_classes and not self.per_position
        return (
            ("embedding", Embedding(tokens, self.embedding_width, padded_at_end=texts)),
            *((f"lstm{i + 1}", LSTM(self.hidden, self.initialisation)) for i in range(self.depth)),
            *(() if self.per_position else (("last", LastStep()),)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation, flatten=not self.per_position)),
        )
