"""Hyper-parameters: dataclass fields with a help text, a range and the source of the default."""

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

KEY = "fedjax_mr"  # key of the metadata of a field
LARGEST_INT32 = 2**31 - 1  # upper bound of integers, which NumPy and JAX (without 64-bit integers) share
LARGEST_FLOAT32 = 3.4e38  # upper bound of floats; a larger number is infinite on a device
# Bounds shared by several settings: far above practical values, far below overflow or out-of-memory.
LARGEST_BATCH = 65_536  # samples in one step
HIGHEST = {"epochs": 10_000, "steps": 100_000}  # per round, by unit: their product is counted in 32 bits


@dataclasses.dataclass(frozen=True)
class Info:
    """Metadata of a field.

    Attributes:
      help: description; for hyper-parameters it names the symbol of the paper.
      group: heading of the field in the full help; "" for hyper-parameters of strategies.
      unit: unit of the value, such as "samples" or "rounds".
      low, high: smallest and largest allowed value. ``open_low`` and ``open_high`` exclude the bound itself. A number
        without ``high`` must still fit into 32 bits. For array sizes and step counts, ``high`` is a feasible maximum.
      choices: allowed names.
      names: names listed in the help, such as the rows of a registry. They are not checked here.
      path: whether the text may be the path of a file or folder.
      flag: name of the flag if it differs from that of the field, because it is a keyword of Python.
      source: origin of the default.
      affects_results: whether the field can change the results of a run. A run folder, for example, cannot.
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
        """The allowed range in words, or "" if there is no range."""
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
    """A dataclass field with the `Info` of the keyword arguments; the default of ``high`` depends on the unit."""
    info.setdefault("high", HIGHEST.get(info.get("unit", "")))
    return dataclasses.field(default=default, metadata={KEY: Info(help, **info)})


def info(field: dataclasses.Field) -> Info | None:
    """The `Info` of a dataclass field, or None if it was declared without one."""
    return field.metadata.get(KEY)
