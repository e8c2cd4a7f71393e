"""Flax modules of users: bound to samples, checked before anything is compiled, and identified by their content."""

import dataclasses
import hashlib
import re
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict
from jax.extend import core

from fedjax_mr import registry
from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import calls, nnx_module
from fedjax_mr.models.base import Model, Variables, describe
from fedjax_mr.tasks import Classification, Task

BATCH = 2  # samples in the check, which is traced and never computed
# Folders of code that is not the user's.
INSTALLED = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
# Words of an exception which show that the module must be told whether it trains or is evaluated.
MODE = re.compile(rf"\b(use_running_average|immutable|{'|'.join(calls.SWITCHES)})\b")
# NNX's error about an attribute that holds modules or variables in one of Python's containers, and its own containers.
CONTAINER = re.compile(r"Found data on value of type '<class '(\w+)'>' assigned to static attribute '(\w+)'")
CONTAINERS = {"list": "nnx.List([...])", "tuple": "nnx.List([...])", "dict": "nnx.Dict({...})"}
LONGEST_REASON = 300  # characters of an exception that a message repeats
SAME_VALUES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "stop_gradient")  # of JAX
STATISTICS = "batch_stats"  # Flax's collection of BatchNorm's running means and variances


def bind(
    module: Any,
    *,
    input_shape: tuple[int, ...],
    num_classes: int = 0,
    input_dtype: Any,
    name: str = "",
    task: Task | None = None,
) -> Model:
    """Wrap a Flax module as a network for samples of ``input_shape``.

    Args:
      module: a Flax module that maps samples [B, ...] to logits [B, C], with or without BatchNorm and dropout: an
        instance of ``flax.linen.Module`` or ``flax.nnx.Module``, or a function of ``rngs`` that returns the latter (see
        `nnx_module.split`). A switch between training and evaluation (`calls.SWITCHES`) may be an argument or a
        field. The module may accept a ``mask`` [B]. Some strategies need the methods ``features`` and ``head``.
      input_shape: shape of one sample.
      num_classes: C, without a ``task``.
      input_dtype: float32 for images and vectors, int32 for token sequences.
      name: name in messages. Default: the name of the class.
      task: what the module learns. Its output is [B, ...] of the shape that the task needs. Default: classification.

    Warns if the module ends in a softmax, but the task needs logits.

    Raises:
      UserError: the object is not such a module, cannot be called on the samples, or returns outputs of another shape.
    """
    start: Variables = {}
    if nnx_module.is_nnx(module):
        module, start = _split(module, name)
        name = name or module.kind.__name__
    elif not isinstance(module, nn.Module):
        hint = f"; write {module.__name__}(...)" if isinstance(module, type) else ""
        raise UserError(
            f"the model must be an instance of flax.linen.Module or flax.nnx.Module, not {_kind(module)}{hint}"
        )
    name = name or type(module).__name__
    task = task or Classification(width=num_classes)
    model = Model(_hashable(module, name), tuple(input_shape), input_dtype, name, start=start, task=task)
    _check(model)
    return model


def _split(module: Any, name: str) -> tuple[nnx_module.NNXModule, Variables]:
    """Split an NNX module. The errors of a function that builds it become a UserError."""
    if isinstance(module, nnx_module.NNXModule):
        return module, {}
    name = name or getattr(module, "__name__", type(module).__name__)
    hint = "a network with more arguments is lambda rngs: MyNetwork(..., rngs=rngs)"
    return _traced(lambda: nnx_module.split(module), f"{name} cannot be built", hint)


def recorded_name(model: Model) -> str:
    """The name that a run folder records for a network passed from Python: ``given:NAME:HASH``.

    The hash covers the name of the class, all fields (functions by name), the shapes of the variables and the values of
    an NNX instance. It does not cover the code: another activation inside ``__call__`` does not change the hash.
    """
    shapes = [(jax.tree_util.keystr(path), str(leaf.shape), str(leaf.dtype)) for path, leaf in _leaves(model.shapes())]
    content = f"{_content(model.module)} {shapes} {model.input_shape}"
    return registry.supplied_name(model.name, hashlib.sha256(content.encode()).hexdigest())


def _content(value: Any) -> str:
    """Describe a value by a text that is the same in every process: without addresses and Python modules."""
    if isinstance(value, nn.Module):
        fields = [each for each in dataclasses.fields(value) if each.name not in ("parent", "name")]  # type: ignore[arg-type]
        values = ", ".join(f"{each.name}={_content(getattr(value, each.name, None))}" for each in fields)
        return f"{type(value).__qualname__}({values})"
    if isinstance(value, nnx_module.NNXModule):
        return _content(value.content)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_content, value))})"
    if isinstance(value, np.ndarray | jax.Array):
        return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _hashable(module: nn.Module, name: str) -> nn.Module:
    """Replace lists by tuples: JAX caches programs by the hash of the network."""
    try:
        hash(module)
        return module
    except TypeError:
        frozen = _frozen(module)
    try:
        hash(frozen)
    except TypeError:
        raise UserError(f"{name} has a field that cannot be hashed, such as an array: use a tuple") from None
    return frozen


def _frozen(value: Any) -> Any:
    if isinstance(value, nn.Module):
        fields = [each for each in dataclasses.fields(value) if each.name not in ("parent", "name")]  # type: ignore[arg-type]
        return value.clone(**{each.name: _frozen(getattr(value, each.name)) for each in fields if each.init})
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return FrozenDict({name: _frozen(each) for name, each in value.items()})
    return value


def _check(model: Model) -> None:
    """Trace a module in both modes. Nothing is computed.

    Raises:
      UserError: names the first fault.
    """
    name, sample = model.name, describe(model.input_shape, model.input_dtype)
    x = jax.ShapeDtypeStruct((BATCH, *model.input_shape), model.input_dtype)
    key, mask = jax.eval_shape(lambda: random_key(0)), jax.ShapeDtypeStruct((BATCH,), np.float32)
    switch = "does it need a switch between training and evaluation, __call__(self, x, train)?"
    shapes = _traced(model.shapes, f"{name} cannot be initialised for samples {sample}")
    params, state = shapes.get("params", {}), {name: tree for name, tree in shapes.items() if name != "params"}
    if not jax.tree.leaves(params):
        raise UserError(f"{name} has no parameters to train")
    for path, leaf in _leaves(shapes):
        if leaf.dtype != np.float32:
            low = jnp.issubdtype(leaf.dtype, jnp.floating)
            remedy = f"; for computation in {leaf.dtype} set Flax's dtype, not param_dtype" if low else ""
            raise UserError(
                f"{name} has variables of {leaf.dtype} ({jax.tree_util.keystr(path)}), but all variables are averaged "
                f"over clients and must be float32{remedy}"
            )
    trace = jax.make_jaxpr(model.apply, return_shape=True)
    closed, out = _traced(lambda: trace(shapes, x), f"{name} cannot be evaluated", switch)
    expected = model.task.outputs(model.input_shape)
    if getattr(out, "shape", None) != (BATCH, *expected) or not jnp.issubdtype(out.dtype, jnp.floating):
        output = describe(out.shape[1:], out.dtype) if hasattr(out, "shape") else f"a {_kind(out)}"
        needs = f"{model.task.name} needs {describe(expected, np.float32)}"
        if "classes" in model.task.provides:
            needs = f"the data need {model.task.width} logits, one per class"
        raise UserError(f"{name} returns {output} for a sample, but {needs}")
    if "logits" in model.task.provides and _ends_in_softmax(closed.jaxpr, closed.jaxpr.outvars[0]):
        warnings.warn(
            f"{name} returns probabilities, but the loss applies a softmax itself: return the logits, which are the "
            "input of the module's last softmax",
            stacklevel=3,
        )
    train = lambda params, state, x, mask, key: model.train_apply(params, state, x, mask=mask, key=key)
    trained = _traced(lambda: jax.eval_shape(train, params, state, x, mask, key), f"{name} cannot be trained")
    if jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), trained) != jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), (out, state)
    ):
        raise UserError(f"{name} returns other shapes or other variables in training than in evaluation")
    _check_statistics(model, shapes, x, mask, key)


def _ends_in_softmax(jaxpr: core.Jaxpr, out: Any) -> bool:
    """Whether a program computes the variable ``out`` as exponentials divided by their sum."""
    made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}

    def made(var: Any) -> Any:
        """The equation that computes the values of a variable, whatever its shape and dtype."""
        equation = made_by.get(var) if isinstance(var, core.Var) else None
        return made(equation.invars[0]) if equation is not None and equation.primitive.name in SAME_VALUES else equation

    last = made(out)
    if last is None:
        return False
    for inner in (getattr(each, "jaxpr", each) for each in last.params.values()):
        if isinstance(inner, core.Jaxpr) and len(inner.outvars) == len(last.outvars) == 1:
            return _ends_in_softmax(inner, inner.outvars[0])
    if last.primitive.name != "div":
        return False
    exponentials, total = map(made, last.invars)
    if exponentials is None or total is None or total.primitive.name != "reduce_sum":
        return False
    return exponentials.primitive.name == "exp" and made(total.invars[0]) is exponentials


def _check_statistics(model: Model, shapes: Variables, x: Any, mask: Any, key: Any) -> None:
    """Check that training updates all statistics of BatchNorm, and that evaluation updates none.

    Raises:
      UserError: the module does not pass the mode on to its BatchNorm.
    """

    def updated(*, train: bool) -> dict[str, bool]:
        changes: dict[str, bool] = {}

        def call(variables: Variables, x: jax.Array, mask: jax.Array, key: jax.Array) -> None:
            state = [name for name in variables if name != "params"]
            options: dict[str, Any] = {"mutable": state, "rngs": {"dropout": key}}
            _, new = calls.apply(
                model.module, variables, x, train=train, mask=mask if train else None, method="__call__", **options
            )
            old = dict(_leaves(variables[STATISTICS]))
            changes.update(
                (jax.tree_util.keystr(path), leaf is not old[path]) for path, leaf in _leaves(new[STATISTICS])
            )

        jax.eval_shape(call, shapes, x, mask, key)
        return changes

    if STATISTICS not in shapes:
        return
    remedy = "pass the mode on, as in nn.BatchNorm(use_running_average=not train) of __call__(self, x, train)"
    if isinstance(model.module, nnx_module.NNXModule):
        remedy = "leave its use_running_average to train() and eval()"
    fixed = [path for path, changed in updated(train=True).items() if not changed]
    if fixed:
        raise UserError(f"{model.name} does not update its batch_stats{fixed[0]} in training: {remedy}")
    moving = [path for path, changed in updated(train=False).items() if changed]
    if moving:
        raise UserError(f"{model.name} also updates its batch_stats{moving[0]} in evaluation: {remedy}")


def _traced(function: Any, what: str, hint: str = "") -> Any:
    """Call a function that runs code of the user. Every exception becomes a UserError of one line.

    ``hint`` is added if the exception is about the mode, training or evaluation.
    """
    try:
        return function()
    except UserError:
        raise
    except Exception as error:
        reason = re.sub(r" \(https?://\S+\)", "", " ".join(str(error).split()))
        about_mode = MODE.search(reason)
        place = _place(error)
        if container := CONTAINER.search(reason):
            kind, name = container.groups()
            reason = (
                f"self.{name} is a {kind} with modules or variables, which NNX does not see in it; write self.{name} = "
                f"{CONTAINERS.get(kind, 'nnx.data(...)')}"
            )
        elif len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON]}..."
        raise UserError(
            f"{what} ({type(error).__name__}: {reason})"
            + (f"; see {place}" if place else "")
            + (f"; {hint}" if hint and about_mode else "")
        ) from error


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised an exception, "" if all of it is installed code."""
    own = [
        f"{Path(frame.filename).name}, line {frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(INSTALLED)
    ]
    return own[-1] if own else ""


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
