"""What the functions of a strategy must return, see `strategies.interface.Strategy`.

The checks run while a round is traced, so they cost nothing in the rounds. Without them, a forgotten ``return`` would
be an error of JAX that names neither the function nor the fault.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_mr.client.local import Metrics
from fedjax_mr.errors import UserError
from fedjax_mr.strategies.interface import Cohort, Info, Memory, Payload, State

COLUMNS = (
    "round", "accuracy", "loss", "train_loss", "similarity", "bytes_down", "bytes_up", "bytes_peer", "images",
    "seconds", "epsilon", "attacked_accuracy", "validation_accuracy", "validation_loss",
)  # fmt: skip
"""The columns of the metrics that a strategy's information cannot have. A strategy may give ``clock``: if it chooses
asynchronous clients one by one, only its state knows the time (`clock.online`)."""


def cohort(found: Any, size: int) -> Cohort:
    """The result of ``select``: a cohort of K clients.

    Raises:
      UserError: it is anything else.
    """
    if not isinstance(found, Cohort):
        raise UserError(f"the strategy's select must return a Cohort(ids, sizes), but it returns {_kind(found)}")
    if jnp.shape(found.ids) != (size,) or jnp.shape(found.sizes) != (size,):
        shapes = f"{_array(found.ids)} and {_array(found.sizes)}"
        raise UserError(f"the strategy's select must return ids and sizes of {size} clients, but they are {shapes}")
    return found


def payloads(found: Any, size: int) -> Payload:
    """The result of ``dispatch``: a dictionary of arrays [K, ...].

    Raises:
      UserError: it is anything else.
    """
    _require_dictionary(found, "dispatch must return a dictionary of payloads")
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        if jnp.shape(leaf)[:1] != (size,):
            raise UserError(
                f"the strategy's dispatch must return arrays with one row for each of {size} clients, but "
                f"{_name(path)} is {_array(leaf)}: use trees.broadcast(tree, problem.cohort_size)"
            )
    return found


def trained(found: Any, memory: Memory) -> tuple[Payload, Memory, Metrics]:
    """The result of ``client_update`` for a client that had ``memory``: upload, new memory, metrics.

    Raises:
      UserError: it is anything else.
    """
    upload, new, metrics = _parts(found, "client_update", "(upload, memory, metrics)", 3)
    _require_dictionary(upload, "client_update must return a dictionary as upload")
    if not isinstance(metrics, Metrics):
        raise UserError(
            f"the strategy's client_update must return the Metrics of local.train, but it returns {_kind(metrics)}"
        )
    _require_same(new, memory, "client_update returns a memory", "init_memory")
    _require_info(metrics.info, "client_update")
    return upload, new, metrics


def updated(found: Any, state: State) -> tuple[State, Info]:
    """The result of ``server_update`` for ``state``: the new state, and information by name.

    Raises:
      UserError: it is anything else.
    """
    new, info = _parts(found, "server_update", "(state, info)", 2)
    _require_same(new, state, "server_update returns a state", "init")
    _require_info(info, "server_update")
    return new, info


def deployed(found: Any, shapes: Any) -> Any:
    """The result of ``global_model``: variables with the ``shapes`` of the network.

    Raises:
      UserError: it is anything else.
    """
    _require_dictionary(found, "global_model must return the variables of the network")
    known = {name: tree for name, tree in found.items() if name in shapes}  # adapters may add changes of the base
    _require_same(known, shapes, "global_model returns variables", "the network")
    return found


def _parts(found: Any, member: str, wanted: str, count: int) -> tuple:
    if type(found) is not tuple or len(found) != count:  # a state may be a NamedTuple
        raise UserError(f"the strategy's {member} must return {wanted}, but it returns {_kind(found)}")
    return found


def _require_dictionary(found: Any, wanted: str) -> None:
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"the strategy's {wanted}, but it returns {_kind(found)}")


def _require_info(info: Any, member: str) -> None:
    _require_dictionary(info, f"{member} must return its information as a dictionary, such as {{}}")
    for name, value in info.items():
        if name in COLUMNS:
            raise UserError(
                f"the strategy's {member} returns information named {name!r}, which is a column of the metrics: choose "
                "another name"
            )
        if not _is_array(value):
            raise UserError(f"the strategy's {member} returns {name!r} as information, which is {_kind(value)}")


def _require_same(found: Any, expected: Any, what: str, source: str) -> None:
    """Check that a tree has the structure, shapes and dtypes of another one."""
    of = lambda tree: {_name(path): _array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    ours, theirs = of(found), of(expected)
    lacks, more = [name for name in theirs if name not in ours], [name for name in ours if name not in theirs]
    other = [name for name in theirs if name in ours and ours[name] != theirs[name]]
    if other:
        fault = f"whose {other[0]} is {ours[other[0]]}, but that of {source} is {theirs[other[0]]}"
    elif lacks:
        fault = f"without {lacks[0]}, which {source} has"
    elif more:
        fault = f"with {more[0]}, which {source} does not have"
    elif theirs and jax.tree.structure(found) != jax.tree.structure(expected):
        fault = f"of another structure ({_kind(found)}) than that of {source} ({_kind(expected)})"
    else:
        return
    raise UserError(f"the strategy's {what} {fault}")


def _name(path: Any) -> str:
    """The place of a leaf, such as ``model/params/dense/kernel``; "it" for the tree itself."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "it"


def _is_array(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def _array(leaf: Any) -> str:
    """Type and shape of a leaf, such as ``float32[3, 4]``."""
    if not _is_array(leaf):
        return _kind(leaf)
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{dtype}{list(jnp.shape(leaf))}"


def _kind(value: Any) -> str:
    """A Python object in words."""
    if value is None:
        return "nothing (None)"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"a tuple of {len(value)}"
    return f"a {_array(value) if _is_array(value) else type(value).__name__}"
