"""The search space: a file of flags with the values, or the range, in which each flag is searched.

    --lr=log:0.001:0.3              # a range, on a logarithmic scale
    --momentum=lin:0:0.9            # a range, on a linear scale
    --fedprox_mu=0.001,0.01,0.1     # values; only fedprox has this flag

A method is searched over the flags that it has. Without a file, only the learning rate is searched.

Trials are points of a scrambled Halton sequence: they cover the space more evenly than independent draws, and the first
T points do not depend on how many follow. Its column is chosen by the position of the flag in the file, so trial i has
the same learning rate for every method. `scipy.stats.qmc.Halton` draws other points for the same seed, so tunings that
have begun, and the kept one of the record, could not be repeated with it.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedjax_mr import untrusted
from fedjax_mr.config import config as configuration
from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import Setting, settings_of
from fedjax_mr.errors import UserError, unknown_name
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.sweep import grids

RANGE = re.compile(r"\s*(log|lin):([^:]+):([^:]+)")
DECADES = 1.0  # of the default space, on each side of --lr
DIGITS = 24  # of a point in the base of its column; more would be lost in rounding
MOST_VALUES = 1000  # of one flag. Each is checked as a configuration before anything is trained, which takes 0.01 s
SPARE = 100  # points per trial that are tried if some of them are the same settings
# Methods are compared on one problem, with equal training and equal tests.
PROBLEM_GROUPS = ("Data", "Partition", "Channel", "Clock", "Evaluation and records", "Engine")
PROBLEM_FLAGS = ("strategy", "seed", "rounds", "import")

Choice = dict[str, str]  # values by flag, as on the command line


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One flag of the space.

    Attributes:
      flag: its name.
      values: its values; a value may set other flags, as in ``--grid``. Empty for a range.
      low, high: ends of the range.
      log: whether the scale of the range is logarithmic.
      whole: whether the flag takes whole numbers.
    """

    flag: str
    values: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> str:
        """The value at a share in [0, 1) of the list or range, numbers with three digits."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.whole and not self.log:
            return str(int(self.low + math.floor(share * (self.high - self.low + 1))))
        number = self.low * (self.high / self.low) ** share if self.log else self.low + share * (self.high - self.low)
        return self.text(number)

    def text(self, number: float) -> str:
        """A number of the range as the value of the flag, with as many digits as keep it inside."""
        number = min(max(number, self.low), self.high)
        if self.whole:
            return str(round(number))
        return next(text for text in (f"{number:.3g}", repr(float(number))) if self.low <= float(text) <= self.high)

    def flags(self) -> set[str]:
        """The flags that its values set."""
        return {self.flag, *(name for value in self.values for name, _ in grids.pairs(self.flag, value))}

    def ends(self) -> tuple[str, ...]:
        """The values to check before anything is trained: all of a list, or both ends of a range."""
        return self.values or (self.text(self.low), self.text(self.high))

    def line(self) -> str:
        """The line of a space file."""
        if self.values:
            return f"--{self.flag}={','.join(self.values)}"
        return f"--{self.flag}={'log' if self.log else 'lin'}:{self.low:g}:{self.high:g}"


Space = Sequence[Dimension]


def default(config: Config) -> Space:
    """The space without a file: the learning rate, a factor of ten below and above that of the configuration."""
    factor = 10**DECADES
    return (Dimension("lr", low=config.lr / factor, high=config.lr * factor, log=True),)


def read(path: Path | str) -> Space:
    """Read a space file.

    Raises:
      UserError: the file is missing, or a line of it is not a flag with values or a range.
    """
    try:
        lines = untrusted.read_text(Path(path)).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read --space={path} ({getattr(error, 'strerror', None) or error})") from None
    space: list[Dimension] = []
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if text:
            space.append(_dimension(text, f"{path}, line {number}"))
    count = collections.Counter(name for each in space for name in each.flags())
    if twice := [name for name in count if count[name] > 1]:
        raise UserError(f"{path} has --{min(twice)} twice: list all its values in one line")
    if not space:
        raise UserError(f"{path} has no flag to search: write, for example, --lr=log:0.001:0.3")
    return tuple(space)


def _dimension(text: str, place: str) -> Dimension:
    name, equals, values = text.partition("=")
    name = name.removeprefix("--").strip()
    if not text.startswith("--") or not equals or not values.strip():
        raise UserError(
            f"{place}: {text!r} is not --flag=values; write, for example, --lr=0.01,0.1 or --lr=log:0.001:1"
        )
    known = _searchable()
    _require_searchable(name, known, place)
    whole = known[name].kind is int
    if match := RANGE.fullmatch(values):
        scale, *ends = match.groups()
        return _range(known[name], scale == "log", ends, f"{place}: {text}")
    if values.strip().startswith(("log:", "lin:")):
        raise UserError(f"{place}: {text}: a range has two ends, such as log:0.001:0.3 or lin:0:0.9")
    listed = Dimension(name, tuple(grids.split(name, values, "")), whole=whole)
    if len(listed.values) > MOST_VALUES:
        raise UserError(
            f"{place}: --{name} has {len(listed.values):,} values, more than {MOST_VALUES:,}: write a range, such as "
            "log:0.001:0.3, or fewer values"
        )
    for other in sorted(listed.flags()):
        _require_searchable(other, known, place)
    return listed


def _require_searchable(name: str, known: Mapping[str, Setting], place: str) -> None:
    if name not in known and name in configuration.flag_names():
        raise UserError(
            f"{place}: --{name} describes the problem, which is the same for all methods; set it on the command line"
        )
    if name not in known:
        raise unknown_name(f"flag in {place}", name, known)


def _range(setting: Setting, log: bool, ends: Sequence[str], place: str) -> Dimension:
    if setting.kind not in (int, float):
        raise UserError(f"{place}: only numbers have ranges; list the values, separated by commas")
    try:
        low, high = (setting.kind(end) for end in ends)
    except ValueError:
        raise UserError(f"{place}: the ends of the range are not numbers of this flag") from None
    if not -math.inf < low < high < math.inf:
        raise UserError(f"{place}: the first end of a range must be below the second")
    if log and low <= 0:
        raise UserError(f"{place}: a logarithmic range starts above 0")
    return Dimension(setting.flag, low=low, high=high, log=log, whole=setting.kind is int)


def _searchable() -> dict[str, Setting]:
    """The settings that a space may have, by flag: those of the methods, of networks and of training."""
    common = [each for each in settings_of(Config) if each.info.group not in PROBLEM_GROUPS]
    own = (each for name, row in STRATEGIES.items() for each in settings_of(row.hyper, f"{name}_"))
    return {each.flag: each for each in (*common, *own) if each.flag not in PROBLEM_FLAGS}


# --- Trials ----------------------------------------------------------------------------------------------------------


def of_method(space: Space, strategy: str) -> dict[int, Dimension]:
    """The dimensions that a method has, by their position in the space."""
    known = configuration.flag_names([strategy])
    return {position: each for position, each in enumerate(space) if each.flag in known}


def choice(values: Mapping[Dimension, str]) -> Choice:
    """The flags that a point of the space sets."""
    return dict(pair for dimension, value in values.items() for pair in grids.pairs(dimension.flag, value))


def grid(space: Space, strategy: str, most: int) -> list[Choice] | None:
    """All settings of a method, or None if its space has a range or more than ``most`` settings."""
    own = of_method(space, strategy).values()
    if not all(each.values for each in own) or math.prod(len(each.values) for each in own) > most:
        return None
    return [choice(dict(zip(own, values, strict=True))) for values in itertools.product(*(each.values for each in own))]


def draw(space: Space, strategy: str, count: int, seed: int) -> list[Choice]:
    """At most ``count`` different settings of a method: its whole grid if it is that small, else Halton points.

    Args:
      space: the space of all methods.
      strategy: the method.
      count: number of settings T.
      seed: seed of the scrambling.
    """
    everything = grid(space, strategy, count)
    if everything is not None:
        return everything
    found: dict[tuple[tuple[str, str], ...], Choice] = {}
    for length in (count, SPARE * count):  # more points if some of the first ones are the same setting
        columns = {each: _column(position, length, seed) for position, each in of_method(space, strategy).items()}
        for number in range(length):
            if len(found) < count:
                one = choice({each: each.at(column[number]) for each, column in columns.items()})
                found.setdefault(tuple(one.items()), one)
    return list(found.values())


def _column(position: int, count: int, seed: int) -> np.ndarray:
    """The first ``count`` numbers of a scrambled van der Corput sequence, each in [0, 1).

    The digits of 0, 1, 2, ... in a prime base are permuted and stand behind the point in reverse order.
    """
    base = next(itertools.islice((n for n in itertools.count(2) if all(n % d for d in range(2, n))), position, None))
    generator = np.random.default_rng([seed, position])
    numbers, column = np.arange(count), np.zeros(count)
    for digit in range(1, DIGITS + 1):
        column += generator.permutation(base)[numbers % base] * float(base) ** -digit
        numbers //= base
    return np.minimum(column, np.nextafter(1.0, 0.0))
