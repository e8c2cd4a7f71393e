"""What a sweep runs, from texts: lists, seeds, and the settings of ``--grid``."""

import re
from collections.abc import Sequence

from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.experiment import config as configuration

Pairs = list[tuple[str, str]]  # settings by flag
OWN_FLAG = {"strategy": "strategies", "seed": "seeds"}


def split(name: str, text: str | None, default: str) -> list[str]:
    """Return the values of a list with commas; None stands for the default alone.

    Raises:
      UserError: one is empty.
    """
    values = [default] if text is None else [value.strip() for value in text.split(",")]
    if "" in values:
        raise UserError(f"--{name}={text} has an empty value: separate values by single commas")
    return values


def seeds_of(text: str | None) -> list[int]:
    """Return the seeds of a text such as ``0,1,5`` or ``0:3``; None has none.

    Raises:
      UserError: a part is neither a number nor a range.
    """
    seeds: list[int] = []
    for part in [] if text is None else text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?::(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) <= int(match[1])):
            raise UserError(f"--seeds={text} has no seeds at {part!r}: write 0,1,5 or 0:3, which is 0,1,2")
        seeds += range(int(match[1]), int(match[2] or int(match[1]) + 1))
    return seeds


def grid_of(entries: Sequence[str], strategies: Sequence[str]) -> list[list[Pairs]]:
    """Return for each ``--grid`` its values; a value is the settings that it makes.

    Raises:
      UserError: an entry has no values, an unknown flag, or one that is named twice.
    """
    known = [name for name in configuration.flag_names(strategies) if name not in OWN_FLAG]
    everything = configuration.flag_names()  # what a value brings along may concern methods that are not run
    grid, seen = [], set()
    for entry in entries:
        name, equals, values = entry.partition("=")
        if not equals or not values:
            raise UserError(f"--grid={entry} names no values: write --grid alpha=0.1,0.5")
        if name in OWN_FLAG:
            raise UserError(f"--grid={entry}: write --{OWN_FLAG[name]}={values}")
        grid.append([_pairs(name, value) for value in split(f"grid {name}", values, "")])
        if name not in known:
            raise unknown_name("flag in --grid", name, known)
        names = {name for pairs in grid[-1] for name, _ in pairs}
        if unknown := sorted(names - set(everything)):
            raise unknown_name("flag in --grid", unknown[0], known)
        if twice := sorted(names & seen):
            raise UserError(f"--grid names {twice[0]} twice: write all values of it after one --grid")
        seen |= names
    return grid


def _pairs(name: str, value: str) -> Pairs:
    """Return the settings of a value: ``dirichlet+alpha=0.1`` of partition also has alpha."""
    first, *others = re.split(r"\+(?=[a-z]\w*=)", value)  # the plus of 1e+5 is none of these
    return [(name, first), *((other.partition("=")[0], other.partition("=")[2]) for other in others)]
