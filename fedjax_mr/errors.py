"""Errors that users can fix, each with one line that says what is wrong, where, and what to do; a stop by a signal."""

import difflib
from collections.abc import Iterable

import numpy as np


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


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal, and has a checkpoint. Not an `Exception`: ``except Exception`` ignores it.

    Attributes:
      exit_code: 128 plus the number of the signal.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the message and the exit code."""
        super().__init__(message)
        self.exit_code = exit_code


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a registry, with the most similar name that is."""
    names = sorted(known)
    return UserError(f"unknown {kind} {name!r}{did_you_mean(name, names)} (known: {', '.join(names)})")


def did_you_mean(name: str, known: Iterable[str], form: str = "{!r}") -> str:
    """The hint to the most similar name, or "" if none is similar. Only letters, without their case, and digits count.

    Args:
      name: the unknown name.
      known: the names that exist.
      form: the format of the name in the hint.
    """
    plain = lambda text: "".join(filter(str.isalnum, text)).lower()
    names = {plain(each): each for each in sorted(known, reverse=True)}
    nearest = difflib.get_close_matches(plain(name), names, n=1, cutoff=0.4)
    return f"; did you mean {form.format(names[nearest[0]])}?" if nearest else ""


def usual_arithmetic() -> np.errstate:
    """NumPy's defaults for overflow and the like. Some zeros and infinities of this package are intended.

    A program with ``np.seterr(all="raise")`` would otherwise end in an error of a computation that it does not know.
    """
    return np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")
