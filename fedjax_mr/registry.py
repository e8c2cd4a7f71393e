"""Registries of methods, networks, datasets and partitions by name, and the names of user-supplied objects.

A dataset or network that a user passes as a Python object is recorded as ``given:NAME:HASH`` in the place of a
registered name.
"""

import collections
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from fedjax_mr.errors import UserError

Row = TypeVar("Row")


class Registry(dict[str, Row], Generic[Row]):
    """Rows by name, in order.

    Attributes:
      kind: what a row stands for, as messages call it.
      place: its public name, for messages.
      check: called with the name and the row of a new entry; raises UserError if it is no row.
      guarded: whether new entries are checked and names can be taken once only: while a file is imported. Otherwise
        an entry may be replaced, as by a notebook's cell that runs again.
    """

    def __init__(
        self, kind: str, place: str, check: Callable[[str, Any], None], rows: Mapping[str, Row] | None = None
    ) -> None:
        """Take our own rows as they are."""
        super().__init__(rows or {})
        self._ours = dict(self)
        self.kind = kind
        self.place = place
        self.check = check
        self.guarded = False

    def __setitem__(self, name: str, row: Row) -> None:
        if self.guarded:
            if name in self:
                raise UserError(f"the {self.kind} {name!r} is there already: choose another name")
            self.refuse_unless_row(name, row)
        super().__setitem__(name, row)

    def is_ours(self, name: str) -> bool:
        """Whether a row is this package's own, and not one that somebody has added or put in its place."""
        return name in self and self[name] is self._ours.get(name)

    def refuse_unless_row(self, name: Any, row: Any) -> None:
        """Check a new entry.

        Raises:
          UserError: the name cannot be written in a flag, or there is no row.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"the {self.kind} {name!r} needs a name of letters, digits and underscores")
        self.check(name, row)


# --- Names of user-supplied objects ----------------------------------------------------------------------------------

PREFIX = "given:"
USER_OBJECTS = ("dataset", "model")
"""The settings of a run that a Python object can replace."""


def supplied_name(name: str, digest: str = "") -> str:
    """The recorded name of a user-supplied object; ``digest`` is the hash of its contents, "" while it is unknown."""
    simple = re.sub(r"[^\w.+-]+", "_", name).strip("_") or "unnamed"
    return f"{PREFIX}{simple}:{digest[:8]}".removesuffix(":")


def is_supplied(name: str) -> bool:
    """Whether a recorded name, or one of several with commas between them, stands for a user-supplied object."""
    return any(each.startswith(PREFIX) for each in name.split(","))


def shown(name: str) -> str:
    """A recorded name for people: NAME of ``given:NAME:HASH``, any other unchanged."""
    return ",".join(each.split(":")[1] if each.startswith(PREFIX) else each for each in name.split(","))


def digests(name: str) -> list[str]:
    """The hash in each of some recorded names of user-supplied objects."""
    return [each.rpartition(":")[2] for each in name.split(",")]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Each recorded name for people, with its hash if several would read the same."""
    count = collections.Counter(map(shown, dict.fromkeys(names)))
    return {name: shown(name) if count[shown(name)] == 1 else name.replace(PREFIX, "") for name in names}


def not_passed(argument: str, name: str) -> UserError:
    """The error for a recorded name of a user-supplied object that was not passed again."""
    return UserError(
        f"{argument}={name}: this {argument} was passed as a Python object and cannot be found by name: start such a "
        f"run by fmr.run(config, {argument}=...), resume it by fmr.load(FOLDER).resume({argument}=...)"
    )
