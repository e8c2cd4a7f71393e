"""Registries of methods, networks, datasets and partitions by name, and the names of user-supplied objects.

A dataset or network that a user passes as a Python object is recorded as ``given:NAME:HASH`` in place of a registered
name.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from fedjax_mr.errors import UserError
from fedjax_mr.settings import info

Row = TypeVar("Row")


class Registry(dict[str, Row], Generic[Row]):
    """An ordered mapping from names to rows.

    Attributes:
      kind: noun for an entry in messages, such as "strategy".
      place: public name of the registry in messages.
      check: called with the name and row of a new entry. Raises UserError if the row is invalid.
      row_of: makes the row of what a user writes, such as a function alone. Default: that is the row.
      guarded: whether new entries are checked and names must be unused. It is set while a file is imported. Otherwise
        entries may be replaced, for example by a notebook cell that runs again.
    """

    def __init__(
        self,
        kind: str,
        place: str,
        check: Callable[[str, Any], None],
        rows: Mapping[str, Row] | None = None,
        *,
        row_of: Callable[[Any], Row] | None = None,
    ) -> None:
        """Add the rows of this package, which are not checked."""
        super().__init__(rows or {})
        self._ours = dict(self)
        self.kind = kind
        self.place = place
        self.check = check
        self.row_of = row_of
        self.guarded = False

    def __setitem__(self, name: str, row: Any) -> None:
        row = row if self.row_of is None else self.row_of(row)
        if self.guarded:
            if name in self:
                raise UserError(f"the {self.kind} {name!r} already exists: choose another name")
            self.refuse_unless_row(name, row)
        super().__setitem__(name, row)

    def is_ours(self, name: str) -> bool:
        """Whether a row is the original one of this package, neither added nor replaced by a user."""
        return name in self and self[name] is self._ours.get(name)

    def refuse_unless_row(self, name: Any, row: Any) -> None:
        """Check a new entry.

        Raises:
          UserError: the name is not an identifier, or the row is invalid.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"the {self.kind} {name!r} needs a name of letters, digits and underscores")
        self.check(name, row)


def names_only_ours(settings: Any) -> bool:
    """Whether every row that a dataclass of settings names is one of this package. A file in place of a row is not."""
    fields = dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()
    declared = [(each.name, own.names) for each in fields if (own := info(each)) is not None]
    return all(rows.is_ours(getattr(settings, name)) for name, rows in declared if isinstance(rows, Registry))


# --- Names of user-supplied objects ----------------------------------------------------------------------------------

PREFIX = "given:"
USER_OBJECTS = ("dataset", "model", "variables")
"""Settings of a run that accept a Python object."""


def supplied_name(name: str, digest: str = "") -> str:
    """The recorded name of a user-supplied object. ``digest`` is the hash of its contents, or "" if unknown."""
    simple = re.sub(r"[^\w.+-]+", "_", name).strip("_") or "unnamed"
    return f"{PREFIX}{simple}:{digest[:8]}".removesuffix(":")


def is_supplied(name: str) -> bool:
    """Whether one of the comma-separated recorded names stands for a user-supplied object."""
    return any(each.startswith(PREFIX) for each in name.split(","))


def shown(name: str) -> str:
    """The readable form of recorded names: NAME for ``given:NAME:HASH``, others unchanged."""
    return ",".join(each.split(":")[1] if each.startswith(PREFIX) else each for each in name.split(","))


def digests(name: str) -> list[str]:
    """The hashes of comma-separated recorded names of user-supplied objects."""
    return [each.rpartition(":")[2] for each in name.split(",")]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The readable form of each recorded name, with its hash if several would be equal."""
    count = collections.Counter(map(shown, dict.fromkeys(names)))
    return {name: shown(name) if count[shown(name)] == 1 else name.replace(PREFIX, "") for name in names}


def not_passed(argument: str, name: str) -> UserError:
    """The error for a recorded user-supplied object that was not passed again."""
    what = "these variables were" if argument == "variables" else f"this {argument} was"
    return UserError(
        f"{argument}={name}: {what} passed as a Python object and has no registered name. Start the run "
        f"with fmr.run(config, {argument}=...), or resume it with fmr.load(FOLDER).resume({argument}=...)"
    )
