"""The content of messages between server and clients: trees of arrays as named arrays and back, with checks.

A `Record` maps names to arrays, or names to plain values. A `Content` maps names to records. Nothing is pickled, so a
message may contain wrong numbers but no code.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedjax_mr.errors import UserError

SMALL = 2**20  # bytes allowed in a message beside its large arrays
_ARRAY = 2**13  # bytes allowed per array beside its numbers: names, headers, hashes
LONGEST_LINE = 200  # characters
Record = Mapping[str, Any]  # only arrays, or only plain values: int, float, str, bytes, bool and lists of these
Content = Mapping[str, Record]


def pack(tree: Any) -> dict[str, np.ndarray]:
    """Flatten a tree into arrays named by their paths, such as ``params/Dense_0/kernel``."""
    return {name: np.asarray(leaf) for name, leaf in _named(tree).items()}


def unpack(record: Any, like: Any, *, who: str, finite: bool = True) -> Any:
    """Rebuild the tree that `pack` flattened, with NumPy arrays as leaves.

    Args:
      record: the received record; nothing about it is trusted.
      like: a tree of arrays, or of the shapes and dtypes that the result must have.
      who: what is unpacked, such as "the upload of client 3"; errors begin with it.
      finite: whether to reject NaN and infinite numbers.

    Raises:
      UserError: the record has other names, shapes or dtypes, or a number that is not finite.
    """
    wanted = _named(like)
    if not isinstance(record, Mapping):
        raise UserError(f"{who} is not a record of arrays")
    if unlike := sorted(set(wanted) ^ set(map(str, record))):
        what = "lacks" if unlike[0] in wanted else "has an unknown"
        raise UserError(f"{who} {what} {unlike[0]!r}: {len(record)} arrays, expected {len(wanted)}")
    for name, leaf in wanted.items():
        found = record[name]
        if not isinstance(found, np.ndarray):
            raise UserError(f"{who}: {name!r} is not an array")
        if (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise UserError(
                f"{who}: {name!r} is {found.dtype}{list(found.shape)}, expected {leaf.dtype}{list(leaf.shape)}"
            )
        if finite and found.dtype.kind == "f" and not np.isfinite(found).all():
            raise UserError(f"{who}: {name!r} has numbers that are not finite")
    return jax.tree.unflatten(jax.tree.structure(like), [record[name] for name in wanted])


def size_limit(like: Any) -> int:
    """The bytes allowed in a message that contains a tree.

    Args:
      like: a tree of arrays, or of their shapes and dtypes.
    """
    leaves = jax.tree.leaves(like)
    return SMALL + sum(_ARRAY + math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """Turn a text from the other side into one printable line of limited length, for terminals and logs."""
    printable = "".join(each if each.isprintable() else "?" for each in " ".join(text[: 10 * longest].split()))
    return printable if len(printable) <= longest else printable[: longest - 3] + "..."


def _named(tree: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/") or "tree": leaf for path, leaf in paths}
