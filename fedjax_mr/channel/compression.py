"""Compression of messages: fewer bits per number, or fewer numbers.

A client compresses the change of its upload: its values minus the reference, which both sides know. The server decodes
it and adds the reference. Tensors are compressed one by one. A message consists of arrays that have as many bytes as
are sent, so the traffic of a run counts the messages themselves.

With d numbers x in a tensor, the result C(x) of each kind, and its size in bits:

=======  ======================================================================  =============================
kind     C(x)                                                                    bits
=======  ======================================================================  =============================
qsgd     sign(x) norm2(x) l / L, where l is L abs(x) / norm2(x) rounded at       32 + d (1 + ceil(log2(L + 1)))
         random to an integer with mean L abs(x) / norm2(x)
int8     s round(x / s) with the scale s = max(abs(x)) / 127                     32 + 8 d
sign     sign(x) mean(abs(x)), where sign(0) = 1                                 32 + d
topk     the k = max(1, round(ratio d)) numbers of largest magnitude, else zero  k (32 + ceil(log2(d)))
randk    d / k times k numbers at random, else zero                              32 + 32 k
=======  ======================================================================  =============================

Each array of a message is rounded up to whole bytes. A tensor with a single number, or with k = d, is sent unchanged
with 32 d bits. BatchNorm statistics and integers are never compressed.

``qsgd`` and ``randk`` are unbiased. Their squared errors have the expectations (norm2 / L)^2 sum(f (1 - f)), where f
are the fractional parts of L abs(x) / norm2, and (d / k - 1) norm2^2. The other kinds are biased contractions: the
squared error is at most (1 - k / d) norm2^2 of ``topk``, exactly norm2^2 - norm1^2 / d of ``sign``, and at most d s^2
/ 4 of ``int8``. They need error feedback to converge.

Error feedback (``ef``): a client remembers the error e of its last message. It sends C(p) with p = change + e, and then
e = p - C(p). So the sum of all messages of a client and its last error is the sum of its changes. The memory belongs to
the client and not to the model. In FedMR the client trains another model next time, and the mean over the cohort of
model and error together is preserved, not each single model.

EF21 (``ef21``): client i remembers an estimate g_i of its change. It sends c = C(change - g_i) and adds c to g_i. The
server keeps g, the mean of all N estimates, adds the sum of the received c divided by N, and updates the model by g.
The last estimates of absent clients remain in g. All estimates start at zero. The server's own weights and rule have no
effect on the parameters, since all uploads are reference + g.

Sources. Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD, NeurIPS 2017. Reisizadeh, Mokhtari, Hassani, Jadbabaie,
Pedarsani: FedPAQ, AISTATS 2020 (FedAvg with ``qsgd``). Bernstein, Wang, Azizzadenesheli, Anandkumar: signSGD, ICML
2018. Stich, Cordonnier, Jaggi: Sparsified SGD with Memory, NeurIPS 2018 (``topk``, ``randk``). Seide, Fu, Droppo, Li,
Yu: 1-Bit Stochastic Gradient Descent, Interspeech 2014, and Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes
SignSGD, ICML 2019 (``ef`` and the scale of ``sign``). Richtarik, Sokolov, Fatkhullin: EF21, NeurIPS 2021.

Deviations. QSGD's paper also codes the levels by Elias' code, which is shorter where most levels are zero. signSGD
counts votes of signs without a scale. In GRACE, ``randk`` is not scaled (which is biased), norms of zero give NaN, and
EF with ``sign`` divides the sum by the learning rate. FLSim counts one bit per entry for a mask, or 64 bits per
dimension of each index, and its random mask is not scaled. Here zero tensors are sent as zeros.

A tensor with a number that is not finite arrives with one, whatever the kind, so the server can tell. A finite tensor
arrives finite, except that ``randk`` may scale a number beyond the range of float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.channel.base import Context, Link, Sent, Values, joined, split
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.keys import random_key
from fedjax_mr.settings import field
from fedjax_mr.strategies.interface import Memory, Payload, Problem, Strategy

KINDS = ("none", "qsgd", "int8", "sign", "topk", "randk")
UNBIASED = ("qsgd", "randk")
FEEDBACK = ("none", "ef", "ef21")
DOWNLOADS = ("none", "qsgd", "int8")
MOST_LEVELS = 65_535  # more levels would be finer than the rounding of float32 products

Numbers = dict[str, jax.Array]
"""A compressed tensor of ONE client: what is sent."""


_setting = functools.partial(field, group="Channel")


@dataclasses.dataclass(frozen=True)
class Compression:
    """Compression of the changes that clients upload, and of the models that they receive."""

    # fmt: off
    compress: str = _setting(
        "none", "Compression of the uploads: stochastic quantisation (qsgd), 8 bits (int8), signs, the largest changes "
        "(topk) or random ones (randk)", choices=("none", "qsgd", "int8", "sign", "topk", "randk"), short=True)
    compress_ratio: float = _setting(
        0.01, "topk, randk: share of each tensor that is sent", low=0, high=1, open_low=True, static=True,
        needs=("compress", "topk", "randk"))
    compress_levels: int = _setting(8, "qsgd: levels s", unit="levels", low=1, high=65_535)
    compress_download: str = _setting(
        "none", "Compression of the models that the server sends", choices=("none", "qsgd", "int8"))
    error_feedback: str = _setting(
        "none", "What clients do with the error of compression: forget it (none), add it to their next message (ef), "
        "or send the difference to their last message (ef21, methods with one model)",
        choices=("none", "ef", "ef21"), source="ef: Seide et al. 2014, Karimireddy et al. 2019; ef21: Richtarik et al. "
        "2021")
    # fmt: on


def build(settings: Compression, problem: Problem) -> Link:
    """The link of the settings, see `compression`."""
    return compression(
        problem,
        settings.compress,
        ratio=settings.compress_ratio,
        levels=settings.compress_levels,
        feedback=settings.error_feedback,
        download=settings.compress_download,
    )


def compression(
    problem: Problem,
    kind: str,
    *,
    ratio: float = 0.01,
    levels: int = 8,
    feedback: str = "none",
    download: str = "none",
) -> Link:
    """A link that compresses the changes that clients upload, and on request the models that they receive.

    Args:
      problem: the federation.
      kind: ``qsgd``, ``int8``, ``sign``, ``topk``, ``randk``, or ``none`` if uploads are not compressed.
      ratio: share of the numbers that ``topk`` and ``randk`` keep, in 0..1 without 0. With 1 and no feedback, uploads
        pass bit for bit.
      levels: L, the number of positive levels of ``qsgd``.
      feedback: ``none``, ``ef`` (error feedback) or ``ef21``, both for biased kinds only. ``ef21`` needs a strategy
        with a single server model whose clients upload this model alone.
      download: ``none``, ``qsgd`` or ``int8``. Compresses the parameters of all models in a payload themselves, not
        their changes, because client and server share no earlier model. So ``qsgd`` needs many levels here.

    Raises:
      UserError: an unknown name; a number out of range; feedback with an unbiased kind or without compression; or the
        strategy counts its own messages or exchanges layers (`Link.check`). Tracing a round raises it if ``ef21`` does
        not suit the uploads.
    """
    for what, name, known in (
        ("compression", kind, KINDS),
        ("feedback", feedback, FEEDBACK),
        ("download", download, DOWNLOADS),
    ):
        if name not in known:
            raise unknown_name(what, name, known)
    if not 0 < ratio <= 1:
        raise UserError(f"the compression ratio is {ratio}, but must be above 0 and at most 1: pass ratio=0.01")
    if levels != int(levels) or not 1 <= levels <= MOST_LEVELS:
        raise UserError(f"qsgd has {levels} levels, but needs an integer in 1..{MOST_LEVELS}: pass levels=8")
    if feedback != "none" and kind in UNBIASED:
        raise UserError(f"{kind} is unbiased, so error feedback only adds noise: pass feedback=none or kind=topk")
    if feedback != "none" and kind == "none":
        raise UserError("error feedback needs compressed uploads: pass kind=topk or feedback=none")

    hidden = "error_feedback=ef21 hides single messages from attacks and robust rules: use error_feedback=ef"
    exact = kind == "none" or (kind in ("topk", "randk") and ratio == 1 and feedback == "none")
    members: dict[str, Any] = {}
    if not exact:
        codec_of = lambda size: make_codec(kind, size, ratio=ratio, levels=levels)
        members |= {"none": _plain, "ef": _error_feedback, "ef21": _ef21}[feedback](codec_of, problem)
        members["encodes"] = True
        members["excludes"] = tuple((each, hidden) for each in ("attack", "robust")) if feedback == "ef21" else ()
    if download != "none":
        members |= _download(lambda size: make_codec(download, size, ratio=ratio, levels=levels))
    if not members:
        return Link("compression")

    def check(strategy: Strategy, problem: Problem) -> None:
        if strategy.exchange is not None:
            raise UserError(
                "clients cannot compress the encrypted layers of other clients: train without compression or exchange"
            )
        if strategy.traffic is not None:
            raise UserError(
                "this strategy counts its own messages, so they cannot be compressed: train without compression"
            )
        if feedback == "ef21" and (strategy.models is None or strategy.models.stacked):
            raise UserError("ef21 needs a strategy with a single server model: pass feedback=ef")

    return Link("compression", check=check, **members)


# --- The sides of the link --------------------------------------------------------------------------------------------


def _plain(codec_of: "CodecOf", problem: Problem) -> dict[str, Any]:
    """Members of the link without memory: a client sends C(change)."""

    def client(values: Values, reference: Values, memory: Memory, context: Context) -> Sent:
        return Sent(encode(codec_of, _subtract(values, reference), context.key), memory)

    return {"client": client, "server": _decoding(codec_of)}


def _error_feedback(codec_of: "CodecOf", problem: Problem) -> dict[str, Any]:
    """Members of the link with error feedback."""

    def client(values: Values, reference: Values, memory: Memory, context: Context) -> Sent:
        wanted = _add(_subtract(values, reference), memory)
        message = encode(codec_of, wanted, context.key)
        return Sent(message, _subtract(wanted, decode(codec_of, message)))

    return {"client": client, "server": _decoding(codec_of), "init_memory": _zeros}


def _decoding(codec_of: "CodecOf") -> Callable:
    def server(state: Any, messages: Values, reference: Values, context: Context) -> tuple[Any, Values, dict]:
        changes = jax.vmap(lambda message: decode(codec_of, message))(messages)
        return state, _add(reference, changes), {}

    return server


def _ef21(codec_of: "CodecOf", problem: Problem) -> dict[str, Any]:
    """Members of the link with EF21. The server's state is g."""

    def shapes() -> Values:
        return {"model": jax.eval_shape(problem.model.init, random_key(0))["params"]}

    def client(values: Values, reference: Values, memory: Memory, context: Context) -> Sent:
        # An increment, such as that of a control variate, must not be repeated while its client is absent.
        if jax.tree.map(jnp.shape, values) != jax.tree.map(jnp.shape, shapes()):
            uploaded = ", ".join(sorted(values))
            raise UserError(f"ef21 needs clients that upload the model alone, not {uploaded}: pass feedback=ef")
        message = encode(codec_of, _subtract(_subtract(values, reference), memory), context.key)
        return Sent(message, _add(memory, decode(codec_of, message)))

    def server(state: Any, messages: Values, reference: Values, context: Context) -> tuple[Any, Values, dict]:
        steps = jax.vmap(lambda message: decode(codec_of, message))(messages)
        # The estimates of a client that was drawn twice are averaged, as all memories are.
        times = jnp.sum(context.client[:, None] == context.client[None, :], axis=1).astype(jnp.float32)
        share = 1 / (times * problem.num_present)
        sums = trees.mix(steps, share[None, :])
        mean = jax.tree.map(lambda g, total: g + total[0].astype(g.dtype), state, sums)
        return mean, jax.tree.map(lambda start, g: start + g[None], reference, mean), {}

    return {"client": client, "server": server, "init": lambda key: _zeros(shapes()), "init_memory": _zeros}


def _download(codec_of: "CodecOf") -> dict[str, Any]:
    """Members of the link that compress the models in a payload."""

    def down(payload: Payload, key: jax.Array) -> Payload:
        values, others = split(payload)
        models = {name: params for name, params in values.items() if name in others}
        return joined(values | encode(codec_of, models, key), others)

    return {"down": down, "open": lambda payload: decode(codec_of, payload)}


def _zeros(shapes: Values) -> Values:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _add(a: Values, b: Values) -> Values:
    return jax.tree.map(jnp.add, a, b)


def _subtract(a: Values, b: Values) -> Values:
    return jax.tree.map(jnp.subtract, a, b)


# --- Trees ------------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressed:
    """A tensor as it is sent. ``like``, its shape and dtype, is static and known to both sides."""

    numbers: Numbers
    like: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})


class Codec(NamedTuple):
    """Compression of a tensor with d numbers. Both functions are for ONE client."""

    encode: Callable[[jax.Array, jax.Array], Numbers]  # (x [d] float32, key) -> what is sent
    decode: Callable[[Numbers], jax.Array]  # -> C(x) [d] float32


CodecOf = Callable[[int], Codec | None]
"""d -> its codec, or None if a tensor with d numbers is sent unchanged."""


def encode(codec_of: CodecOf, tree: Any, key: jax.Array) -> Any:
    """Compress the float leaves of a tree, each with a key of its own. ONE client."""

    def one(number: int, leaf: jax.Array) -> Any:
        codec = codec_of(leaf.size)
        if codec is None:
            return leaf
        numbers = codec.encode(leaf.reshape(-1).astype(jnp.float32), jax.random.fold_in(key, number))
        return Compressed(numbers, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [one(number, leaf) for number, leaf in enumerate(leaves)])


def decode(codec_of: CodecOf, message: Any) -> Any:
    """The tree C(x) that `encode` compressed. ONE client."""

    def one(sent: Any) -> jax.Array:
        if not isinstance(sent, Compressed):
            return sent
        codec = codec_of(sent.like.size)
        assert codec is not None
        return codec.decode(sent.numbers).reshape(sent.like.shape).astype(sent.like.dtype)

    return jax.tree.map(one, message, is_leaf=lambda sent: isinstance(sent, Compressed))


# --- Codecs -----------------------------------------------------------------------------------------------------------


def make_codec(kind: str, size: int, *, ratio: float = 0.01, levels: int = 8) -> Codec | None:
    """The codec for tensors with ``size`` numbers, see `compression`; None if they are sent unchanged."""
    if size <= 1:
        return None
    if kind in ("topk", "randk"):
        kept = max(1, round(ratio * size))
        return None if kept == size else {"topk": topk, "randk": randk}[kind](size, kept)
    return {"qsgd": lambda: qsgd(size, levels), "int8": int8, "sign": lambda: sign(size)}[kind]()


def qsgd(size: int, levels: int) -> Codec:
    """QSGD with L levels and one Euclidean norm."""
    bits = 1 + levels.bit_length()  # a sign, and ceil(log2(L + 1)) for the level

    def encode(x: jax.Array, key: jax.Array) -> Numbers:
        unit = _unit(jnp.sum(x * x))
        scaled = x * unit
        norm = jnp.sqrt(jnp.sum(scaled * scaled))
        exact = jnp.abs(scaled) * (levels / jnp.where(norm > 0, norm, 1.0))
        below = jnp.floor(exact)
        level = below + (jax.random.uniform(key, x.shape) < exact - below).astype(jnp.float32)
        level = jnp.minimum(level, levels).astype(jnp.uint32)  # rounding of the quotient may exceed L
        return {"levels": pack(2 * level + (x < 0).astype(jnp.uint32), bits), "norm": _divided(norm, unit)}

    def decode(numbers: Numbers) -> jax.Array:
        code = unpack(numbers["levels"], size, bits)
        level = (code >> 1).astype(jnp.float32)
        return jnp.where((code & 1) == 1, -level, level) * (numbers["norm"] / levels)

    return Codec(encode, decode)


def int8() -> Codec:
    """Integers in -127..127 with one scale."""

    def encode(x: jax.Array, key: jax.Array) -> Numbers:
        scale = jnp.max(jnp.abs(x)) / 127
        return {"integers": jnp.round(x / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8), "scale": scale}

    return Codec(encode, lambda numbers: numbers["integers"].astype(jnp.float32) * numbers["scale"])


def sign(size: int) -> Codec:
    """Signs with one scale, the mean magnitude."""

    def encode(x: jax.Array, key: jax.Array) -> Numbers:
        unit = _unit(jnp.sum(jnp.abs(x)))
        return {"signs": pack((x >= 0).astype(jnp.uint32), 1), "scale": _divided(jnp.mean(jnp.abs(x * unit)), unit)}

    def decode(numbers: Numbers) -> jax.Array:
        return jnp.where(unpack(numbers["signs"], size, 1) == 1, numbers["scale"], -numbers["scale"])

    return Codec(encode, decode)


def topk(size: int, kept: int) -> Codec:
    """The ``kept`` numbers of largest magnitude and their positions."""
    bits = (size - 1).bit_length()  # ceil(log2(d))

    def encode(x: jax.Array, key: jax.Array) -> Numbers:
        _, positions = jax.lax.top_k(jnp.abs(x), kept)
        return {"kept": x[positions], "positions": pack(positions.astype(jnp.uint32), bits)}

    def decode(numbers: Numbers) -> jax.Array:
        return jnp.zeros(size).at[unpack(numbers["positions"], kept, bits)].set(numbers["kept"])

    return Codec(encode, decode)


def randk(size: int, kept: int) -> Codec:
    """``kept`` numbers at random and a seed, from which both sides draw the same positions."""

    def positions(seed: jax.Array) -> jax.Array:
        # As floats, because on CPU top_k avoids a full sort only for them. The smallest words are exact enough: equal
        # ones, of which the first is taken, are rare.
        words = jax.random.bits(random_key(seed), (size,)).astype(jnp.float32)
        return jax.lax.top_k(-words, kept)[1]

    def encode(x: jax.Array, key: jax.Array) -> Numbers:
        seed = jax.random.bits(key)
        kept = jnp.where(jnp.all(jnp.isfinite(x)), x[positions(seed)], jnp.nan)  # the bad number may not be kept
        return {"kept": kept, "seed": seed}

    def decode(numbers: Numbers) -> jax.Array:
        return jnp.zeros(size).at[positions(numbers["seed"])].set(numbers["kept"] * (size / kept))

    return Codec(encode, decode)


def _unit(total: jax.Array) -> jax.Array:
    """A factor for numbers whose ``total`` may have overflowed: 1, or a power of two that makes them small."""
    return jnp.where(jnp.isfinite(total), 1.0, 2.0**-80).astype(total.dtype)


def _divided(number: jax.Array, unit: jax.Array) -> jax.Array:
    """``number`` / ``unit``; the largest float if a finite number would overflow."""
    return jnp.where(jnp.isfinite(number), jnp.minimum(number / unit, jnp.finfo(number.dtype).max), number)


def pack(integers: jax.Array, bits: int) -> jax.Array:
    """Pack integers [n] uint32 below 2^bits into bytes [ceil(n * bits / 8)] uint8, the lowest bit of all first."""
    planes = (integers[None, :] >> jnp.arange(bits, dtype=jnp.uint32)[:, None]) & 1
    return jnp.packbits(planes.astype(jnp.uint8).reshape(-1))


def unpack(packed: jax.Array, count: int, bits: int) -> jax.Array:
    """The ``count`` integers uint32 that `pack` packed."""
    planes = jnp.unpackbits(packed, count=count * bits).reshape(bits, count).astype(jnp.uint32)
    return jnp.sum(planes << jnp.arange(bits, dtype=jnp.uint32)[:, None], axis=0, dtype=jnp.uint32)
