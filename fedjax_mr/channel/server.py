"""What a server reads of its clients beside the values that they upload.

These facts are found in the functions of a built strategy, and no strategy declares them: they depend on its
hyper-parameters (uniform weights, a second stage), on wrappers and on links, and a wrong declaration would be a wrong
guarantee of privacy.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from fedjax_mr.channel import base
from fedjax_mr.keys import random_key
from fedjax_mr.strategies.interface import Cohort, Payload, Problem, Strategy

PROBED = (0, *(10**power for power in range(10)))  # rounds in which `Server.uses_only_the_mean` examines the update


class Server:
    """The functions of a strategy's server, to be traced."""

    def __init__(self, strategy: Strategy, problem: Problem, upload: Payload) -> None:
        """Compute the shapes of their arguments.

        Args:
          strategy: the strategy.
          problem: its problem, with known numbers.
          upload: shapes of ONE client's upload (`channel.base.upload_shapes`).
        """
        self.strategy, self.problem = strategy, problem
        stacked = lambda leaf: jax.ShapeDtypeStruct((problem.cohort_size, *leaf.shape), leaf.dtype)
        self.uploads = jax.tree.map(stacked, upload)
        ids = jax.ShapeDtypeStruct((problem.cohort_size,), jnp.int32)
        cohort = jax.eval_shape(Cohort, ids, jax.ShapeDtypeStruct(ids.shape, problem.sizes.dtype))
        key = jax.eval_shape(lambda: random_key(0))
        state = jax.eval_shape(strategy.init, key)
        self._arguments = cohort, state, key, jax.ShapeDtypeStruct((), jnp.int32), self.uploads

    def reads(self, field: str, *, also_whether_zero: bool = False) -> bool:
        """Whether payloads or the new state depend on a field of the cohort.

        Comparisons such as ``sizes > 0`` only count with ``also_whether_zero``: every client has samples, and only late
        or absent ones have size 0.
        """
        cohort, *others = self._arguments
        part = getattr(cohort, field)

        def computed(part: Any, cohort: Cohort, *others: Any) -> Any:
            return self._computed(cohort._replace(**{field: part}), *others)

        jaxpr = jax.make_jaxpr(computed)(part, cohort, *others).jaxpr
        sources = jaxpr.invars[: len(jax.tree.leaves(part))]
        return _reaches_outputs(jaxpr, sources, ignored=() if also_whether_zero else ("gt",))

    def reads_of_problem(self, *fields: str) -> bool:
        """Whether payloads, states or deployed models depend on arrays of the problem, such as ``label_counts``.

        An array of the same type, shape and content counts as that of the problem.
        """
        known = [np.asarray(each) for field in fields if (each := getattr(self.problem, field)) is not None]
        members = [each for each in (self.strategy.global_model, self.strategy.individual_models) if each is not None]

        def computed(cohort: Cohort, state: Any, key: Any, *others: Any) -> Any:
            of_state = [member(state) for member in members]
            return self._computed(cohort, state, key, *others), self.strategy.init(key), of_state

        closed = jax.make_jaxpr(computed)(*self._arguments)
        same = lambda value, each: value.dtype == each.dtype and np.array_equal(value, each)
        constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        sources = [variable for variable, value in constants if any(same(value, each) for each in known)]
        return _reaches_outputs(closed.jaxpr, sources)

    def _computed(self, cohort: Cohort, state: Any, key: Any, round: Any, uploads: Any) -> tuple[Payload, Any]:
        """The payloads and the next state."""
        payloads = self.strategy.dispatch(state, cohort, key)
        if self.strategy.receive is not None:  # a compressed upload must be decoded first
            state, uploads, _ = self.strategy.receive(state, uploads, payloads, cohort, round, key)
        return payloads, self.strategy.server_update(state, uploads, cohort, round, key)[0]

    def uses_only_the_mean(self) -> bool:
        """Whether the new state is the same for two sets of random uploads with the same uniform mean.

        Some methods average in their first rounds only, so this examines the rounds `PROBED`, one after the other: each
        starts from the state that the one before has left. The relative tolerance is 1e-4 of what a round changes.
        """
        count, problem, key = self.problem.cohort_size, self.problem, random_key(0)
        cohort = Cohort(jnp.arange(count, dtype=jnp.int32), problem.sizes[:count])
        values, others = base.split(self.uploads)

        @jax.jit
        def update(state: Any, changes: base.Values, round: jax.Array) -> Any:
            reference = base.received(values, others, self.strategy.dispatch(state, cohort, key))
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), others)
            uploads = base.joined(jax.tree.map(jnp.add, reference, changes), zeros)
            return self.strategy.server_update(state, uploads, cohort, round, key)[0]

        rng = np.random.default_rng(0)
        draw = lambda leaf: 0.1 * rng.normal(size=leaf.shape).astype(leaf.dtype)
        common = jax.tree.map(lambda leaf: np.mean(draw(leaf), axis=0, keepdims=True), values)

        def near(leaf: jax.ShapeDtypeStruct, mean: np.ndarray) -> np.ndarray:
            own = draw(leaf)
            return mean + own - np.mean(own, axis=0, keepdims=True)

        pair = [jax.tree.map(near, values, common) for _ in range(2)]
        state = jax.jit(self.strategy.init)(key)
        for round in PROBED:
            first, second = (update(state, changes, jnp.int32(round)) for changes in pair)
            if not all(_close(*leaves) for leaves in zip(*map(jax.tree.leaves, (state, first, second)), strict=True)):
                return False
            state = first
        return True


def _close(start: Any, first: Any, second: Any) -> bool:
    """Whether two results differ by at most 1e-4 of what the round changed."""
    if jnp.issubdtype(first.dtype, jax.dtypes.prng_key):
        first, second, start = (jax.random.key_data(each) for each in (first, second, start))
    if not np.issubdtype(first.dtype, np.floating):
        return bool(np.array_equal(first, second))
    change = max(np.max(np.abs(first - start), initial=0), np.max(np.abs(second - start), initial=0))
    rounding = 16 * np.finfo(first.dtype).eps * np.max(np.abs(start), initial=0)
    return bool(np.max(np.abs(first - second), initial=0) <= 1e-4 * change + rounding)


def _reaches_outputs(jaxpr: Any, sources: Sequence[Any], ignored: Sequence[str] = ()) -> bool:
    """Whether an output of a traced function may depend on some of its variables. Inner calls are not looked into.

    Comparisons of these variables with 0 by the primitives ``ignored`` do not count.
    """
    reached = set(sources)
    for equation in jaxpr.eqns:
        inputs = {each for each in equation.invars if not isinstance(each, Literal)}
        zeros = [each for each in equation.invars if isinstance(each, Literal) and np.all(each.val == 0)]
        if equation.primitive.name in ignored and inputs <= set(sources) and len(zeros) == 1:
            continue
        if inputs & reached:
            reached |= set(equation.outvars)
    return any(not isinstance(each, Literal) and each in reached for each in jaxpr.outvars)
