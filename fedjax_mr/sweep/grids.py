"""Parsers of a sweep's flags: lists, seeds, and the settings of ``--grid``."""

import re
from collections.abc import Sequence

from fedjax_mr.config import config as configuration
from fedjax_mr.errors import UserError, unknown_name

Pairs = list[tuple[str, str]]  # settings by flag
MOST_RUNS = 10_000  # of one command: planning a run takes up to 0.01 s
OWN_FLAG = {"strategy": "strategies", "seed": "seeds"}


def split(name: str, text: str | None, default: str) -> list[str]:
    """Split a list at its commas; None gives the list of ``default`` alone.

    Raises:
      UserError: a value is empty.
    """
    values = [default] if text is None else [value.strip() for value in text.split(",")]
    if "" in values:
        raise UserError(f"--{name}={text} has an empty value: separate values by single commas")
    return values


def seeds_of(text: str | None, name: str = "seeds") -> list[int]:
    """Parse seeds such as ``0,1,5`` or ``0:3``, the value of a flag; None gives no seeds.

    Raises:
      UserError: a part is neither a number nor a range, or there are too many seeds.
    """
    seeds: list[int] = []
    for part in [] if text is None else text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?::(\d{1,18}))?\s*", part, re.ASCII)
        if match is None or (match[2] and int(match[2]) <= int(match[1])):
            raise UserError(f"--{name}={text}: {part!r} is not a seed or a range; write 0,1,5 or 0:3 (which is 0,1,2)")
        several = range(int(match[1]), int(match[2] or int(match[1]) + 1))
        if len(seeds) + len(several) > MOST_RUNS:
            raise UserError(f"--{name}={text}: more than {MOST_RUNS:,} seeds")
        seeds += several
    return seeds


def grid_of(entries: Sequence[str], strategies: Sequence[str]) -> list[list[Pairs]]:
    """Parse the ``--grid`` flags: for each, its values; each value as the settings that it stands for.

    Raises:
      UserError: an entry has no values or an unknown flag, or two entries have the same flag.
    """
    known = [name for name in configuration.flag_names(strategies) if name not in OWN_FLAG]
    everything = configuration.flag_names()  # additional settings of a value may belong to other methods
    grid, seen = [], set()
    for entry in entries:
        name, equals, values = entry.partition("=")
        if not equals or not values:
            raise UserError(f"--grid={entry} has no values: write, for example, --grid alpha=0.1,0.5")
        if name in OWN_FLAG:
            raise UserError(f"--grid={entry}: write --{OWN_FLAG[name]}={values}")
        grid.append([pairs(name, value) for value in split(f"grid {name}", values, "")])
        if name not in known:
            raise unknown_name("flag in --grid", name, known)
        names = {name for settings in grid[-1] for name, _ in settings}
        if own := sorted(names & set(OWN_FLAG)):
            raise UserError(f"--grid={entry} sets {own[0]}, which has a flag of its own: --{OWN_FLAG[own[0]]}")
        if unknown := sorted(names - set(everything)):
            raise unknown_name("flag in --grid", unknown[0], known)
        if twice := sorted(names & seen):
            raise UserError(f"--grid has {twice[0]} twice: list all its values in one --grid")
        seen |= names
    return grid


def pairs(name: str, value: str) -> Pairs:
    """The settings that a value stands for: for partition, ``dirichlet+alpha=0.1`` also sets alpha."""
    first, *others = re.split(r"\+(?=[a-z]\w*=)", value)  # but not at the plus of 1e+5
    return [(name, first), *((other.partition("=")[0], other.partition("=")[2]) for other in others)]
