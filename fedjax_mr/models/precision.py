"""Mixed precision: forward and backward passes of the clients' training in bfloat16, everything else in float32.

Parameters and inputs are rounded to bfloat16 at the start of each forward pass in training mode. Logits, losses,
gradients, statistics, the optimizer and the server stay in float32. bfloat16 has the range of float32, so losses need
no scaling (Micikevicius et al., ICLR 2018, describe the scheme for float16, which does).

Frozen variables may also be stored in bfloat16 (`stored`), whatever the precision of the passes is.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.keys import random_key

PRECISIONS = ("float32", "bfloat16")
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def cast(tree: Any, dtype: Any) -> Any:
    """A tree whose floating-point leaves have another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def with_precision(model: Any, precision: str) -> Any:
    """A network, or a `Zoo` of several, that trains in another precision.

    Args:
      model: a `Model`.
      precision: ``float32`` or ``bfloat16``.

    Raises:
      UserError: the precision is unknown, or has no effect on the products of a network.
    """
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    if precision == "float32":
        return model
    if len(model.networks) > 1:
        members = tuple(with_precision(network, precision) for network in model.networks)
        return dataclasses.replace(model, members=members, precision=precision)
    changed = dataclasses.replace(model, precision=precision)
    if jnp.bfloat16 not in product_dtypes(changed):
        raise UserError(
            f"precision={precision} has no effect on {model.name}, whose layers choose their own dtype: leave it out"
        )
    return changed


def stored(model: Any, dtype: str) -> Any:
    """A network whose frozen matrices are stored in another type, ``bfloat16`` or ``float32``.

    Vectors, such as the scales of a normalisation, stay in float32: they are small.

    Raises:
      UserError: nothing is frozen.
    """
    if dtype == "float32":
        return model
    if not model.frozen:
        raise UserError(f"frozen_dtype={dtype} needs frozen variables: add adapter=lora, or leave it out")
    narrow = lambda leaf: np.asarray(leaf).astype(jnp.bfloat16) if np.ndim(leaf) > 1 else leaf
    return dataclasses.replace(model, frozen=jax.tree.map(narrow, model.frozen))


def widened(frozen: Any, variables: Any) -> Any:
    """Frozen variables in which those stored in bfloat16 have the type of the variables that train."""
    leaves = jax.tree.leaves(frozen)
    if not any(leaf.dtype == jnp.bfloat16 for leaf in leaves):
        return frozen
    dtype = jnp.result_type(*{leaf.dtype for leaf in jax.tree.leaves(variables.get("params", {}))} or {jnp.float32})
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.bfloat16 else leaf, frozen)


def product_dtypes(model: Any) -> set[Any]:
    """The dtypes of the products and convolutions of a network in training mode. Nothing is computed."""
    shapes = model.shapes()
    x = jax.ShapeDtypeStruct((1, *model.input_shape), model.input_dtype)
    key = jax.eval_shape(lambda: random_key(0))

    def forward(shapes: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        state = {name: tree for name, tree in shapes.items() if name != "params"}
        return model.train_apply(shapes["params"], state, x, mask=None, key=key)[0]

    closed = jax.make_jaxpr(forward)(shapes, x, key)
    products = (each for each in equations(closed.jaxpr) if each.primitive.name in PRODUCTS)
    return {each.invars[0].aval.dtype.type for each in products}


def equations(jaxpr: core.Jaxpr) -> Iterator[Any]:
    """The equations of a program and of all programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda each: hasattr(each, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if isinstance(inner, core.Jaxpr):
                yield from equations(inner)
