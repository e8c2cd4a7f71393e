"""Hyper-parameters: dataclass fields with a help text, a range and the source of the default.

Numbers are data, structure is code: fields of type ``float`` (or ``float | None``) are arguments of the compiled
programs, so another value compiles nothing. All other fields, and floats declared with ``static=True``, are part of the
program: use it for a number that decides a shape or a branch in Python.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from fedjax_mr.errors import UserError, did_you_mean, unknown_name

KEY = "fedjax_mr"  # key of the metadata of a field
LARGEST_INT32 = 2**31 - 1  # upper bound of integers, which NumPy and JAX (without 64-bit integers) share
LARGEST_FLOAT32 = 3.4e38  # upper bound of floats; a larger number is infinite on a device
# Bounds shared by several settings: far above practical values, far below overflow or out-of-memory.
LARGEST_BATCH = 65_536  # samples in one step
OFF = (0, None, "none", [])  # values of settings that switch something off
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
      compiled: how compiled programs see the field: as an ``argument``, so another value compiles nothing; as a
        ``constant``; or not at all (``no``). "" means argument for float fields, constant for others.
      repeats: whether a flag file that repeats a run has the field. The folder of a run, for example, is another one.
      local: whether the value has no meaning on another machine.
      per_process: whether the processes that share a run may have different values.
      at_end: whether another value writes the records of a finished run anew.
      short: whether the short page of the help has the field.
      argument: name of the library's argument that gets the value, if it differs from that of the field.
      needs: another setting of the same dataclass, followed by the values of it with which this field has an effect.
        Without values: all but 0, None and "none".
      rounding: whether another value changes results by rounding alone.
      before: the value of runs that were recorded before the setting existed. None: the default.
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
    compiled: str = ""
    repeats: bool = True
    local: bool = False
    per_process: bool = False
    at_end: bool = False
    short: bool = False
    argument: str = ""
    needs: tuple[str, ...] = ()
    rounding: bool = False
    before: Any = None

    def has_effect(self, values: Mapping[str, Any]) -> bool:
        """Whether the field can change results beside the ``values`` of the other settings."""
        if not self.needs:
            return True
        other, *wanted = self.needs
        if not wanted:
            return values[other] not in OFF
        return not set(wanted).isdisjoint(str(values[other]).split(","))  # such as augment=crop_flip,cutmix

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


def field(default: Any, help: str, *, static: bool = False, **info: Any) -> Any:
    """A dataclass field with the `Info` of the keyword arguments; the default of ``high`` depends on the unit.

    ``static``: whether a float is part of the compiled program, see above.
    """
    info.setdefault("high", HIGHEST.get(info.get("unit", "")))
    if static:
        info["compiled"] = "constant"
    return dataclasses.field(default=default, metadata={KEY: Info(help, **info)})


def info(field: dataclasses.Field) -> Info | None:
    """The `Info` of a dataclass field, or None if it was declared without one."""
    return field.metadata.get(KEY)


def check(hyper: Any, owner: str = "hyper.") -> None:
    """Check the values of a dataclass of hyper-parameters, or of another ``owner`` in messages.

    Raises:
      UserError: a name is not one of the choices, a number is not in its range, or it is no whole number.
    """
    hints = typing.get_type_hints(type(hyper)) if dataclasses.is_dataclass(hyper) else {}
    for each in dataclasses.fields(hyper) if dataclasses.is_dataclass(hyper) else ():
        own, value = info(each), getattr(hyper, each.name)
        if own is None:
            continue
        name = f"{owner}{own.argument or each.name}"
        if own.choices and isinstance(value, str) and value not in own.choices:
            raise unknown_name(name, value, own.choices)
        if hints[each.name] in (int, int | None) and value is not None and not _is_whole(value):
            raise UserError(f"{name}={value!r} must be a whole number")
        if isinstance(value, int | float | np.number) and not own.allows(float(value)):
            raise UserError(f"{name}={value} is out of range (allowed: {own.allowed()})")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def make(owner: type | None, values: Mapping[str, Any], what: str, *, others: Iterable[str] = ()) -> Any:
    """The settings of a row with some values by name; None if it has none.

    Args:
      owner: the dataclass of its settings, or None.
      values: by the names of fields. The others have their defaults.
      what: the row in messages, such as "partition 'shards'".
      others: names of other settings that may be meant, for a hint in the message.

    Raises:
      UserError: there is no such setting, or as `check`.
    """
    names = [] if owner is None else [each.name for each in dataclasses.fields(owner)]
    for name in values:
        if name not in names:
            has = f"it has {', '.join(names)}" if names else "it has none"
            raise UserError(f"{what} has no setting {name}=: {has}{did_you_mean(name, [*names, *others])}")
    made = None if owner is None else owner(**values)
    check(made, "")
    return made


# --- numbers as arguments of compiled programs ------------------------------------------------------------------------


def numbers_of(hyper: Any) -> list[dataclasses.Field]:
    """The fields of a dataclass that are arguments of compiled programs: floats that are not static."""
    if not dataclasses.is_dataclass(hyper):
        return []
    hints = typing.get_type_hints(hyper if isinstance(hyper, type) else type(hyper))
    kinds = (float, float | None)
    floats = [each for each in dataclasses.fields(hyper) if hints[each.name] in kinds]
    return [each for each in floats if (declared := info(each)) is None or declared.compiled != "constant"]


def as_arguments(hyper: Any) -> Any:
    """Hyper-parameters as a pytree whose leaves are their numbers, as float32 scalars. Other fields are static.

    A dataclass becomes a pytree here, unless it already is one. An object of another kind has no numbers: it is
    returned unchanged.
    """
    kind = type(hyper)
    if not dataclasses.is_dataclass(kind):
        return hyper
    if jax.tree_util.all_leaves([hyper]):
        numbers = [each.name for each in numbers_of(kind)]
        others = [each.name for each in dataclasses.fields(kind) if each.name not in numbers]
        jax.tree_util.register_dataclass(kind, numbers, others)
    as_array = lambda leaf: leaf if isinstance(leaf, np.generic | np.ndarray | jax.Array) else np.float32(leaf)
    return jax.tree.map(as_array, hyper)


def for_programs(settings: Any) -> Any:
    """`as_arguments` without the values that programs do not contain: those have their defaults."""
    if settings is None:
        return None
    unseen = {}
    for each in dataclasses.fields(settings):
        declared, number = info(each), each in numbers_of(settings)
        if declared is not None and (declared.compiled == "no" or (declared.compiled == "argument" and not number)):
            unseen[each.name] = each.default
    return as_arguments(dataclasses.replace(settings, **unseen))


def bind(build: Callable, hyper: Any) -> Callable:
    """The function problem -> strategy for ``build(hyper, problem)``: a pytree with the leaves of `as_arguments`."""
    if hyper is None or dataclasses.is_dataclass(hyper):
        return jax.tree_util.Partial(build, as_arguments(hyper))
    return jax.tree_util.Partial(functools.partial(build, hyper))


def require(condition: Any, message: str) -> None:
    """Check numbers of the hyper-parameters or of the clients' optimizer.

    Every strategy is built once with known numbers, before its programs are traced. A traced condition passes.

    Raises:
      UserError: the condition is known to be false.
    """
    if not isinstance(condition, Tracer) and not condition:
        raise UserError(message)
