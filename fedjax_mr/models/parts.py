"""Parts of a network's variables: the ones that train, and the frozen ones that all clients share.

A part is a tree of nested dictionaries like the variables, with only some of the leaves. The path of a variable is its
keys without the collection, joined by ``/``: ``conv1/conv/kernel``.
"""

import dataclasses
import fnmatch
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_mr.errors import UserError

Tree = dict[str, Any]
Trainable = Callable[[str], bool] | str | Sequence[str]
"""Says which variables train: a predicate of the path, or patterns such as ``classifier/*`` (`fnmatch`)."""


def flat(tree: Tree) -> dict[tuple[Any, ...], Any]:
    """The leaves by path."""
    return dict(flatten_dict(tree))


def joined(part: Tree, other: Tree) -> Tree:
    """The leaves of both parts. Where both have a leaf, that of ``other``."""
    both = dict(part)
    for name, value in other.items():
        both[name] = joined(both[name], value) if name in both and isinstance(value, dict) else value
    return both


def without(variables: Tree, part: Tree) -> Tree:
    """The leaves of ``variables`` that ``part`` does not have."""
    others = set(flat(part))
    return unflatten_dict({path: leaf for path, leaf in flat(variables).items() if path not in others})


def split(variables: Tree, trainable: Trainable) -> tuple[Tree, Tree]:
    """Divide variables into the part that trains and the frozen part.

    Statistics, such as those of BatchNorm, have a path like all variables and are divided by the same rule.
    """
    trains = predicate(trainable)
    leaves = flat(variables)
    chosen = {path for path in leaves if trains(path_name(path))}
    trained = {path: leaf for path, leaf in leaves.items() if path in chosen}
    frozen = {path: leaf for path, leaf in leaves.items() if path not in chosen}
    return unflatten_dict(trained), unflatten_dict(frozen)


def predicate(trainable: Trainable) -> Callable[[str], bool]:
    """The predicate of the path that patterns stand for. Several patterns are separated by commas or in a list."""
    if callable(trainable):
        return trainable
    patterns = trainable.split(",") if isinstance(trainable, str) else trainable
    return lambda path: any(fnmatch.fnmatchcase(path, pattern.strip()) for pattern in patterns)


def path_name(path: Sequence[Any]) -> str:
    """The path of a variable as text, from its keys with the collection first."""
    return "/".join(map(str, path[1:]))


def modules_of(part: Tree, collection: str) -> frozenset[tuple[str, ...]]:
    """The paths of the modules that own leaves of one collection of a part."""
    return frozenset(tuple(map(str, path[:-1])) for path in flat(part.get(collection, {})))


def partly(model: Any, trainable: Trainable = "*", *, variables: Any = None, key: jax.Array | None = None) -> Any:
    """A network of which only a part trains. The other variables are frozen: all clients share one copy of them.

    A BatchNorm layer with frozen statistics runs in evaluation mode, also in training.

    Args:
      model: a `Model` without frozen variables.
      trainable: what trains.
      variables: the values of all variables of the module, such as pretrained ones. The part that trains starts there.
      key: initialises the frozen variables if ``variables`` is None; consumed.

    Raises:
      UserError: nothing trains, ``variables`` are not those of the module, or a part is frozen already.
    """
    if model.frozen:
        raise UserError(f"{model.name} has frozen variables already: leave out trainable=, or pass the whole network")
    shapes = model.shapes()
    trained, _ = split(shapes, trainable)
    if not jax.tree.leaves(trained.get("params", {})):
        names = [path_name(path) for path in flat(shapes) if path[0] == "params"]
        raise UserError(
            f"trainable={trainable if isinstance(trainable, str) else '...'} matches no parameter of {model.name}; its "
            f"parameters are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    if variables is None:
        frozen = split(initialised(model, key), trainable)[1]
        frozen = jax.tree.map(np.asarray, frozen)
        return dataclasses.replace(model, frozen=frozen, start=split(model.start, trainable)[0])
    start, frozen = split(checked(variables, shapes, model.name), trainable)
    return dataclasses.replace(model, frozen=frozen, start=start)


@jax.jit  # models with equal shapes share a program
def initialised(model: Any, key: jax.Array) -> Tree:
    """The first variables of a network; consumes ``key``."""
    return model.init(key)


def checked(variables: Any, shapes: Tree, name: str) -> Tree:
    """Variables from a user as nested dictionaries of arrays on the host.

    Raises:
      UserError: their paths or shapes are not those of the network.
    """
    if not hasattr(variables, "items"):
        raise UserError(f"variables= takes the variables of {name}, a dictionary with params, not {type(variables)}")
    given, needed = flat(plain(variables)), flat(shapes)
    for path in [*needed, *given]:
        if path not in given or path not in needed:
            problem = "lacks" if path not in given else "has, beside those of the network,"
            raise UserError(f"variables= {problem} {'/'.join(map(str, path))}: it takes all variables of {name}")
        if np.shape(given[path]) != needed[path].shape:
            raise UserError(
                f"variables= has {'/'.join(map(str, path))} of shape {np.shape(given[path])}, but {name} needs "
                f"{needed[path].shape}"
            )
    return unflatten_dict({path: np.asarray(given[path], leaf.dtype) for path, leaf in needed.items()})


def plain(variables: Any) -> Tree:
    """Variables from a user as nested dictionaries."""
    tree: Tree = unfreeze(variables)
    return tree


def digest(part: Tree) -> str:
    """A hash of the paths, shapes and values of a part."""
    content = hashlib.sha256()
    for path, leaf in sorted(flat(part).items()):
        array = np.ascontiguousarray(leaf)
        content.update(f"{'/'.join(map(str, path))} {array.dtype} {array.shape} ".encode())
        content.update(array.tobytes())
    return content.hexdigest()
