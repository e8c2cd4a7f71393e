"""Calls of Flax modules. The signature of a module decides which arguments it receives besides its input.

Built-in modules are called as ``module(x, train=..., mask=...)``. Modules of users may have another name for the switch
between training and evaluation, or none. NNX modules are called by `nnx_module`.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_mr.models.nnx_module import NNXModule

Module = nn.Module | NNXModule

TRAINING = ("train", "training", "is_training")  # switches that are True in training mode
EVALUATION = ("deterministic", "use_running_average", "eval", "inference")  # switches that are False in training mode
SWITCHES = dict.fromkeys(TRAINING, True) | dict.fromkeys(EVALUATION, False)


@functools.cache
def accepted(kind: type, method: str) -> tuple[str, ...]:
    """Names of the arguments that a method of a class accepts."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(getattr(kind, method)).parameters.values()
    return tuple(each.name for each in parameters if each.kind in kinds)


@functools.cache
def is_open(kind: type, method: str) -> bool:
    """Whether a method of a class has ``**kwargs``."""
    parameters = inspect.signature(getattr(kind, method)).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def init(module: Module, key: jax.Array, x: jax.Array) -> dict[str, Any]:
    """Initialise the variables of a module, in evaluation mode; consumes ``key``."""
    if isinstance(module, NNXModule):
        return module.init(key)
    streams = {"params": key, "dropout": jax.random.fold_in(key, 1)}  # NNX's dropout needs its stream at init, too
    return dict(
        in_mode(lambda module, **switches: module.init(streams, x, **switches), module, "__call__", train=False)
    )


def apply(
    module: Module,
    variables: Any,
    x: jax.Array,
    *,
    train: bool,
    mask: jax.Array | None,
    method: str,
    fixed: Collection[tuple[str, ...]] = (),
    **options: Any,
) -> Any:
    """Call a method of a module on ``x`` [B, ...].

    Args:
      module: the module. One without a switch is called in the same way in both modes.
      variables: its variables.
      x: the input.
      train: the mode, passed as an argument or a field of the module with a name in `SWITCHES`.
      mask: [B], 1 for samples, 0 for padding, or None without padding. If the method takes no mask, the BatchNorm
        layers of Flax inside it receive the mask wherever their input has B rows, so that the statistics exclude
        padding.
      method: name of the method.
      fixed: paths of modules whose statistics are frozen. They run in evaluation mode.
      options: further arguments of ``module.apply``.
    """
    if isinstance(module, NNXModule):
        switches = {name: train == on for name, on in SWITCHES.items()}
        options |= {"mask": mask, "fixed": fixed, "switches": switches}
        return module.apply(variables, x, train=train, method=method, **options)
    if fixed and train:
        with nn.intercept_methods(functools.partial(_with_fixed_statistics, fixed)):
            return apply(module, variables, x, train=train, mask=mask, method=method, **options)
    takes_mask = "mask" in accepted(type(module), method)
    if takes_mask:
        options = options | {"mask": mask}
    call = lambda module, **switches: module.apply(variables, x, method=method, **switches, **options)
    if takes_mask or mask is None or not train:
        return in_mode(call, module, method, train=train)
    with nn.intercept_methods(functools.partial(_with_mask, mask)):
        return in_mode(call, module, method, train=train)


def in_mode(call: Callable, module: nn.Module, method: str, *, train: bool) -> Any:
    """Call ``call(module, **switches)`` with a module in training or evaluation mode.

    A method with ``**kwargs`` and no switch receives every name in `SWITCHES`: it may read one of them, or pass all on
    to an inner module that accepts one. If Python's TypeError names an unexpected one, the call is repeated without it.
    """
    switched_module, switches = switched(module, method, train=train)
    may_withdraw = switched_module is module and not switches and is_open(type(module), method)
    if may_withdraw:
        switches = {name: train == on for name, on in SWITCHES.items()}
    while True:
        try:
            return call(switched_module, **switches)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if not (may_withdraw and unknown and unknown[1] in switches):
                raise
            switches = {name: value for name, value in switches.items() if name != unknown[1]}


def switched(module: nn.Module, method: str, *, train: bool) -> tuple[nn.Module, dict[str, Any]]:
    """A module in training or evaluation mode, and the switches to pass to its method."""
    names = accepted(type(module), method)
    arguments = {name: train == on for name, on in SWITCHES.items() if name in names}
    fields = {} if arguments else {field.name for field in dataclasses.fields(module)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {name: train == on for name, on in SWITCHES.items() if name in fields}
    return (module.clone(**changes) if changes else module), arguments


def _with_fixed_statistics(
    fixed: Collection[tuple[str, ...]], call: Callable, args: tuple, kwargs: dict, context: Any
) -> Any:
    module = context.module
    if context.method_name != "__call__" or tuple(module.path) not in fixed:
        return call(*args, **kwargs)
    names = accepted(type(module), "__call__")
    switches = {name: not on for name, on in SWITCHES.items() if name in names}
    for name in switches:  # Flax refuses a switch that is both a field and an argument
        if getattr(module, name, None) is not None:
            object.__setattr__(module, name, None)
    return call(**dict(zip(names[1:], args, strict=False)) | kwargs | switches)


def bound(module: Module, variables: Any) -> Any:
    """The user's module with these variables: a bound one of Linen, or one of NNX in evaluation mode."""
    return module.module(variables) if isinstance(module, NNXModule) else module.bind(variables)


def has(module: Module, method: str) -> bool:
    """Whether a module has a method of this name."""
    return method in module.methods if isinstance(module, NNXModule) else hasattr(module, method)


def modules_called(module: Module, function: Callable[[Any, Any], Any], variables: Any, x: Any) -> list[tuple]:
    """Paths of the modules that ``function(variables, x)`` calls, ordered by their first calls. Nothing is computed.

    Those of NNX are the modules whose variables the function reads, because calls of NNX modules cannot be observed.
    """
    if isinstance(module, NNXModule):
        return module.layers_used(function, variables, x)
    order: dict[tuple[str, ...], None] = {}

    def record(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        order.setdefault(tuple(context.module.path))
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(function, variables, x)
    return list(order)


def _with_mask(mask: jax.Array, call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__" and kwargs.get("mask") is None:
        x = args[0] if args else kwargs["x"]
        if x.shape[:1] == mask.shape:
            kwargs = kwargs | {"mask": (mask > 0).reshape(-1, *(1,) * (jnp.ndim(x) - 1))}
    return call(*args, **kwargs)
