"""Transformers: a vision transformer, a causal network for characters and words, and the encoder of BERT.

Sources: Vaswani et al., "Attention is all you need" (NeurIPS 2017) for the layer; Dosovitskiy et al. (ICLR 2021) for
patches and the class token; Devlin et al. (NAACL 2019) for BERT; Wang et al. (MiniLM, NeurIPS 2020) for the sizes of
`minilm`. The sizes of `ViT` and `CausalTransformer` are those of FedTP's code (Li et al., "FedTP: Federated Learning by
Transformer Personalization", 2022), which sets the depth by a flag: the 6 layers of `ViT` are our choice. Two
deviations from that code: query, key and value have biases, and positions start near zero.

Query, key, value and output are dense layers of their own, so that paths such as ``layer1/attention/query/kernel`` name
the matrices that adapters change.
"""

import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_mr.errors import UserError
from fedjax_mr.models import layers
from fedjax_mr.models.base import BlockNet
from fedjax_mr.models.blocks import head
from fedjax_mr.models.lstm import PADDING

SMALL = nn.initializers.normal(0.02)  # of embeddings and positions, as in BERT


class Tokens(NamedTuple):
    """Sequences of vectors, which the blocks before the pooling hand on.

    Attributes:
      vectors: [B, T, D].
      valid: [B, T] bool, False for padding. None if there is no padding.
    """

    vectors: jax.Array
    valid: jax.Array | None


class TokenEmbedding(nn.Module):
    """Embedding of tokens plus learned positions, then optionally layer normalisation; then dropout.

    Attributes:
      vocabulary: number of tokens, including `PADDING`.
      width: D.
      positions: largest T.
      types: kinds of segments in BERT. All tokens are of the first one. 0: none.
      epsilon: that of the normalisation. 0: no normalisation.
      dropout: probability of dropping a value.
    """

    vocabulary: int
    width: int
    positions: int
    types: int = 0
    epsilon: float = 0.0
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> Tokens:
        """Embed tokens [B, T].

        Raises:
          UserError: there are more tokens than positions.
        """
        length = x.shape[1]
        if length > self.positions:
            raise UserError(
                f"sequences of {length} tokens are longer than the {self.positions} positions of the network"
            )
        vectors = nn.Embed(self.vocabulary, self.width, embedding_init=SMALL, name="word")(x)
        offset = self.param("position", SMALL, (self.positions, self.width), jnp.float32)[:length]
        if self.types:
            offset = offset + self.param("type", SMALL, (self.types, self.width), jnp.float32)[:1]
        vectors = vectors + offset[None]
        if self.epsilon:
            vectors = _norm(self.epsilon, name="norm")(vectors)
        return Tokens(layers.Dropout(self.dropout)(vectors, train=train), x != PADDING)


class PatchEmbedding(nn.Module):
    """Dense layer of the patches of an image, preceded by a class token, plus learned positions; then dropout.

    Attributes:
      width: D.
      patch: height and width of a patch.
      dropout: probability of dropping a value.
      initialisation: see `layers.Dense`.
    """

    width: int
    patch: int = 4
    dropout: float = 0.1
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> Tokens:
        """Embed images [B, H, W, channels] as [B, 1 + H W / patch^2, D].

        Raises:
          UserError: the images cannot be cut into patches.
        """
        batch, height, width, channels = x.shape
        if height % self.patch or width % self.patch:
            raise UserError(f"images of {height}x{width} cannot be cut into patches of {self.patch}x{self.patch}")
        rows, columns = height // self.patch, width // self.patch
        x = x.reshape(batch, rows, self.patch, columns, self.patch, channels).swapaxes(2, 3)
        x = x.reshape(batch, rows * columns, self.patch * self.patch * channels)
        x = layers.Dense(self.width, self.initialisation, name="dense")(x)
        first = self.param("class_token", SMALL, (self.width,), jnp.float32).reshape(1, 1, -1)
        x = jnp.concatenate([jnp.broadcast_to(first, (batch, 1, self.width)).astype(x.dtype), x], axis=1)
        x = x + self.param("position", SMALL, x.shape[1:], jnp.float32)[None]
        return Tokens(layers.Dropout(self.dropout)(x, train=train), None)


class Attention(nn.Module):
    """Multi-head self-attention.

    Attributes:
      heads: number of heads.
      head_width: width of a head. 0: the width of the input divided by ``heads``.
      causal: whether a token attends only to itself and to those before it.
      dropout: probability of dropping an attention weight.
      initialisation: see `layers.Dense`.
      padding_sees_itself: whether padding attends to itself. Needed if its output is read: padding without a valid
        token before it would otherwise attend to all positions, also to later ones.
    """

    heads: int
    head_width: int = 0
    causal: bool = False
    dropout: float = 0.0
    initialisation: str = "torch"
    padding_sees_itself: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, valid: jax.Array | None, *, train: bool = False) -> jax.Array:
        """Compute [B, T, D] for [B, T, D]; tokens whose ``valid`` [B, T] is False are not attended to."""
        batch, length, width = x.shape
        depth = self.head_width or width // self.heads

        def split(name: str) -> jax.Array:
            x_of_heads = layers.Dense(self.heads * depth, self.initialisation, name=name)(x)
            return x_of_heads.reshape(batch, length, self.heads, depth).swapaxes(1, 2)

        query, key, value = (split(name) for name in ("query", "key", "value"))
        scores = jnp.einsum("bhqd,bhkd->bhqk", query * depth**-0.5, key)
        allowed = jnp.ones((1, 1, 1, length), bool) if valid is None else valid[:, None, None, :]
        if self.padding_sees_itself:
            allowed = allowed | jnp.eye(length, dtype=bool)[None, None]
        if self.causal:
            allowed = allowed & jnp.tri(length, dtype=bool)[None, None]
        # Finite, so that a query without any key has a finite result, which nothing reads.
        weights = nn.softmax(jnp.where(allowed, scores, jnp.finfo(scores.dtype).min))
        weights = layers.Dropout(self.dropout)(weights, train=train)
        mixed = layers.product(weights, value).swapaxes(1, 2).reshape(batch, length, self.heads * depth)
        return layers.Dense(width, self.initialisation, name="out")(mixed)


class TransformerLayer(nn.Module):
    """Self-attention and a perceptron (dense, GELU, dense), each with a residual connection and layer normalisation.

    Attributes:
      hidden: width of the perceptron.
      heads, head_width, causal, attention_dropout, initialisation, padding_sees_itself: see `Attention`.
      norm_first: whether the normalisation precedes attention and perceptron, or follows the sum, as in BERT.
      dropout: probability of dropping a value of attention or perceptron, before it is added.
      hidden_dropout: probability of dropping a value inside the perceptron.
      epsilon: added to the variance in the normalisation.
    """

    hidden: int
    heads: int
    head_width: int = 0
    causal: bool = False
    norm_first: bool = True
    dropout: float = 0.1
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    epsilon: float = 1e-5
    initialisation: str = "torch"
    padding_sees_itself: bool = False

    @nn.compact
    def __call__(self, x: Tokens, *, train: bool = False, mask: jax.Array | None = None) -> Tokens:
        """Compute the vectors [B, T, D] of the next layer."""
        vectors, valid = x
        attention = Attention(
            self.heads, self.head_width, self.causal, self.attention_dropout, self.initialisation,
            self.padding_sees_itself, name="attention",
        )  # fmt: skip
        perceptron = Perceptron(self.hidden, self.hidden_dropout, self.initialisation, name="perceptron")
        drop = functools.partial(layers.Dropout(self.dropout), train=train)

        def residual(step: Callable[[jax.Array], jax.Array], x: jax.Array, norm: nn.LayerNorm) -> jax.Array:
            return x + drop(step(norm(x))) if self.norm_first else norm(x + drop(step(x)))

        attend, think = lambda x: attention(x, valid, train=train), lambda x: perceptron(x, train=train)
        vectors = residual(attend, vectors, _norm(self.epsilon, name="attention_norm"))
        vectors = residual(think, vectors, _norm(self.epsilon, name="perceptron_norm"))
        return Tokens(vectors, valid)


class Perceptron(nn.Module):
    """Dense layer, GELU (exact), dropout, dense layer of the input's width.

    Attributes:
      hidden: width of the first layer.
      dropout: probability of dropping one of its values.
      initialisation: see `layers.Dense`.
    """

    hidden: int
    dropout: float = 0.0
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        """Compute [B, T, D] for [B, T, D]."""
        hidden = gelu(layers.Dense(self.hidden, self.initialisation, name="hidden")(x))
        hidden = layers.Dropout(self.dropout)(hidden, train=train)
        return layers.Dense(x.shape[-1], self.initialisation, name="out")(hidden)


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU by erf, as in PyTorch. That of Flax takes erfc, whose two branches take longer on CPUs."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


class Pooling(nn.Module):
    """One vector per sequence, or per position.

    Attributes:
      kind: ``first`` (the class token), ``last`` (the last token that is not padding), ``mean`` (of all that are not),
        or ``none`` (all vectors, also of padding).
      epsilon: that of a layer normalisation of the result. 0: no normalisation.
    """

    kind: str
    epsilon: float = 0.0

    @nn.compact
    def __call__(self, x: Tokens, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        """Compute [B, D]; [B, T, D] without pooling."""
        vectors, valid = x
        if self.kind == "none":
            return self._normalised(vectors)
        valid = jnp.ones(vectors.shape[:2], bool) if valid is None else valid
        if self.kind == "first":
            weight = jnp.arange(valid.shape[1])[None] == 0
        elif self.kind == "last":
            weight = valid & ~(jnp.cumsum(valid[:, ::-1], axis=1)[:, ::-1] > 1)
        else:
            weight = valid
        weight = weight.astype(vectors.dtype)
        weight = weight / jnp.maximum(weight.sum(axis=1, keepdims=True), 1)
        return self._normalised((vectors * weight[..., None]).sum(axis=1))

    def _normalised(self, vectors: jax.Array) -> jax.Array:
        return _norm(self.epsilon, name="norm")(vectors) if self.epsilon else vectors


def _norm(epsilon: float, *, name: str) -> nn.LayerNorm:
    # Without the fast variance, the mean of squares minus the squared mean, which loses digits.
    return nn.LayerNorm(epsilon, use_fast_variance=False, name=name)


# ---- Networks


class ViT(BlockNet):
    """A vision transformer for 32x32 images with patches of 4x4: 64 patches and a class token, 6 layers.

    Attributes:
      width: D.
      depth: number of layers.
      heads: number of heads.
      head_width: width of a head.
      hidden: width of the perceptrons.
      patch: height and width of a patch.
      dropout: probability of dropping a value, in training.
    """

    width: int = 128
    depth: int = 6
    heads: int = 8
    head_width: int = 64
    hidden: int = 256
    patch: int = 4
    dropout: float = 0.1

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        layer = functools.partial(
            TransformerLayer, self.hidden, self.heads, self.head_width, dropout=self.dropout,
            hidden_dropout=self.dropout, initialisation=self.initialisation,
        )  # fmt: skip
        return (
            ("patches", PatchEmbedding(self.width, self.patch, self.dropout, self.initialisation)),
            *((f"layer{i + 1}", layer()) for i in range(self.depth)),
            ("pooling", Pooling("first", epsilon=1e-5)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )


class CausalTransformer(BlockNet):
    """A causal transformer that predicts from the last token: the next character, or the class of a text.

    Token 0 is padding: no other token attends to it. In Shakespeare it is the line break, which `lstm.Embedding`
    ignores, too.

    Attributes:
      vocabulary: number of tokens. 0: the number of classes, as in the prediction of characters.
      width: D.
      depth: number of layers.
      heads: number of heads.
      hidden: width of the perceptrons.
      positions: largest number of tokens.
      dropout: probability of dropping a value, in training.
      per_position: whether to predict from each token: logits [T, C]. The variables are the same.
    """

    takes: ClassVar[str] = "tokens"
    vocabulary: int = 0
    width: int = 128
    depth: int = 2
    heads: int = 8
    hidden: int = 256
    positions: int = 128
    dropout: float = 0.1
    per_position: bool = False

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        layer = functools.partial(
            TransformerLayer, self.hidden, self.heads, causal=True, dropout=self.dropout,
            hidden_dropout=self.dropout, initialisation=self.initialisation, padding_sees_itself=self.per_position,
        )  # fmt: skip
        vocabulary = self.vocabulary or self.num_classes
        return (
            ("embedding", TokenEmbedding(vocabulary, self.width, self.positions, dropout=self.dropout)),
            *((f"layer{i + 1}", layer()) for i in range(self.depth)),
            ("pooling", Pooling("none" if self.per_position else "last", epsilon=1e-5)),
            ("classifier", head(self.num_classes, initialisation=self.initialisation, flatten=not self.per_position)),
        )


class BERT(BlockNet):
    """The encoder of BERT, the mean over all tokens that are not padding, and a classifier. Default sizes: MiniLM-L6.

    Attributes:
      vocabulary: number of tokens. 0: that of MiniLM.
      width: D.
      depth: number of layers.
      heads: number of heads.
      hidden: width of the perceptrons.
      positions: largest number of tokens.
      dropout: probability of dropping a value or an attention weight, in training.
    """

    takes: ClassVar[str] = "tokens"
    vocabulary: int = 0
    width: int = 384
    depth: int = 6
    heads: int = 12
    hidden: int = 1536
    positions: int = 512
    dropout: float = 0.1
    epsilon: ClassVar[float] = 1e-12

    def blocks(self) -> tuple[tuple[str, nn.Module], ...]:
        """The named blocks in forward order."""
        layer = functools.partial(
            TransformerLayer, self.hidden, self.heads, norm_first=False, dropout=self.dropout,
            attention_dropout=self.dropout, epsilon=self.epsilon, initialisation=self.initialisation,
        )  # fmt: skip
        embedding = TokenEmbedding(
            self.vocabulary or 30_522, self.width, self.positions, 2, self.epsilon, self.dropout
        )  # fmt: skip
        return (
            ("embedding", embedding),
            *((f"layer{i + 1}", layer()) for i in range(self.depth)),
            ("pooling", Pooling("mean")),
            ("classifier", head(self.num_classes, initialisation=self.initialisation)),
        )
