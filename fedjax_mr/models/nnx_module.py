"""Flax NNX modules as pure functions of their variables.

An NNX module holds its own variables, and a call may change them. Here the module is split once into a static graph and
the form of its states. Each call merges a new module from them, so calls are pure under every transformation of JAX.
Random streams are not variables: each call starts them anew from the caller's key.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.extend import core

from fedjax_mr.errors import UserError
from fedjax_mr.keys import random_key
from fedjax_mr.models import parts

if TYPE_CHECKING:
    from flax import nnx
else:

    class _AtFirstUse:
        """`flax.nnx`. Its import takes a quarter of the time of all other imports together, and few runs need it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("flax.nnx"), name)

    nnx = _AtFirstUse()

COLLECTIONS = {"params": "Param", "batch_stats": "BatchStat"}
"""The collections of variables, named as in Linen, and their kinds in NNX. Subclasses of these kinds are included."""
METHODS = ("__call__", "features", "head")

_mask: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("mask", default=None)


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of one kind of state.

    Attributes:
      structure: NNX's form of the state, a tree definition.
      paths: the path of each leaf in nested dictionaries. NNX numbers the items of lists by integers; here they are
        strings, because checkpoints store strings.
    """

    structure: Any
    paths: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, state: Any) -> "Form":
        """The form of an NNX state."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        keys = [[entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)] for path, _ in leaves]
        return cls(structure, tuple(tuple(map(str, path)) for path in keys))

    def state(self, tree: Any) -> Any:
        """Nested dictionaries as an NNX state with new variables."""
        leaves = [functools.reduce(operator.getitem, path, tree) for path in self.paths]
        return jax.tree.unflatten(self.structure, leaves)

    def tree(self, state: Any) -> dict[str, Any]:
        """An NNX state as nested dictionaries."""
        return traverse_util.unflatten_dict(dict(zip(self.paths, jax.tree.leaves(state), strict=True)))


@dataclasses.dataclass(frozen=True)
class NNXModule:
    """An NNX module without its values, as Linen's modules are.

    Attributes:
      source: what two of them are compared by: the function that builds the module, or the graph of an instance.
      kind: the class of the module.
      content: class names and static attributes of the module and of all modules inside it, and the hash of the values
        of an instance.
      methods: those of `METHODS` that the module has. They may also be submodules.
      graphs: graph definition in evaluation and in training mode.
      forms: form of each collection that is not empty.
      streams: shapes of the random state.
      init: ``init(key)`` returns new variables; those of an instance are zeros.
    """

    source: Hashable
    kind: type = dataclasses.field(compare=False)
    content: tuple[Any, ...] = dataclasses.field(compare=False)
    methods: tuple[str, ...] = dataclasses.field(compare=False)
    graphs: dict[bool, Any] = dataclasses.field(compare=False, repr=False)
    forms: dict[str, Form] = dataclasses.field(compare=False, repr=False)
    streams: Any = dataclasses.field(compare=False, repr=False)
    init: Callable[[jax.Array], dict[str, Any]] = dataclasses.field(compare=False, repr=False)

    def apply(
        self,
        variables: Any,
        x: jax.Array,
        *,
        train: bool,
        switches: Mapping[str, bool],
        fixed: Collection[tuple[str, ...]] = (),
        mask: jax.Array | None = None,
        method: str = "__call__",
        mutable: Any = None,
        rngs: Mapping[str, jax.Array] | None = None,
    ) -> Any:
        """Call a method on ``x`` [B, ...], as Linen's ``apply`` does.

        Args:
          variables: the variables by collection.
          x: the input.
          train: whether the module is in the mode of ``train()`` or of ``eval()``.
          switches: values of arguments for the mode, passed on to a method that accepts them.
          fixed: paths of modules whose statistics are frozen. They run in evaluation mode.
          mask: [B], 1 for samples, 0 for padding, or None without padding. If the method takes no mask, the BatchNorm
            layers receive it in training wherever their input has B rows.
          method: name of a method or submodule.
          mutable: names of the collections to return. Default: only the output is returned.
          rngs: ``{"dropout": key}``. All random streams of the module are derived from this key.

        Raises:
          UserError: the module draws random numbers without a key.
        """
        key = None if rngs is None else rngs["dropout"]
        streams = self._streams(random_key(0) if key is None else key)
        unused = jax.tree.leaves(streams)
        module = nnx.merge(self.graphs[train], *self._states(variables), streams)
        for path, node in nnx.iter_graph(module) if fixed else ():
            if isinstance(node, nnx.Module) and tuple(map(str, path)) in fixed:
                node.eval()
                object.__setattr__(node, "fixed", True)  # read by `_without_padding`
        function = getattr(module, method)
        known = inspect.signature(function).parameters
        arguments: dict[str, Any] = {name: value for name, value in switches.items() if name in known}
        if "rngs" in known and key is not None:
            arguments["rngs"] = nnx.Rngs(jax.random.fold_in(key, len(jax.tree.leaves(self.streams))))
        if "mask" in known:
            arguments["mask"] = mask
        with _masked(mask if train and "mask" not in known else None):
            out = function(x, **arguments)
        if key is None and any(map(operator.is_not, jax.tree.leaves(nnx.state(module, nnx.RngState)), unused)):
            raise UserError(f"{self.kind.__name__} draws random numbers in evaluation, which must not depend on chance")
        if mutable is None:
            return out
        return out, {name: self.forms[name].tree(nnx.state(module, _kind(name))) for name in mutable}

    def module(self, variables: Any) -> Any:
        """The user's module in evaluation mode, with these variables. Its random streams start from key 0."""
        states = self._states(jax.tree.map(jnp.asarray, variables))
        return nnx.merge(self.graphs[False], *states, self._streams(random_key(0)))

    def layers_used(self, function: Callable, variables: Any, x: Any) -> list[tuple[str, ...]]:
        """Paths of the modules whose variables ``function(variables, x)`` reads, ordered by their first use."""
        closed = jax.make_jaxpr(function)(variables, x)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(variables)]
        names = dict(zip(closed.jaxpr.invars, paths, strict=False))  # the last inputs are samples
        used = (tuple(entry.key for entry in path[1:-1]) for path in _in_order(closed.jaxpr, names))
        return list(dict.fromkeys(used))

    def _states(self, variables: Any) -> list[Any]:
        return [form.state(variables[name]) for name, form in self.forms.items()]

    def _streams(self, key: jax.Array) -> Any:
        """The random state whose stream number l has the key ``fold_in(key, l)`` and has drawn nothing."""
        leaves, structure = jax.tree.flatten(self.streams)

        def fresh(number: int, leaf: Any) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return jnp.zeros(leaf.shape, leaf.dtype)
            own = jax.random.fold_in(key, number)
            return jax.random.split(own, leaf.shape) if leaf.shape else own

        return jax.tree.unflatten(structure, [fresh(number, leaf) for number, leaf in enumerate(leaves)])


def is_nnx(module: Any) -> bool:
    """Whether an object is an NNX module, or a function or class that builds one from ``rngs``."""
    return isinstance(module, NNXModule) or is_instance(module) or takes_rngs(module)


def is_instance(module: Any) -> bool:
    """Whether an object is an NNX module. If so, its owner has imported ``flax.nnx``."""
    return "flax.nnx" in sys.modules and isinstance(module, nnx.Module)


def _is_class(kind: Any) -> bool:
    return "flax.nnx" in sys.modules and isinstance(kind, type) and issubclass(kind, nnx.Module)


def _kind(name: str) -> Any:
    return getattr(nnx, COLLECTIONS[name])


def takes_rngs(function: Any) -> bool:
    """Whether an object is a function or an NNX class with an argument ``rngs``."""
    if isinstance(function, type) and not _is_class(function):
        return False
    known = isinstance(function, type | functools.partial) or inspect.isroutine(function)
    return known and "rngs" in parameters(function)


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The arguments of a function, or of the constructor of a class, which NNX hides."""
    if isinstance(function, functools.partial):
        left = list(parameters(function.func).items())[len(function.args) :]
        return {name: each for name, each in left if name not in function.keywords}
    if _is_class(function):
        return dict(list(inspect.signature(function.__init__).parameters.items())[1:])
    return dict(inspect.signature(function).parameters)


def split(module: Any) -> tuple[NNXModule, dict[str, Any]]:
    """Split an NNX module into a module without values, and its values. Nothing is computed.

    Args:
      module: an instance, whose values are the initial ones of every run, or a function (or class) ``build(rngs=...)``
        that returns one, which initialises the variables from the run's seed.

    Returns:
      The module, and the variables of an instance. {} for a function.

    Raises:
      UserError: the function returns something else, or the module has a state that cannot be averaged.
    """
    instance = is_instance(module)
    build = (lambda key: nnx.clone(module)) if instance else (lambda key: module(rngs=nnx.Rngs(key)))
    found: dict[str, Any] = {}

    def states(key: jax.Array) -> tuple[Any, ...]:
        built = build(key)
        _check(built)
        built.eval()
        evaluation, *states = nnx.split(built, *map(_kind, COLLECTIONS), nnx.RngState)
        found["kind"], found["content"] = type(built), _content(built)
        found["methods"] = tuple(each for each in METHODS if callable(getattr(built, each, None)))
        built.train()
        for _, node in nnx.iter_graph(built):
            if isinstance(node, nnx.BatchNorm):
                node.__class__ = _without_padding(type(node))
        found["graphs"] = {False: evaluation, True: nnx.split(built)[0]}
        return tuple(states)

    *shapes, streams = jax.eval_shape(states, random_key(0))
    forms = {each: Form.of(state) for each, state in zip(COLLECTIONS, shapes, strict=True) if jax.tree.leaves(state)}
    values = lambda built: {each: form.tree(nnx.state(built, _kind(each))) for each, form in forms.items()}
    found |= {"forms": forms, "streams": streams}
    if not instance:
        return NNXModule(source=module, init=lambda key: values(build(key)), **found), {}
    start = jax.tree.map(np.array, values(module))
    found["content"] += (parts.digest(start),)
    zeros = functools.partial(jax.tree.map, jnp.zeros_like, jax.eval_shape(lambda: start))
    return NNXModule(source=found["graphs"][False], init=lambda key: zeros(), **found), start


def _check(built: Any) -> None:
    """Check that an object is an NNX module whose states can be averaged.

    Raises:
      UserError: it is none, or it has another state.
    """
    name = type(built).__name__
    if not isinstance(built, nnx.Module):
        raise UserError(f"a function of rngs must return an instance of flax.nnx.Module, not {name}")
    for path, node in nnx.iter_graph(built):
        place = f"{name} has {'.'.join(map(str, path))}"
        if isinstance(node, nnx.Variable) and not isinstance(node, (*map(_kind, COLLECTIONS), nnx.RngState)):
            raise UserError(
                f"{place} of the kind {type(node).__name__}, but only nnx.Param (trained) and nnx.BatchStat (the "
                "statistics of BatchNorm) can be averaged over clients"
            )
        if isinstance(node, jax.Array | np.ndarray):
            raise UserError(f"{place}, an array that is no variable: make it an nnx.Param, or compute it in __call__")


def _content(module: Any) -> tuple[Any, ...]:
    """The classes of a module and of all modules inside it, with their static attributes."""
    return tuple(
        (path, type(node).__qualname__, name, value)
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Module)
        for name, value in [("", None), *sorted((str(name), value) for name, value in vars(node).items())]
        if not name.startswith("_pytree") and not nnx.is_data(value)
    )


# --- Padding ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _masked(mask: jax.Array | None) -> Iterator[None]:
    """Let the BatchNorm layers called in the body skip the padding that ``mask`` [B] marks by 0."""
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


@functools.cache
def _without_padding(kind: Any) -> type:
    """A class of BatchNorm whose statistics exclude padding, and do not change if they are ``fixed``.

    If input and parameters have one number type, so has the output, as in Linen. In NNX it would be float32, the type
    of the statistics.
    """

    class WithoutPadding(kind):
        fixed = False

        def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
            mask = _mask.get()
            if self.fixed:  # whatever the mode that the user's module passes
                args, kwargs = (), kwargs | {"use_running_average": True}
            if mask is not None and kwargs.get("mask") is None and x.shape[:1] == mask.shape:
                kwargs = kwargs | {"mask": (mask > 0).reshape(-1, *(1,) * (x.ndim - 1))}
            out = super().__call__(x, *args, **kwargs)
            one_type = all(leaf.dtype == x.dtype for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
            return out.astype(x.dtype) if self.dtype is None and one_type else out

    return WithoutPadding


# --- Order of use ----------------------------------------------------------------------------------------------------


def _in_order(jaxpr: core.Jaxpr, names: Mapping[Any, Any]) -> Iterator[Any]:
    """The names of inputs in the order in which a program uses them, some several times."""
    for equation in jaxpr.eqns:
        inputs = [names.get(each) if isinstance(each, core.Var) else None for each in equation.invars]
        parts = [getattr(each, "jaxpr", each) for each in equation.params.values()]
        inner = [each for each in parts if isinstance(each, core.Jaxpr) and len(each.invars) == len(inputs)]
        if inner:
            yield from _in_order(inner[0], dict(zip(inner[0].invars, inputs, strict=True)))
        yield from (name for name in inputs if name is not None)
