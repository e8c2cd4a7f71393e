"""Attacks: some clients of the federation send messages that damage the training.

Data. ``label_flip``: attackers train on the labels C - 1 - y (Fang, Cao, Jia, Gong: Local Model Poisoning Attacks to
Byzantine-Robust Federated Learning, USENIX Security 2020; for ten classes 9 - y).

Messages. All attacks act on changes, values minus reference, so they also have a meaning if each client trains
another model. Below, s is ``scale``; m, d and x_i are the mean, the standard deviation (with n - 1) and one of the
changes of the honest clients in the same round. An attacker's change becomes

| attack | change | default of s | source |
|---|---|---|---|
| ``sign_flip`` | -s times its own | 1 | Li, Xu, Chen, Giannakis, Ling: RSA, AAAI 2019 |
| ``gaussian`` | normal, mean 0, standard deviation s | 1 (ByzFL) | Blanchard et al.: Krum, NeurIPS 2017 |
| ``ipm`` | -s m | 2 (ByzFL) | Xie, Koyejo, Gupta: Fall of Empires, UAI 2019 |
| ``alie`` | m + s d | z, see `largest_deviation` | Baruch, Baruch, Goldberg: A Little Is Enough, NeurIPS 2019 |
| ``mimic`` | s x_i | 1 | Karimireddy, He, Jaggi: Byzantine-Robust Learning via Bucketing, ICLR 2022 |
| ``replacement`` | s times its own | K / attackers of the round | Bagdasaryan et al., AISTATS 2020 |

``replacement`` is model replacement with a backdoor. Attackers train on their samples, some of which carry a trigger
and have the label ``target`` (`backdoored`), and scale their change so that it survives the mean. If all other
clients send back what they received, the uniform mean with s = K is the attacker's model. The success of the attack
is the share of images with the trigger that the deployed model assigns to ``target`` (`Simulator.attacked`).

Where codes differ. Sign flip: ByzFL 0.0.11 sends -m (here ``ipm`` with s = 1); Blades negates each gradient in
training. Gaussian: Blades has mean 0.1 and standard deviation 0.1. IPM: Blades has s = 1. ALIE: ByzFL has s = 1.5 for
every n and f; the code of the bucketing paper subtracts s d, which mirrors the attack. Mimic: ByzFL copies the first
honest client; the paper chooses the one whose messages vary most in a first phase. Here it is the honest client of
the round with the smallest number, so the same client is copied in all rounds that select it. Replacement: under
weights by samples, s would have to be sum(n_i) over the attackers' n_i; here the number for the uniform mean is used
with all methods.

Attackers know only the honest messages of their round and do not adapt to the defence. In a round without honest
clients, ``ipm``, ``alie`` and ``mimic`` send back what the clients received. All values that a strategy uploads are
attacked, also control variates, prototypes and logits, whose reference is zero. In methods with K models no mean
divides the scaled change of ``replacement``: it stays in the model that carries it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_mr import trees
from fedjax_mr.channel.base import Context, Link, Values
from fedjax_mr.client import local
from fedjax_mr.client.samples import ClientData, backdoored
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.keys import random_key
from fedjax_mr.settings import field, require
from fedjax_mr.strategies.interface import Info, Problem, Strategy

Number = jax.Array | float
ATTACKERS = 2**31 + 47  # stream of the random keys of a seed that draws the attackers; nothing else uses it


_setting = functools.partial(field, group="Channel")


@dataclasses.dataclass(frozen=True)
class Attack:
    """Malicious clients."""

    # fmt: off
    attack: str = _setting(
        "none", "What malicious clients do: train on wrong labels (label_flip), upload the opposite of their change "
        "(sign_flip), noise (gaussian), the negative mean (ipm), the mean a little off (alie), a copy of another "
        "client (mimic), or a model with a backdoor (replacement)",
        choices=("none", "label_flip", "sign_flip", "gaussian", "ipm", "alie", "mimic", "replacement"), short=True)
    attackers: float = _setting(
        0.2, "Share of malicious clients. The seed of the partition decides which ones", low=0, high=1,
        needs=("attack",))
    attack_scale: float | None = _setting(
        None, "Strength of the attack. If omitted, the usual one of each attack (docs/attacks.md)", low=0,
        needs=("attack",))
    attack_target: int = _setting(
        0, "replacement: the class that samples with the trigger shall have", low=0,
        needs=("attack", "replacement"))
    # fmt: on


def build(settings: Attack, problem: Problem, *, seed: jax.Array) -> Link:
    """The link of the settings, see `attack`."""
    attackers, scale, target = settings.attackers, settings.attack_scale, settings.attack_target
    return attack(problem, settings.attack, attackers=attackers, seed=seed, scale=scale, target=target)


def attack(
    problem: Problem,
    kind: str,
    *,
    attackers: Number,
    seed: jax.Array | int,
    scale: Number | None = None,
    target: int = 0,
    poisoned: Number = 0.5,
) -> Link:
    """A link in which some clients attack.

    Info: ``attackers``, the number of attackers in the round.

    Args:
      problem: the problem of the strategy.
      kind: one of `KINDS`.
      attackers: share of the N clients that are attackers, in 0..1. May be traced.
      seed: decides who is an attacker, see `attackers_of`. May be traced.
      scale: strength of an attack on messages. Default: see the table above. May be traced.
      target: for ``replacement``, the label that images with the trigger shall get.
      poisoned: for ``replacement``, share of an attacker's samples that carry the trigger, in 0..1. May be traced.

    Raises:
      UserError: unknown kind, a number outside its range, or ``replacement`` on samples that are no images.
        `Link.check` raises it if clients exchange layers before the upload.
    """
    if kind not in KINDS:
        raise unknown_name("attack", kind, KINDS)
    for name, share in (("attackers", attackers), ("poisoned", poisoned)):
        require((share >= 0) & (share <= 1), f"{name} is a share and must be from 0 to 1, but it is {share}")
    if kind == "replacement":
        if len(problem.model.input_shape) != 3:
            raise UserError("replacement needs images, which carry its trigger: choose another attack for this dataset")
        if not 0 <= target < problem.num_classes:
            raise UserError(f"attack_target={target} is no class: choose one of 0..{problem.num_classes - 1}")
    if kind in ("label_flip", "replacement") and "classes" not in problem.model.task.provides:
        raise UserError(f"attack={kind} changes classes, but the task is {problem.model.task.name}: choose another one")
    message = KINDS[kind]

    def is_attacker(client: jax.Array) -> jax.Array:
        return attackers_of(problem.num_clients, attackers, seed)[client]

    def flipped(data: ClientData, context: Context) -> ClientData:
        y = jnp.asarray(data.samples.y)
        y = jnp.where(is_attacker(context.client), problem.num_classes - 1 - y, y)
        return data._replace(samples=data.samples._replace(y=y))

    def with_backdoor(data: ClientData, context: Context) -> ClientData:
        share = jnp.where(is_attacker(context.client), poisoned, 0.0)
        key = jax.random.fold_in(_key(seed), context.client)
        rows = _some_rows(data, share, key, problem.local.max_size)
        return data._replace(samples=backdoored(data.samples, rows, target))

    def server(state: Any, values: Values, reference: Values, context: Context) -> tuple[Any, Values, Info]:
        attacker = is_attacker(context.client)
        info = {"attackers": jnp.sum(attacker, dtype=jnp.int32)}
        if message is None:
            return state, values, info
        forged = trees.add(reference, message(trees.subtract(values, reference), ~attacker, scale, context))
        return state, jax.vmap(trees.where)(attacker, forged, values), info

    def check(strategy: Strategy, problem: Problem) -> None:
        if strategy.exchange is not None and strategy.exchange.before_upload:
            raise UserError(
                "after an exchange of layers no message is the change of one client, which an attacker would forge: "
                "use the exchange or an attack, not both"
            )

    data = {"label_flip": flipped, "replacement": with_backdoor}.get(kind)
    return Link("attack", server=server, data=data, check=check)


def attackers_of(num_clients: int, share: Number, seed: jax.Array | int) -> jax.Array:
    """Which of the N clients are attackers [N] bool: the first round(share N) of a permutation that ``seed`` draws.

    They do not depend on the strategy, and with a larger share the same clients and others are attackers.
    """
    order = jax.random.permutation(_key(seed), num_clients)
    count = jnp.round(jnp.asarray(share, jnp.float32) * num_clients).astype(jnp.int32)
    return jnp.zeros(num_clients, bool).at[order].set(jnp.arange(num_clients, dtype=jnp.int32) < count)


def largest_deviation(count: int, attackers: Number) -> jax.Array:
    """The z of ALIE for n clients and f attackers, float32: the deviation that still has enough honest supporters.

    Baruch et al. 2019, Algorithm 3: with h = floor(n / 2) + 1 - f supporters needed for a majority, z is the
    (n - f - h) / (n - f) quantile of the normal distribution. With 5 of 25 attackers it is 0.2533, with 2 of 10 it is 0
    and with 1 of 10 it is negative. For quantiles 0 and 1 z is infinite, so these are moved by half an honest client;
    a majority of attackers has quantile 1.
    """
    attackers = jnp.asarray(attackers).astype(jnp.float32)
    honest = jnp.maximum(count - attackers, 1.0)
    supporters = count // 2 + 1 - attackers
    share = (honest - supporters) / honest
    return jax.scipy.special.ndtri(jnp.clip(share, 0.5 / honest, 1 - 0.5 / honest))


# --- The changes that attackers send: (changes [K, ...], honest [K] bool, scale, context) -> changes [K, ...] ---------


def _sign_flip(changes: Values, honest: jax.Array, scale: Number | None, context: Context) -> Values:
    return _scaled(changes, -_or(scale, 1.0))


def _gaussian(changes: Values, honest: jax.Array, scale: Number | None, context: Context) -> Values:
    leaves, structure = jax.tree.flatten(changes)
    keys = jax.random.split(context.key, len(leaves))
    noise = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return _scaled(jax.tree.unflatten(structure, noise), _or(scale, 1.0))


def _ipm(changes: Values, honest: jax.Array, scale: Number | None, context: Context) -> Values:
    return _to_all(_scaled(_mean(changes, honest), -_or(scale, 2.0)), honest)


def _alie(changes: Values, honest: jax.Array, scale: Number | None, context: Context) -> Values:
    count = honest.shape[0]
    mean = _mean(changes, honest)
    squares = jax.tree.map(lambda leaf, mean: jnp.square(leaf - mean[None]), changes, mean)
    some, others = jnp.sum(honest, dtype=jnp.float32), jnp.maximum(jnp.sum(honest, dtype=jnp.float32) - 1, 1.0)
    variance = _scaled(_mean(squares, honest), some / others)
    z = largest_deviation(count, count - some) if scale is None else jnp.asarray(scale)
    return _to_all(trees.add(mean, _scaled(jax.tree.map(jnp.sqrt, variance), z)), honest)


def _mimic(changes: Values, honest: jax.Array, scale: Number | None, context: Context) -> Values:
    row = jnp.argmin(jnp.where(honest, context.client, jnp.iinfo(jnp.int32).max))
    copied = _scaled(trees.take(changes, row), jnp.where(jnp.any(honest), _or(scale, 1.0), 0.0))
    return _to_all(copied, honest)


def _replacement(changes: Values, honest: jax.Array, scale: Number | None, context: Context) -> Values:
    count = honest.shape[0] / jnp.maximum(jnp.sum(~honest, dtype=jnp.float32), 1.0)
    return _scaled(changes, count if scale is None else jnp.asarray(scale))


KINDS: dict[str, Callable[[Values, jax.Array, Number | None, Context], Values] | None] = {
    "label_flip": None,
    "sign_flip": _sign_flip,
    "gaussian": _gaussian,
    "ipm": _ipm,
    "alie": _alie,
    "mimic": _mimic,
    "replacement": _replacement,
}
"""For each attack, the function that computes the changes which attackers upload. None: attackers upload what they have
trained, but on changed data."""


def _key(seed: jax.Array | int) -> jax.Array:
    return jax.random.fold_in(random_key(seed), ATTACKERS)


def _some_rows(data: ClientData, share: jax.Array, key: jax.Array, max_size: int) -> jax.Array:
    """Round(share n) of a client's n training samples at random: the rows of all samples [M] bool. Consumes ``key``.

    Positions are drawn and not rows, so the same samples are chosen wherever the samples are kept.
    """
    order = local.shuffle(key, data.size, max_size)
    count = jnp.round(share * data.size.astype(jnp.float32)).astype(jnp.int32)
    index, rows = jnp.asarray(data.index), data.samples.y.shape[0]
    chosen = index[jnp.minimum(data.offset + order, index.shape[0] - 1)]
    is_chosen = jnp.arange(max_size, dtype=jnp.int32) < count
    return jnp.zeros(rows, bool).at[jnp.where(is_chosen, chosen, rows)].set(True, mode="drop")


def _or(scale: Number | None, default: float) -> jax.Array:
    return jnp.asarray(default if scale is None else scale, jnp.float32)


def _scaled(tree: Values, factor: jax.Array) -> Values:
    return jax.tree.map(lambda leaf: factor.astype(leaf.dtype) * leaf, tree)


def _mean(tree: Values, honest: jax.Array) -> Values:
    """The mean over the honest rows of leaves [K, ...]; 0 if there are none."""
    kept = jax.vmap(trees.where)(honest, tree, trees.zeros_like(tree))
    count = jnp.maximum(jnp.sum(honest, dtype=jnp.float32), 1.0)
    return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) / count.astype(leaf.dtype), kept)


def _to_all(tree: Values, honest: jax.Array) -> Values:
    return trees.broadcast(tree, honest.shape[0])
