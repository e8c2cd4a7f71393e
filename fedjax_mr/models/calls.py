"""Calls of Flax modules, ours and the users' own: what a module is told beside its input follows from its signature.

Ours are called as ``module(x, train=..., mask=...)``. Others name the switch of training in their way, or have none.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

TRAINING = ("train", "training", "is_training")  # names of a switch that is on while training
EVALUATION = ("deterministic", "use_running_average", "eval", "inference")  # and that is off
SWITCHES = dict.fromkeys(TRAINING, True) | dict.fromkeys(EVALUATION, False)


@functools.cache
def accepted(kind: type, method: str) -> tuple[str, ...]:
    """Return the names of the arguments that a class's method takes."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(getattr(kind, method)).parameters.values()
    return tuple(each.name for each in parameters if each.kind in kinds)


@functools.cache
def is_open(kind: type, method: str) -> bool:
    """Return whether a class's method takes any keyword, ``**kwargs``."""
    parameters = inspect.signature(getattr(kind, method)).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def init(module: nn.Module, key: jax.Array, x: jax.Array) -> dict[str, Any]:
    """Return fresh variables, made in evaluation mode; consumes ``key``."""
    streams = {"params": key, "dropout": jax.random.fold_in(key, 1)}  # NNX's dropout wants its stream at init, too
    return dict(
        in_mode(lambda module, **switches: module.init(streams, x, **switches), module, "__call__", train=False)
    )


def apply(
    module: nn.Module, variables: Any, x: jax.Array, *, train: bool, mask: jax.Array | None, method: str, **options: Any
) -> Any:
    """Return what a method of a module makes of ``x`` [B, ...].

    Args:
      module: the module; one that cannot be switched is called in the same way in both modes.
      variables: its variables.
      x: the input.
      train: the mode, given as an argument or a field of the module with one of the names in `SWITCHES`.
      mask: [B], 1 for true samples, 0 for padding; None: all are true. A method that takes no mask is called without;
        then Flax's BatchNorm sees it where its input has B rows, so that padding never enters the statistics.
      method: the method.
      options: of ``module.apply``.
    """
    takes_mask = "mask" in accepted(type(module), method)
    if takes_mask:
        options = options | {"mask": mask}
    call = lambda module, **switches: module.apply(variables, x, method=method, **switches, **options)
    if takes_mask or mask is None or not train:
        return in_mode(call, module, method, train=train)
    with nn.intercept_methods(functools.partial(_with_mask, mask)):
        return in_mode(call, module, method, train=train)


def in_mode(call: Callable, module: nn.Module, method: str, *, train: bool) -> Any:
    """Return what ``call(module, **switches)`` returns for a module in training or evaluation mode.

    A method with ``**kwargs`` and no switch of its own is offered every name in `SWITCHES`. It may read one of them, or
    pass all to a module inside that knows one: Python's TypeError names an unknown one, and the call is repeated
    without it.
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
    """Return a module in training or evaluation mode, and the arguments that tell its method so."""
    names = accepted(type(module), method)
    arguments = {name: train == on for name, on in SWITCHES.items() if name in names}
    own = {} if arguments else {field.name for field in dataclasses.fields(module)}  # type: ignore[arg-type]
    fields: dict[str, Any] = {name: train == on for name, on in SWITCHES.items() if name in own}
    return (module.clone(**fields) if fields else module), arguments


def _with_mask(mask: jax.Array, call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    if isinstance(context.module, nn.BatchNorm) and context.method_name == "__call__" and kwargs.get("mask") is None:
        x = args[0] if args else kwargs["x"]
        if x.shape[:1] == mask.shape:
            kwargs = kwargs | {"mask": (mask > 0).reshape(-1, *(1,) * (jnp.ndim(x) - 1))}
    return call(*args, **kwargs)
