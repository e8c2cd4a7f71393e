"""The errors that users can mend: each is one line that says what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend; the command prints it as one line and exits with ``exit_code``."""

    exit_code = 2


class LostError(UserError):
    """Another process of the run died, never came, or is out of reach."""

    exit_code = 4


class TakenError(UserError):
    """Another process is at work there."""


class DivergedError(UserError):
    """Training met a loss or weights that are not finite."""

    exit_code = 3


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that no registry row has, with the nearest known one."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return UserError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
