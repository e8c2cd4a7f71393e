"""The declaration of a hyper-parameter: a dataclass field with its help, its range and the source of its default."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

KEY = "fedjax_mr"  # of the metadata of a field
LARGEST_INT32 = 2**31 - 1  # of all whole numbers: for both NumPy and JAX (without 64-bit integers)
LARGEST_FLOAT32 = 3.4e38  # of all other numbers: a larger one is infinite on a device
# Bounds that several settings share: far above all uses, far below what overflows or exhausts all memories.
LARGEST_BATCH = 65_536  # samples in one step
HIGHEST = {"epochs": 10_000, "steps": 100_000}  # of a round, by unit: their product is counted in 32 bits


@dataclasses.dataclass(frozen=True)
class Info:
    """Facts about a field beyond its default.

    Attributes:
      help: one sentence; for hyper-parameters it names the paper's symbol.
      group: the heading under which ``--help=all`` lists the flag ("" for a strategy's own fields).
      unit: the unit of the value, such as "samples" or "rounds".
      low, high: the least and the largest value allowed; ``open_low`` and ``open_high`` exclude the bound itself. A
        number without ``high`` still has to fit into 32 bits; where the setting is the size of an array or a count of
        steps, ``high`` is what can be computed at all.
      choices: the names allowed.
      names: names to list in ``--help``, such as the rows of a registry; the owner of the field checks them.
      path: whether the text may be the path of a file or folder.
      flag: the flag where Python forbids its name for a field; "": the field's own name.
      source: the origin of the default.
      affects_results: whether the field can change the numbers of a run (a run folder, say, cannot).
    """

    help: str
    group: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False
    choices: Sequence[str] | None = None
    names: Collection[str] = ()
    path: bool = False
    flag: str = ""
    source: str = ""
    affects_results: bool = True

    def allowed(self) -> str:
        """The allowed range in words, or "" if there is none."""
        low = None if self.low is None else f"{'>' if self.open_low else '>='} {_short(self.low)}"
        high = None if self.high is None else f"{'<' if self.open_high else '<='} {_short(self.high)}"
        high = "< 2^31" if self.high == LARGEST_INT32 else high
        return " and ".join(part for part in (low, high) if part)

    def allows(self, value: float) -> bool:
        """Whether a number is finite and in the allowed range."""
        too_low = self.low is not None and (value <= self.low if self.open_low else value < self.low)
        too_high = self.high is not None and (value >= self.high if self.open_high else value > self.high)
        return not too_low and not too_high and -math.inf < value < math.inf


def _short(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def field(default: Any, help: str, **info: Any) -> Any:
    """A dataclass field with its `Info`; keyword arguments are those of `Info`, ``high`` follows the unit."""
    info.setdefault("high", HIGHEST.get(info.get("unit", "")))
    return dataclasses.field(default=default, metadata={KEY: Info(help, **info)})


def info(field: dataclasses.Field) -> Info | None:
    """The `Info` of a dataclass field, or None if it was declared without one."""
    return field.metadata.get(KEY)
