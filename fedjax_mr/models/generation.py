"""Write texts with a network that predicts the next token: one compiled loop over positions, with a cache of keys.

The loop also reads the prompts, one token after another, so that there is a single program for both.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedjax_mr.errors import UserError
from fedjax_mr.models import calls
from fedjax_mr.models.base import Model, Variables


def generate(
    model: Model,
    variables: Variables,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    count: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Collection[int] = (0,),
) -> list[list[int]]:
    """Write at most ``count`` tokens after each prompt.

    Args:
      model: a network with the methods ``decode`` and ``empty_caches`` (`llama.Llama`).
      variables: what trains of it.
      prompts: the tokens of B texts, at least one each.
      key: consumed.
      count: largest number of new tokens.
      temperature: what logits are divided by before a token is drawn. 0: the most probable token.
      top_p: only the most probable tokens are drawn whose probabilities sum up to this share (Holtzman et al., ICLR
        2020).
      stop: tokens that end a text. They are not part of the result.

    Raises:
      UserError: the network has no such methods, a prompt is empty or has unknown tokens, or a number is out of range.
    """
    if not calls.has(model.module, "decode"):
        raise UserError(f"{model.name} writes no texts: use llama_tiny or smollm2_135m")
    if count < 1 or temperature < 0 or top_p <= 0 or top_p > 1:
        raise UserError(
            f"a text needs count >= 1, temperature >= 0 and 0 < top_p <= 1, not {count}, {temperature} and {top_p}"
        )
    vocabulary = model.task.width
    if not prompts or not all(len(each) and min(each) >= 0 and max(each) < vocabulary for each in prompts):
        raise UserError(f"a prompt needs at least one token, and tokens from 0 to {vocabulary - 1}")
    known = np.array([len(each) for each in prompts], np.int32)
    tokens = np.zeros((len(prompts), known.max() + count), np.int32)
    for row, each in zip(tokens, prompts, strict=True):
        row[: len(each)] = each
    ends = np.isin(np.arange(vocabulary), list(stop))
    merged = _merged(model, variables)
    options = (np.float32(temperature), np.float32(top_p), ends, key)
    texts = np.asarray(_written(model.module, merged, tokens, known, *options))
    return [_until(row[size : size + count].tolist(), ends) for row, size in zip(texts, known, strict=True)]


_merged = jax.jit(lambda model, variables: model.merged(variables))  # otherwise each shape compiles each operation


def _until(row: list[int], ends: np.ndarray) -> list[int]:
    """The tokens before the first one that ends a text."""
    return row[: next((place for place, token in enumerate(row) if ends[token]), len(row))]


@functools.partial(jax.jit, static_argnames="module")
def _written(
    module: Any,
    variables: Variables,
    tokens: jax.Array,
    known: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    ends: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Fill the tokens [B, S] behind the first ``known`` [B] ones of each text, until all texts have ended."""
    batch, length = tokens.shape

    def step(state: tuple) -> tuple:
        place, tokens, ended, caches = state
        now = lax.dynamic_slice_in_dim(tokens, place, 1, axis=1)
        logits, caches = module.apply(variables, now, place, caches, method="decode")
        new = drawn(logits[:, 0], temperature, top_p, jax.random.fold_in(key, place))
        given = place + 1 < known
        following = lax.dynamic_slice_in_dim(tokens, place + 1, 1, axis=1)[:, 0]
        following = jnp.where(given, following, jnp.where(ended, 0, new))
        tokens = lax.dynamic_update_slice_in_dim(tokens, following[:, None], place + 1, axis=1)
        return place + 1, tokens, ended | (~given & ends[following]), caches

    def unfinished(state: tuple) -> jax.Array:
        place, _, ended, _ = state
        return (place + 1 < length) & ~jnp.all(ended)

    start = (jnp.zeros((), jnp.int32), tokens, jnp.zeros(batch, bool), module.empty_caches(batch, length))
    return lax.while_loop(unfinished, step, start)[1]


def drawn(logits: jax.Array, temperature: jax.Array, top_p: jax.Array, key: jax.Array) -> jax.Array:
    """Draw a token [B] by logits [B, V], see `generate`; consumes ``key``."""
    warm = logits / jnp.maximum(temperature, 1e-6)
    softmax = jax.nn.softmax(warm)
    shares = jnp.sort(softmax, axis=-1)[:, ::-1]
    before = jnp.cumsum(shares, axis=-1) - shares
    least = jnp.min(jnp.where(before < top_p, shares, 1.0), axis=-1, keepdims=True)
    kept = jnp.where(softmax >= least, warm, -jnp.inf)
    chosen = jnp.where(temperature > 0, jax.random.categorical(key, kept), jnp.argmax(logits, axis=-1))
    return chosen.astype(jnp.int32)
