"""Learning rates of the clients that change over the rounds: the factor of ``lr`` in a round, counted from 0.

A schedule is a function round -> factor, like one of optax. It belongs to the `LocalSetting`, and the engine builds the
strategy of a round with the learning rate of that round. So each method follows it, also where its formulas contain the
learning rate (SCAFFOLD, FedDyn). Tests and fine-tuning after the rounds use the learning rate without a factor.

Deviation: where a formula divides by the learning rate, it is that of the round. FedDC's released code divides by the
first one in all rounds.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array], jax.Array]
"""round (float32) -> factor of the learning rate"""


def constant(round: jax.Array, numbers: dict[str, Any]) -> jax.Array:
    """1."""
    return jnp.ones_like(round)


def exponential(round: jax.Array, numbers: dict[str, Any]) -> jax.Array:
    """decay^round. The released codes of FedExP and FedDC: 0.998."""
    return numbers["decay"] ** round


def step(round: jax.Array, numbers: dict[str, Any]) -> jax.Array:
    """decay^(number of whole intervals of ``every`` rounds that have passed)."""
    return numbers["decay"] ** jnp.floor(round / numbers["every"])


def cosine(round: jax.Array, numbers: dict[str, Any]) -> jax.Array:
    """Half a cosine from 1 in the first round to 0 after ``over`` rounds (Loshchilov, Hutter, ICLR 2017)."""
    return (1 + jnp.cos(jnp.pi * jnp.minimum(round / numbers["over"], 1.0))) / 2


SCHEDULES: dict[str, Callable[[jax.Array, dict[str, Any]], jax.Array]] = {
    "constant": constant,
    "exponential": exponential,
    "step": step,
    "cosine": cosine,
}


def schedule(
    name: str = "constant", *, decay: float = 0.998, every: float = 100, over: float = 1, warmup: float = 0
) -> Schedule | None:
    """A schedule by name, or None if the learning rate is constant.

    The numbers are leaves of the result, so they are arguments of the compiled programs.

    Args:
      name: one of `SCHEDULES`.
      decay: factor of ``exponential`` for each round, and of ``step`` for each interval.
      every: rounds of an interval of ``step``.
      over: rounds after which ``cosine`` is 0.
      warmup: number W of first rounds in which the factor rises: round r has (r + 1) / W of the schedule's factor.
    """
    if name == "constant" and not warmup:
        return None
    numbers = {"constant": {}, "exponential": {"decay": decay}, "step": {"decay": decay, "every": every}}
    own = numbers.get(name, {"over": over})
    arrays = {key: jnp.float32(value) for key, value in own.items()}
    return jax.tree_util.Partial(_warmed_up, jax.tree_util.Partial(SCHEDULES[name]), arrays, warmup or None)


def _warmed_up(
    schedule: Callable[[jax.Array, Any], jax.Array], numbers: dict[str, Any], warmup: Any, round: jax.Array
) -> jax.Array:
    """The factor of a schedule after a linear warm-up."""
    factor = schedule(round, numbers)
    return factor if warmup is None else factor * jnp.minimum(1.0, (round + 1) / warmup)
