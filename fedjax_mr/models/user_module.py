"""Flax modules that are not ours: bound to samples, tried before anything is compiled, known by their content."""

import dataclasses
import hashlib
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from fedjax_mr import registry
from fedjax_mr.errors import UserError
from fedjax_mr.models import calls
from fedjax_mr.models.base import Model, Variables, describe

BATCH = 2  # samples of the trial, which is traced and never computed
STATISTICS = "batch_stats"  # Flax's collection of BatchNorm's running means and variances


def bind(module: Any, *, input_shape: tuple[int, ...], num_classes: int, input_dtype: Any, name: str = "") -> Model:
    """Return a Flax module as a network for samples of ``input_shape``.

    Args:
      module: an instance of ``flax.linen.Module`` from samples [B, ...] to logits [B, C], with or without BatchNorm
        and dropout. It may take a switch of training (``train``, ``deterministic`` and the like: `calls.SWITCHES`) as
        an argument or have one as a field, and take a ``mask`` [B]. ``features`` and ``head`` are methods that some
        strategies need.
      input_shape: of one sample.
      num_classes: C.
      input_dtype: float32 for images and vectors, int32 for token sequences.
      name: in messages; "": the name of its class.

    Raises:
      UserError: it is no such module, cannot be called on such samples, or returns something else than logits [B, C].
    """
    if not isinstance(module, nn.Module):
        hint = f"; make one: {module.__name__}(...)" if isinstance(module, type) else ""
        raise UserError(f"model= takes an instance of flax.linen.Module, not {_kind(module)}{hint}")
    name = name or type(module).__name__
    model = Model(_hashable(module, name), tuple(input_shape), input_dtype, name)
    _try(model, num_classes)
    return model


def recorded_name(model: Model) -> str:
    """Return the name under which a network that was given in Python is recorded, ``given:NAME:HASH``.

    The hash is of the class's name, of all fields (functions by their names) and of the shapes of the variables. It
    does not see the code: an activation that is changed inside ``__call__`` changes no shape and no hash.
    """
    shapes = [(jax.tree_util.keystr(path), str(leaf.shape), str(leaf.dtype)) for path, leaf in _leaves(model.shapes())]
    content = f"{_content(model.module)} {shapes} {model.input_shape}"
    return registry.supplied_name(model.name, hashlib.sha256(content.encode()).hexdigest())


def _content(value: Any) -> str:
    """Return a text about a value that is the same in every process: no addresses, no modules of Python."""
    if isinstance(value, nn.Module):
        own = [each for each in dataclasses.fields(value) if each.name not in ("parent", "name")]  # type: ignore[arg-type]
        fields = ", ".join(f"{each.name}={_content(getattr(value, each.name, None))}" for each in own)
        return f"{type(value).__qualname__}({fields})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_content, value))})"
    if isinstance(value, np.ndarray | jax.Array):
        return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _hashable(module: nn.Module, name: str) -> nn.Module:
    """Return the module with tuples for lists, since JAX knows a program by the hash of the network."""
    try:
        hash(module)
        return module
    except TypeError:
        frozen = _frozen(module)
    try:
        hash(frozen)
    except TypeError:
        raise UserError(f"{name} has a field that cannot be hashed, such as an array: make it a tuple") from None
    return frozen


def _frozen(value: Any) -> Any:
    if isinstance(value, nn.Module):
        own = [each.name for each in dataclasses.fields(value) if each.init and each.name not in ("parent", "name")]  # type: ignore[arg-type]
        return value.clone(**{name: _frozen(getattr(value, name)) for name in own})
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return FrozenDict({name: _frozen(each) for name, each in value.items()})
    return value


def _try(model: Model, num_classes: int) -> None:
    """Trace a module in both modes; nothing is computed.

    Raises:
      UserError: says what is wrong.
    """
    name, sample = model.name, describe(model.input_shape, model.input_dtype)
    x = jax.ShapeDtypeStruct((BATCH, *model.input_shape), model.input_dtype)
    key, mask = jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((BATCH,), np.float32)
    switch = "does it need a switch of training, __call__(self, x, train)?"
    shapes = _traced(model.shapes, f"{name} cannot be initialised for samples {sample}")
    params, state = shapes.get("params", {}), {name: tree for name, tree in shapes.items() if name != "params"}
    if not jax.tree.leaves(params):
        raise UserError(f"{name} has no parameters to train")
    for path, leaf in _leaves(shapes):
        if leaf.dtype != np.float32:
            low = jnp.issubdtype(leaf.dtype, jnp.floating)
            remedy = (
                f"; Flax's dtype=jnp.{leaf.dtype}, in place of param_dtype, computes with such numbers" if low else ""
            )
            raise UserError(
                f"{name} has variables of {leaf.dtype} ({jax.tree_util.keystr(path)}), but all variables are averaged "
                f"over clients and must be float32{remedy}"
            )
    out = _traced(lambda: jax.eval_shape(model.apply, shapes, x), f"{name} cannot be evaluated", switch)
    if getattr(out, "shape", None) != (BATCH, num_classes) or not jnp.issubdtype(out.dtype, jnp.floating):
        found = describe(out.shape[1:], out.dtype) if hasattr(out, "shape") else f"a {_kind(out)}"
        raise UserError(f"{name} returns {found} for a sample, but the data need {num_classes} logits, one per class")
    train = lambda params, state, x, mask, key: model.train_apply(params, state, x, mask=mask, key=key)
    trained = _traced(lambda: jax.eval_shape(train, params, state, x, mask, key), f"{name} cannot be trained")
    if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), trained) != jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), (out, state)
    ):
        raise UserError(f"{name} returns other shapes, or other variables, while it trains than in evaluation")
    _check_statistics(model, shapes, x, mask, key)


def _check_statistics(model: Model, shapes: Variables, x: Any, mask: Any, key: Any) -> None:
    """Check that BatchNorm's statistics move in training, all of them, and nowhere else.

    Raises:
      UserError: the module does not hand the mode on to its BatchNorm.
    """

    def moved(*, train: bool) -> dict[str, bool]:
        found: dict[str, bool] = {}

        def call(variables: Variables, x: jax.Array, mask: jax.Array, key: jax.Array) -> None:
            state = [name for name in variables if name != "params"]
            options: dict[str, Any] = {"mutable": state, "rngs": {"dropout": key}}
            _, new = calls.apply(
                model.module, variables, x, train=train, mask=mask if train else None, method="__call__", **options
            )
            old = dict(_leaves(variables[STATISTICS]))
            found.update((jax.tree_util.keystr(path), leaf is not old[path]) for path, leaf in _leaves(new[STATISTICS]))

        jax.eval_shape(call, shapes, x, mask, key)
        return found

    if STATISTICS not in shapes:
        return
    remedy = "pass the mode on, as in nn.BatchNorm(use_running_average=not train) of __call__(self, x, train)"
    fixed = [path for path, moves in moved(train=True).items() if not moves]
    if fixed:
        raise UserError(f"{model.name} does not update its batch_stats{fixed[0]} while it trains: {remedy}")
    moving = [path for path, moves in moved(train=False).items() if moves]
    if moving:
        raise UserError(f"{model.name} updates its batch_stats{moving[0]} in evaluation, too: {remedy}")


def _traced(function: Any, what: str, hint: str = "") -> Any:
    """Return what a function returns that calls the user's code; whatever that raises becomes one line."""
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        reason = re.sub(r" \(https?://\S+\)", "", " ".join(str(error).split()))
        raise UserError(f"{what} ({type(error).__name__}: {reason[:300]})" + (f"; {hint}" if hint else "")) from error


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
