"""Differential privacy for clients: clip the change of each upload, and add Gaussian noise.

The guarantee covers all data of one client (user level). docs/privacy.md has the definitions, the theorems with proofs,
and what they do not cover; `fedjax_mr.channel.accounting` computes epsilon.

McMahan, Ramage, Talwar, Zhang: Learning Differentially Private Recurrent Language Models, ICLR 2018 (clipping and noise
at user level). Andrew, Thakkar, McMahan, Ramaswamy: Differentially Private Learning with Adaptive Clipping, NeurIPS
2021 (a clipping norm that follows a quantile of the norms).

Deviations. In these papers the server adds noise to a mean. Methods with several models release every upload, so here
each client adds noise to its own upload. With ``noise_on="mean"`` the clients' noise adds up to that of the papers.

Numbers. `jax.random.normal` ends at 5.4 standard deviations in float32. A number further away than that from what other
data would give is then certain evidence. For s = 1 its probability is 3e-4, more than the usual delta. So `normal`
draws the noise, which ends at 13.3 standard deviations and states the delta that remains.
"""

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_mr import trees
from fedjax_mr.channel import base
from fedjax_mr.channel.base import Context, Link, Sent, Values
from fedjax_mr.channel.server import Server
from fedjax_mr.errors import UserError
from fedjax_mr.keys import key_from_data
from fedjax_mr.settings import LARGEST_INT32, field, require
from fedjax_mr.strategies.interface import Cohort, Payload, Problem, Strategy
from fedjax_mr.strategies.parts import select_uniformly
from fedjax_mr.strategies.traffic import Traffic

NOISE_ON = ("upload", "mean")
WORDS = 4  # of 32 random bits, in which `normal` looks for the first 1: the noise ends at sqrt(2 ln(2) 32 WORDS) = 13.3
BITS_SHARE = 0.1  # at most this share of 1 / noise^2 is spent on the clients' bits, by default


_setting = functools.partial(field, group="Channel")


@dataclasses.dataclass(frozen=True)
class Privacy:
    """User-level differential privacy: clipped uploads with noise."""

    # fmt: off
    dp_clip: float | None = _setting(
        None, "User-level differential privacy: largest L2 norm C of everything that a client uploads, as a change. If "
        "omitted, no limit", low=0, open_low=True, short=True)
    dp_noise: float = _setting(
        0.0, "Noise multiplier sigma: the standard deviation of the noise is sigma C", low=0, needs=("dp_clip",))
    dp_noise_on: str = _setting(
        "upload", "Where the noise is added: to every upload (any method), or to their mean (methods with one model)",
        choices=("upload", "mean"), needs=("dp_clip",))
    dp_quantile: float | None = _setting(
        None, "Adapt the norm C, which starts at --dp_clip, to this quantile of the clients' norms. If omitted, C is "
        "constant", low=0, high=1, source="Andrew et al., NeurIPS 2021: 0.5", needs=("dp_clip",))
    dp_poisson: float | None = _setting(
        None, "Probability with which each client joins a round (Poisson sampling); --cohort is then the largest "
        "number of clients. Needs --dp_noise_on=mean. If omitted, a round has exactly --cohort clients",
        low=0, high=1, open_low=True, needs=("dp_clip",))
    dp_delta: float = _setting(
        1e-5, "delta of the column epsilon", low=0, high=1, open_low=True, open_high=True, needs=("dp_clip",),
        compiled="no")
    dp_seed: int | None = _setting(
        None, "Seed of the noise and of the choice of clients, which then follow from published numbers, for tests. If "
        "omitted, they follow from a secret of the operating system, which only the checkpoints contain",
        low=0, high=LARGEST_INT32, needs=("dp_clip",), compiled="argument")
    dp_target_epsilon: float | None = _setting(
        None, "Choose --dp_noise so that epsilon has this value after --rounds", low=0, open_low=True,
        needs=("dp_clip",), compiled="no")
    # fmt: on


def build(settings: Privacy, problem: Problem, *, secret: Any) -> Link:
    """The link of the settings, see `privacy`."""
    assert settings.dp_clip is not None
    clip, noise, quantile = settings.dp_clip, settings.dp_noise, settings.dp_quantile
    return privacy(problem, clip=clip, noise=noise, noise_on=settings.dp_noise_on, quantile=quantile, secret=secret)


def privacy(
    problem: Problem,
    *,
    clip: float | jax.Array,
    noise: float | jax.Array = 0.0,
    noise_on: str = "upload",
    quantile: float | jax.Array | None = None,
    quantile_lr: float | jax.Array = 0.2,
    quantile_noise: float | jax.Array | None = None,
    secret: Any = None,
) -> Link:
    """A link that clips the change of each upload and adds Gaussian noise.

    The change is the difference between the values of an upload and what the client received. Its norm is a single
    Euclidean norm over all leaves of all values, such as a model and a control variate. A longer change is scaled to
    the norm C. A change with an infinite or undefined norm is replaced by zero.

    Noise. With ``noise_on="upload"`` each coordinate of an upload has noise of standard deviation ``noise`` * C, and
    anyone may see the uploads. With ``noise_on="mean"`` it is ``noise`` * C / sqrt(K), so the mean of the K uploads has
    noise of standard deviation ``noise`` * C / K, as if a trusted server had added it. That protects the mean and not
    the single upload, so it suits methods whose server uses only the uniform mean (see `refusal`).

    Adaptive clipping. With ``quantile``, the server keeps C, starts at ``clip`` and announces it to the clients. A
    client sends a bit b_i, whether the norm of its change is at most C, with Gaussian noise. With the mean b of these
    bits, the server sets C to C exp(-``quantile_lr`` (b - ``quantile``)), for the next round. The noise of the changes
    is increased so that change and bit together cost as much privacy as a change with ``noise`` (see `multipliers`).

    Reported: ``clipped``, the share of the cohort whose change is longer than C, and ``clip_norm``, C of the round, for
    adaptive clipping. ``clipped`` is computed in the simulation only and is not covered by the guarantee.

    Args:
      problem: the federation.
      clip: C, the largest norm of a change; with ``quantile``, C of the first round.
      noise: standard deviation of the noise in units of C (the noise multiplier). 0 adds none.
      noise_on: ``upload`` or ``mean``.
      quantile: quantile of the norms that C follows, in 0..1; 0.5 is the median (Andrew et al.). Default: C is fixed.
      quantile_lr: learning rate of log C; 0.2 in Andrew et al.
      quantile_noise: standard deviation of the noise of the sum of the K bits. Default: K / 20 (Andrew et al.), or more
        if otherwise the bits would take more than a tenth of the privacy budget, and 0 without ``noise``.
      secret: two words [2] uint32 that only the clients know (`draw_secret`), from which the noise follows. Default:
        the noise follows from the key of the run, so those who know its seed can subtract the noise.

    Raises:
      UserError: a number is out of range, or ``noise_on`` is unknown.
    """
    if noise_on not in NOISE_ON:
        raise UserError(f"unknown noise_on {noise_on!r} (known: {', '.join(NOISE_ON)})")
    require(clip > 0, "the clipping norm must be positive: pass clip=1")
    require(noise >= 0, "the noise must not be negative: pass noise=0 for none")
    require((clip < math.inf) | (noise == 0), "noise needs a finite clipping norm: pass clip=1")
    if quantile is not None:
        require(quantile >= 0, "the quantile of adaptive clipping lies in 0..1: pass quantile=0.5")
        require(quantile <= 1, "the quantile of adaptive clipping lies in 0..1: pass quantile=0.5")
        require(quantile_lr >= 0, "the learning rate of the clipping norm must not be negative: pass quantile_lr=0.2")
    cohort, bit_noise = problem.cohort_size, None
    if quantile is not None:
        noise, bit_noise = multipliers(cohort, noise, noise_on=noise_on, quantile_noise=quantile_noise)
    divisor = math.sqrt(cohort) if noise_on == "mean" else 1.0

    def client(values: Values, reference: Values, memory: Any, context: Context) -> Sent:
        bound = jnp.asarray(clip if quantile is None else context.note, jnp.float32)
        key, bit_key = jax.random.split(secret_key(context.key, secret))
        clipped, norm = clip_change(values, reference, bound)
        is_short = jnp.isfinite(norm) & (norm <= bound)
        multiplier = jnp.asarray(noise, jnp.float32)
        deviation = jnp.where(multiplier == 0, 0.0, multiplier * bound / divisor)  # no noise, though C may be infinite
        message = add_noise(clipped, deviation, key)
        note = None
        if bit_noise is not None:
            bit = is_short.astype(jnp.float32)
            note = add_noise(bit, jnp.asarray(bit_noise, jnp.float32), bit_key)
        return Sent(message, memory, note, {"clipped": (~is_short).astype(jnp.float32)})

    def server(bound: Any, values: Values, reference: Values, context: Context) -> tuple[Any, Values, dict[str, Any]]:
        assert quantile is not None
        inside = jnp.mean(context.note)
        return bound * jnp.exp(-quantile_lr * (inside - quantile)), values, {"clip_norm": bound}

    adaptive = {}
    if quantile is not None:
        adaptive = {
            "server": server,
            "init": lambda key: jnp.asarray(clip, jnp.float32),
            "announce": lambda bound, client: bound,
        }
    between = "changes the uploads before their mean, whose noise protects nothing else: pass noise_on=upload"
    excludes = tuple((kind, f"{kind} {between}") for kind in ("compression", "robust"))
    excludes += (("attack", "attackers add no noise, so their mean with others has too little: pass noise_on=upload"),)
    excludes = excludes if noise_on == "mean" else ()
    return Link("privacy", client=client, check=_check, excludes=excludes, **adaptive)


def clip_change(values: Values, reference: Values, bound: jax.Array) -> tuple[Values, jax.Array]:
    """Scale the change of the values to a norm of at most ``bound``: -> (values, norm of the change before).

    If the norm is at most ``bound``, the values are returned bit for bit. If it is not finite, the change is zero.
    """
    change = jax.tree.map(jnp.subtract, values, reference)
    norm = jnp.sqrt(trees.squared_norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), change)))
    finite = jnp.isfinite(norm)
    factor = jnp.where(finite, bound, 0.0) / jnp.where(finite & (norm > 0), norm, 1.0)

    def scaled(value: jax.Array, start: jax.Array, change: jax.Array) -> jax.Array:
        shorter = start + jnp.where(finite, change, jnp.zeros_like(change)) * factor.astype(change.dtype)
        return jnp.where(finite & (norm <= bound), value, shorter)

    return jax.tree.map(scaled, values, reference, change), norm


def add_noise(tree: Any, deviation: jax.Array, key: jax.Array) -> Any:
    """Add independent Gaussian noise to every number of a tree; consumes ``key``.

    A standard deviation of 0 returns the tree bit for bit.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))

    def noisy(leaf: jax.Array, key: jax.Array) -> jax.Array:
        noisy = leaf.astype(jnp.float32) + deviation * normal(key, leaf.shape)
        return jnp.where(deviation == 0, leaf, noisy.astype(leaf.dtype))

    return jax.tree.unflatten(structure, [noisy(leaf, key) for leaf, key in zip(leaves, keys, strict=True)])


def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Standard normals in float32 with all of their tails (Box and Muller, 1958); consumes ``key``.

    They end at 13.3 standard deviations. If data move a number by D standard deviations, at most 2 / s, this adds at
    most P(N > 13.3 - D) to delta, for a standard normal N: less than 1e-19 for s = 0.5 or more, and 6e-8 for s = 0.25.
    """
    exponent_key, fraction_key, angle_key = jax.random.split(key, 3)
    words = jax.random.bits(exponent_key, (WORDS, *shape), jnp.uint32)
    squares = 2 * exponential(words, jax.random.uniform(fraction_key, shape))
    return jnp.sqrt(squares) * jnp.cos(2 * jnp.pi * jax.random.uniform(angle_key, shape))


def exponential(words: jax.Array, fraction: jax.Array) -> jax.Array:
    """-log(u) for the uniform number u = (1 + ``fraction``) / 2^(z + 1), with z zeros before the first 1 in ``words``.

    So u has the precision of float32 near 0 as well, where a uniform number of JAX is a multiple of 2^-23.

    Args:
      words: random bits [WORDS, ...] uint32.
      fraction: uniform numbers [...] in 0..1 without 1.
    """
    zeros = jax.lax.clz(words)
    total = zeros[-1]
    for each in zeros[-2::-1]:
        total = jnp.where(each == 32, total + 32, each)
    halvings = (total + 1).astype(jnp.float32)
    return jnp.maximum(halvings * jnp.float32(math.log(2)) - jnp.log1p(fraction), 0.0)


def draw_secret() -> np.ndarray:
    """A secret for `privacy` and `secretly_selected` from the operating system: two words [2] uint32."""
    return np.frombuffer(os.urandom(8), np.uint32).copy()


def secret_key(key: jax.Array, secret: Any) -> jax.Array:
    """The random key for a secret [2] uint32 and a known key, which may be public. Without a secret, the known key."""
    if secret is None:
        return key
    hidden = key_from_data(jnp.asarray(secret, jnp.uint32))
    for word in jax.random.key_data(key).reshape(-1):
        hidden = jax.random.fold_in(hidden, word)
    return hidden


def secretly_selected(inner: Strategy, problem: Problem, secret: Any) -> Strategy:
    """The strategy whose cohorts do not follow from the seed of the run, but from a secret as well (`draw_secret`)."""

    def select(state: Any, round: jax.Array, key: jax.Array) -> Cohort | None:
        key = secret_key(key, secret)
        return select_uniformly(problem, key) if inner.select is None else inner.select(state, round, key)

    return inner._replace(select=select)


def multipliers(
    cohort: int, noise: float | jax.Array, *, noise_on: str, quantile_noise: float | jax.Array | None = None
) -> tuple[float | jax.Array, float | jax.Array]:
    """The noise of adaptive clipping: (noise multiplier s' of the change, standard deviation of the bit of ONE client).

    Replacing a client moves its change by up to 2 C and its bit by 1. With noise s' C on the change and z on the bit,
    the pair costs as much as a change with noise s C, where 1 / s^2 = 1 / s'^2 + 1 / (2 z)^2 (Andrew et al.,
    Theorem 1). For ``noise_on="mean"``, s' C and z are the noise of the sums over the K clients.

    Args:
      cohort: K.
      noise: s.
      noise_on: as in `privacy`.
      quantile_noise: as in `privacy`.

    Raises:
      UserError: the bits alone would cost more than ``noise`` allows.
    """
    root = math.sqrt(cohort)
    counted = 1.0 if noise_on == "mean" else root  # noise of the sum of the bits / z
    if quantile_noise is None:
        least = counted * noise / (2 * math.sqrt(BITS_SHARE))
        total = jnp.where(jnp.asarray(noise) > 0, jnp.maximum(cohort / 20, least), 0.0)
    else:
        total = quantile_noise
        too_small = "the noise of adaptive clipping's bits is too small for this noise: omit quantile_noise"
        require((noise == 0) | (2 * total > counted * noise), too_small)
    z = jnp.asarray(total, jnp.float32) / counted
    ratio = jnp.where(z > 0, jnp.asarray(noise, jnp.float32) / (2 * jnp.where(z > 0, z, 1.0)), 0.0)
    return jnp.asarray(noise, jnp.float32) / jnp.sqrt(1 - ratio**2), jnp.asarray(total, jnp.float32) / root


# --- Strategies that privacy refuses ----------------------------------------------------------------------------------


def _check(strategy: Strategy, problem: Problem) -> None:
    """Refuse BatchNorm statistics, which would leave a client without clipping and noise. `refusal` checks the rest."""
    if reason := _other_collections(problem):
        raise UserError(reason)


def _other_collections(problem: Problem) -> str | None:
    if len(problem.model.networks) > 1:
        return "clients with different networks have no channel: pass a single network in model="
    others = [name for name, tree in problem.model.shapes().items() if name != "params" and jax.tree.leaves(tree)]
    if not others:
        return None
    return (
        f"the network has {', '.join(others)} (BatchNorm), which would be sent without noise: use GroupNorm, which is "
        "norm='group' of the built-in networks"
    )


def refusal(strategy: Strategy, problem: Problem, *, noise_on: str = "upload") -> str | None:
    """Why the guarantee does not hold for a strategy: one line with a remedy, or None if it holds.

    Server and payloads may depend on the clients' data only through the noisy values. So this refuses collections
    other than the parameters (BatchNorm), own selection of clients, host code between rounds, uploads with other
    entries than float arrays, and servers that read numbers of samples or label counts. With ``noise_on="mean"``, it
    also refuses servers that use more than the uniform mean of the uploads. `channel.server.Server` finds these facts.

    Call it once before a run, on the strategy without a channel. It traces several functions and takes about as long
    as building a round.

    Args:
      strategy: the strategy.
      problem: the problem of the strategy, with known numbers.
      noise_on: as in `privacy`.
    """
    if reason := _other_collections(problem):
        return reason
    if strategy.select is not None:
        return "the strategy selects clients itself, which may depend on their data: use one that selects uniformly"
    if strategy.between_rounds is not None:
        return "the strategy runs code between rounds that may read the clients' data: use one without it"
    upload = base.upload_shapes(strategy, problem)
    values, others = base.split(upload)
    if unprotected := [name for name, each in others.items() if jax.tree.leaves(each)]:
        return f"clients upload {', '.join(unprotected)}, which noise cannot protect: use a strategy without it"
    if not values:
        return "clients upload nothing that noise could protect: the strategy needs no privacy link"
    server = Server(strategy, problem, upload)
    if server.reads("sizes"):
        return (
            "the server weights clients by their numbers of samples, which are not protected: pass weights=uniform if "
            "the strategy has it, or use privacy.uniform_weights"
        )
    if server.reads_of_problem("sizes", "label_counts", "validation_sizes"):
        return (
            "the server reads the clients' numbers of samples or label counts, which are not protected: use another "
            "strategy"
        )
    if noise_on == "mean" and not server.uses_only_the_mean():
        return "the server uses more than the uniform mean of the uploads: pass noise_on=upload"
    return None


def uniform_weights(inner: Strategy, *, size: int = 1) -> Strategy:
    """A strategy whose server treats all clients as equally large, so that its means are uniform.

    Args:
      inner: the strategy.
      size: the number of samples that the server takes each client to have. FedCM and its relatives derive the number
        of local steps from it.
    """

    def equal(cohort: Cohort) -> Cohort:
        return cohort._replace(sizes=jnp.full_like(cohort.sizes, size))

    return inner._replace(
        dispatch=lambda state, cohort, key: inner.dispatch(state, equal(cohort), key),
        server_update=lambda state, uploads, cohort, round, key: inner.server_update(
            state, uploads, equal(cohort), round, key
        ),
    )


def poisson(inner: Strategy, problem: Problem, probability: float | jax.Array) -> Strategy:
    """A strategy in whose rounds each of the N clients takes part with probability q, independently (Poisson sampling).

    Arrays keep their shapes: a round has K slots. If more than K clients join, K of them at random train. A slot that
    stays empty uploads what it received. So a uniform mean over the K slots is the sum of the changes divided by K,
    however many clients join, and with ``noise_on="mean"`` the noise of all K slots makes up that of the mean.
    `accounting.epsilon` has this mechanism as ``sampling="poisson"``.

    Uploads that noise on the mean does not suit, own selection and clients with a memory are for `refusal` and
    `hides_cohorts` to find: call both with ``inner``.

    Args:
      inner: the strategy, without a channel.
      problem: the problem of the strategy. Its cohort K is the largest number of clients in a round.
      probability: q, above 0 and at most K / N. May be traced.

    Raises:
      UserError: q is out of range.
    """
    clients, slots = problem.num_clients, problem.cohort_size
    require(probability > 0, "the probability of taking part must be positive: pass dp_poisson=0.05")
    require(
        probability * clients <= slots * (1 + 1e-6),
        f"with this probability more than {slots} of {clients} clients take part on average: pass a larger cohort",
    )

    def select(state: Any, round: jax.Array, key: jax.Array) -> Cohort:
        join_key, order_key = jax.random.split(key)
        joins = jax.random.bernoulli(join_key, probability, (clients,))
        ids = jax.lax.top_k(jnp.where(joins, jax.random.uniform(order_key, (clients,)), -1.0), slots)[1]
        return Cohort(ids, jnp.where(joins[ids], problem.sizes[ids], 0))

    def client_update(payload: Payload, memory: Any, data: Any, round: jax.Array, key: jax.Array) -> tuple:
        upload, memory, metrics = inner.client_update(payload, memory, data, round, key)
        values, others = base.split(upload)
        values = trees.where(data.size == 0, base.received(values, others, payload), values)
        return base.joined(values, others), memory, metrics

    def traffic(usual: Traffic, state: Any, uploads: Payload, cohort: Cohort, round: jax.Array) -> Traffic:
        present = jnp.sum(cohort.sizes > 0, dtype=jnp.int32)
        sent = lambda parcels: tuple(dataclasses.replace(each, count=present) for each in parcels)
        return Traffic(sent(usual.down), sent(usual.up))

    return inner._replace(select=select, client_update=client_update, traffic=traffic)


def hides_cohorts(strategy: Strategy, problem: Problem, *, sampling: str = "without_replacement") -> bool:
    """Whether the accountant may use that the server's cohorts are secret.

    Amplification by sampling needs rounds that are linked by the released models alone. That fails if clients keep a
    memory, because a later upload can then show whether its client took part before; or if payloads or the server's
    state depend on client ids. With Poisson sampling it also fails if they depend on which slots are empty. For these
    strategies ``sampling="public"`` is correct.

    Args:
      strategy: the strategy, with its channel: error feedback is a memory, too.
      problem: the problem of the strategy, with known numbers.
      sampling: ``without_replacement`` or ``poisson``.
    """
    if strategy.select is not None or strategy.between_rounds is not None or strategy.init_memory is not None:
        return False
    server = Server(strategy, problem, base.upload_shapes(strategy, problem))
    sees_absence = sampling == "poisson" and server.reads("sizes", also_whether_zero=True)
    return not (server.reads("ids") or sees_absence)
