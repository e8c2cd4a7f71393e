"""Optimizers of the clients by name. A row is a function of the numbers that the optimizer has.

``build(lr, momentum, weight_decay) -> optax.GradientTransformation``: leave out a parameter that an optimizer does not
have. The numbers may be traced, so another learning rate compiles nothing. A number of 0 is not passed, unless its
parameter has no default.

The state of an optimizer begins anew in every round, unless clients keep it (``--keep_optimizer``). So Prodigy, which
estimates its step size from the first steps on, needs many local steps in a round.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from fedjax_mr import trees
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.registry import Registry

NUMBERS = ("lr", "momentum", "weight_decay")
MOMENTUM = 0.5  # the default, which optimizers without momentum ignore


def sgd(lr: Any, momentum: Any = None, weight_decay: Any = None) -> optax.GradientTransformation:
    """SGD with heavy-ball momentum, as PyTorch's SGD."""
    return _decayed(weight_decay, optax.sgd(lr, momentum))


def nesterov(lr: Any, momentum: Any = None, weight_decay: Any = None) -> optax.GradientTransformation:
    """SGD with Nesterov's momentum."""
    return _decayed(weight_decay, optax.sgd(lr, momentum, nesterov=True))


def adam(lr: Any, weight_decay: Any = None) -> optax.GradientTransformation:
    """Adam, with weight decay added to the gradient."""
    return _decayed(weight_decay, optax.adam(lr))


def adamw(lr: Any, weight_decay: Any = 0.0) -> optax.GradientTransformation:
    """Adam with decoupled weight decay."""
    return optax.adamw(lr, weight_decay=weight_decay)


def adagrad(lr: Any, weight_decay: Any = None) -> optax.GradientTransformation:
    """Adagrad, with weight decay added to the gradient."""
    return _decayed(weight_decay, optax.adagrad(lr))


def lion(lr: Any, weight_decay: Any = 0.0) -> optax.GradientTransformation:
    """Lion with decoupled weight decay. A usual learning rate is a tenth of Adam's."""
    return optax.lion(lr, weight_decay=weight_decay)


def muon(lr: Any, weight_decay: Any = 0.0) -> optax.GradientTransformation:
    """Muon for matrices. All other tensors, such as kernels of convolutions, have AdamW with the same learning rate."""
    return contrib.muon(lr, weight_decay=weight_decay, adam_weight_decay=weight_decay)


def prodigy(lr: Any, weight_decay: Any = 0.0) -> optax.GradientTransformation:
    """Prodigy, which estimates the step size. ``lr`` is a factor of it: its authors use 1."""
    return contrib.prodigy(lr, weight_decay=weight_decay)


def schedule_free(lr: Any, weight_decay: Any = None) -> optax.GradientTransformation:
    """Schedule-free SGD. A client uploads the mean of its iterates, see `trained`."""
    return contrib.schedule_free_sgd(lr, weight_decay=weight_decay)


def _decayed(weight_decay: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with weight decay added to the gradient, before its momentum, as in PyTorch."""
    return optimizer if weight_decay is None else optax.chain(optax.add_decayed_weights(weight_decay), optimizer)


def check_row(name: str, row: Any) -> None:
    """Check a user's row of `OPTIMIZERS`.

    Raises:
      UserError: the row is not a function of ``lr`` and perhaps ``momentum`` and ``weight_decay``.
    """
    parameters = tuple(inspect.signature(row).parameters) if callable(row) else ()
    if "lr" not in parameters or not set(parameters) <= set(NUMBERS):
        raise UserError(
            f"fmr.OPTIMIZERS[{name!r}] takes a function build(lr, momentum, weight_decay) that returns an optax "
            "transformation; it may leave out the last two"
        )


OPTIMIZERS: Registry[Callable[..., optax.GradientTransformation]] = Registry(
    "optimizer",
    "fmr.OPTIMIZERS",
    check_row,
    {row.__name__: row for row in (sgd, nesterov, adam, adamw, adagrad, lion, muon, prodigy, schedule_free)},
)
"""All optimizers of the clients."""


def has(name: str, number: str) -> bool:
    """Whether an optimizer has one of the `NUMBERS`."""
    return number in inspect.signature(OPTIMIZERS[name]).parameters


def check(name: str, *, momentum: float, weight_decay: float) -> None:
    """Check the name of an optimizer and the numbers that it may not have.

    Raises:
      UserError: the optimizer is unknown, or a number is set that it does not have. The default momentum is not set.
    """
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    for number, value, unset in (("momentum", momentum, (0, MOMENTUM)), ("weight_decay", weight_decay, (0,))):
        if value not in unset and not has(name, number):
            having = ", ".join(each for each in OPTIMIZERS if has(each, number))
            line = f"{number}={value} has no effect with optimizer={name}: leave it out, or use one of {having}"
            raise UserError(line)


def make_optimizer(
    name: str,
    *,
    lr: Any,
    momentum: Any = None,
    weight_decay: Any = None,
    clip_norm: Any = None,
) -> optax.GradientTransformation:
    """Build an optimizer of `OPTIMIZERS`. The numbers may be traced; None: without.

    The gradient is clipped to the global norm ``clip_norm`` before everything else.
    """
    numbers, passed = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, {}
    for number, parameter in inspect.signature(OPTIMIZERS[name]).parameters.items():
        if numbers[number] is not None:
            passed[number] = numbers[number]
        elif parameter.default is parameter.empty:
            passed[number] = 0.0
    optimizer = OPTIMIZERS[name](**passed)
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def trained(params: Any, state: Any) -> Any:
    """The parameters that an optimizer has trained: with schedule-free ones the mean of the iterates.

    Args:
      params: the parameters after the last step, at which the next gradient would be taken.
      state: the state of the optimizer. Before the first step, the parameters are returned unchanged.
    """
    is_free = lambda part: isinstance(part, contrib.ScheduleFreeState)
    for part in filter(is_free, jax.tree.leaves(state, is_leaf=is_free)):
        params = trees.where(part.weight_sum > 0, contrib.schedule_free_eval_params(part, params), params)
    return params
