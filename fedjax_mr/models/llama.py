"""Llama: a causal network for texts with rotary positions, grouped queries, a gated perceptron and tied embeddings.

Sources: Touvron et al., "LLaMA" (arXiv 2302.13971, 2023) for the whole; Zhang and Sennrich, "Root mean square layer
normalization" (NeurIPS 2019); Su et al., "RoFormer" (2021) for the positions, in the form of the package transformers,
whose weights fit; Ainslie et al., "GQA" (EMNLP 2023) for grouped queries; Shazeer, "GLU variants improve Transformer"
(2020) for the perceptron. Sizes of `smollm2_135m`: Ben Allal et al., "SmolLM2" (arXiv 2502.02737, 2025).

Padding is at the end of a text, and no token attends to later ones. Therefore padding needs no mask: it changes no
output before it, and its own outputs have no target.

`Llama.decode` computes the logits of a few tokens after others whose keys and values are kept (`Cache`).
"""

import functools
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from fedjax_mr.models import layers
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.transformer import SMALL


class Cache(NamedTuple):
    """Keys and values [B, S, G, D / heads] of one layer, for S tokens at most; zeros where there is none yet."""

    keys: jax.Array
    values: jax.Array


class RMSNorm(nn.Module):
    """Divide vectors by the root of their mean square, and multiply them by ``scale`` [D]. Computed in float32.

    Attributes:
      epsilon: added to the mean square.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute [..., D] for [..., D]."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * scale.reshape(*(1 for _ in x.shape[:-1]), -1)


class Embedding(nn.Module):
    """The vectors ``embedding`` [V, D] of tokens, which are also the weights of the logits.

    Attributes:
      vocabulary: V.
      width: D.
    """

    vocabulary: int
    width: int

    def setup(self) -> None:
        """Declare the vectors."""
        self.embedding = self.param("embedding", SMALL, (self.vocabulary, self.width), jnp.float32)

    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Embed tokens [B, T] as [B, T, D]."""
        return jnp.take(self.embedding, x, axis=0)

    def logits(self, vectors: jax.Array) -> jax.Array:
        """Compute the logits [B, T, V] of vectors [B, T, D]."""
        return vectors @ self.embedding.T


def rotated(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotate vectors [B, T, heads, D] by angles that grow with their positions [T].

    The pair of numbers i and i + D / 2 is a point in a plane, which is turned by position / theta^(2 i / D).
    """
    half = x.shape[-1] // 2
    speeds = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions.astype(jnp.float32)[:, None] * speeds[None])[None, :, None]
    first, second = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal self-attention in which several queries share a key and a value.

    Attributes:
      heads: number of queries of a token.
      groups: G, number of its keys and values; a divisor of ``heads``.
      theta: see `rotated`.
      initialisation: see `layers.Dense`.
    """

    heads: int
    groups: int
    theta: float
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, start: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Compute [B, T, D] for the tokens [B, T, D] at the positions from ``start``.

        With a cache, they also attend to the tokens before ``start``, and the result has the cache with their own keys
        and values.
        """
        batch, length, width = x.shape
        depth = width // self.heads
        positions = start + jnp.arange(length)

        def split(name: str, count: int) -> jax.Array:
            x_of_heads = layers.Dense(count * depth, self.initialisation, use_bias=False, name=name)(x)
            return x_of_heads.reshape(batch, length, count, depth)

        query = rotated(split("query", self.heads), positions, self.theta)
        key = rotated(split("key", self.groups), positions, self.theta)
        value = split("value", self.groups)
        if cache is not None:
            place = (0, start, 0, 0)
            cache = Cache(*(lax.dynamic_update_slice(*each, place) for each in zip(cache, (key, value), strict=True)))
            key, value = cache
        query = query.reshape(batch, length, self.groups, self.heads // self.groups, depth)
        scores = jnp.einsum("btgrd,bsgd->bgrts", query * depth**-0.5, key).astype(jnp.float32)
        allowed = jnp.arange(key.shape[1])[None] <= positions[:, None]
        scores = jnp.where(allowed[None, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = nn.softmax(scores).astype(x.dtype)
        mixed = jnp.einsum("bgrts,bsgd->btgrd", weights, value).reshape(batch, length, width)
        return layers.Dense(width, self.initialisation, use_bias=False, name="out")(mixed), cache


class Perceptron(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), three dense layers without bias.

    Attributes:
      hidden: width between them.
      initialisation: see `layers.Dense`.
    """

    hidden: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Compute [B, T, D] for [B, T, D]."""
        dense = functools.partial(layers.Dense, initialisation=self.initialisation, use_bias=False)
        gated = nn.silu(dense(self.hidden, name="gate")(x)) * dense(self.hidden, name="up")(x)
        return dense(x.shape[-1], name="down")(gated)


class LlamaLayer(nn.Module):
    """Attention and perceptron, each of the normalised vectors and added to them.

    Attributes:
      hidden: width of the perceptron.
      heads, groups, theta, initialisation: see `Attention`.
      epsilon: see `RMSNorm`.
    """

    hidden: int
    heads: int
    groups: int
    theta: float
    epsilon: float
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, start: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Compute the vectors [B, T, D] of the next layer, and the cache with the new keys and values."""
        attention = Attention(self.heads, self.groups, self.theta, self.initialisation, name="attention")
        mixed, cache = attention(RMSNorm(self.epsilon, name="attention_norm")(x), start, cache)
        x = x + mixed
        perceptron = Perceptron(self.hidden, self.initialisation, name="perceptron")
        return x + perceptron(RMSNorm(self.epsilon, name="perceptron_norm")(x)), cache


class Llama(BlockNet):
    """A decoder of Llama's architecture: logits [T, V] of the next token at each position. V is ``num_classes``.

    Its head is the last normalisation and the embedding, whose weights it shares.

    Attributes:
      width: D.
      depth: number of layers.
      heads: queries of a token.
      groups: keys and values of a token.
      hidden: width of the perceptrons.
      theta: see `rotated`.
      epsilon: see `RMSNorm`.
      remat: whether a layer is computed again in the backward pass, so that only its input is kept (`jax.checkpoint`).
    """

    takes: ClassVar[str] = "tokens"
    tied: ClassVar[bool] = True
    width: int = 64
    depth: int = 2
    heads: int = 4
    groups: int = 2
    hidden: int = 128
    theta: float = 10_000.0
    epsilon: float = 1e-5
    remat: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        layer = nn.remat(LlamaLayer) if self.remat else LlamaLayer
        sizes = (self.hidden, self.heads, self.groups, self.theta, self.epsilon, self.initialisation)
        return (
            ("embedding", Embedding(self.num_classes, self.width)),
            *((f"layer{i + 1}", layer(*sizes)) for i in range(self.depth)),
            ("norm", RMSNorm(self.epsilon)),
        )

    def features(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the vectors [B, T, D] of tokens [B, T] before the last normalisation."""
        return self._vectors(x, jnp.zeros((), jnp.int32), (None,) * self.depth)[0]

    def head(self, z: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute the logits [B, T, V] of `features` [B, T, D]."""
        return self.embedding.logits(self.norm(z))

    def decode(self, x: jax.Array, start: jax.Array, caches: tuple[Cache, ...]) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Compute the logits [B, T, V] of tokens [B, T] after ``start`` others, and the caches with these tokens."""
        vectors, new = self._vectors(x, start, caches)
        return self.head(vectors), new

    def empty_caches(self, batch: int, length: int) -> tuple[Cache, ...]:
        """The caches of all layers for ``batch`` texts of at most ``length`` tokens."""
        zeros = jnp.zeros((batch, length, self.groups, self.width // self.heads))
        return (Cache(zeros, zeros),) * self.depth

    def _vectors(self, x: jax.Array, start: jax.Array, caches: tuple) -> tuple[jax.Array, tuple]:
        vectors, new = self.embedding(x), []
        for number, cache in enumerate(caches, 1):
            vectors, cache = getattr(self, f"layer{number}")(vectors, start, cache)
            new.append(cache)
        return vectors, tuple(new)


TINY = {"width": 64, "depth": 2, "heads": 4, "groups": 2, "hidden": 128, "theta": 10_000.0, "epsilon": 1e-5}
"""The sizes of a small network for quick runs."""

SMOLLM2_135M = {
    "width": 576, "depth": 30, "heads": 9, "groups": 3, "hidden": 1536, "theta": 100_000.0, "epsilon": 1e-5,
}  # fmt: skip
"""The sizes of SmolLM2-135M, whose vocabulary has 49,152 tokens."""
