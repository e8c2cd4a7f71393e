"""Registries: rows by name, ours and those of files of one's own (`imports`), which follow the same rules."""

from collections.abc import Callable, Mapping
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
        """Return whether a row is this package's own, and not one that somebody has added or put in its place."""
        return name in self and self[name] is self._ours.get(name)

    def refuse_unless_row(self, name: Any, row: Any) -> None:
        """Check a new entry.

        Raises:
          UserError: the name cannot be written in a flag, or there is no row.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"the {self.kind} {name!r} needs a name of letters, digits and underscores")
        self.check(name, row)
