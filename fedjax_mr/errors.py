"""Errors that users can fix. Each message is one line that says what is wrong, where, and what to do."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error that the user can fix. Commands print it as one line and exit with ``exit_code``."""

    exit_code = 2


class LostError(UserError):
    """Another process of the run died, did not start, or is unreachable."""

    exit_code = 4


class TakenError(UserError):
    """Another process is using the folder."""


class DivergedError(UserError):
    """A loss or weight became infinite or NaN during training."""

    exit_code = 3


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not registered. It suggests the closest known name."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return UserError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})")
