"""Settings: any dataclass whose fields are declared by `field`, as flags, help, checks and plain values.

One declaration of a field makes its default, its flag, its entry in ``--help``, its check and its value in JSON files.
"""

import contextlib
import dataclasses
import functools
import inspect
import numbers
import os
import shutil
import textwrap
import threading
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from fedjax_mr.errors import UserError, did_you_mean
from fedjax_mr.settings import LARGEST_FLOAT32, LARGEST_INT32, Info, field, info

LONGEST_NAME, LONGEST_PATH = 255, 3500  # bytes that file systems take, with room for the files in a folder
LONGEST_SHOWN = 120  # characters of a value of the wrong type
OTHER_NAMES = {name: ("patience",) for name in ("early_stop", "early_stopping", "early_stopping_patience")}
"""Names in other libraries of flags that have a different name here."""
DEEPEST_FLAG_FILES = 16  # of flag files that include each other
MOST_FLAG_FILES = 1000  # that one command reads: few files that include each other often would never end
_READING = threading.RLock()  # all threads read into the same flags, see `_defined`
PACKAGE = Path(__file__).parents[1]  # its exp/ has the flag files: a link here, copies in an installed package
Owner = typing.TypeVar("Owner")


# --- One setting -----------------------------------------------------------------------------------------------------

# Of each kind: the type of values that fit, its name in errors, and how --help shows that a value follows the flag.
_KINDS: dict[type, tuple[type, str, str]] = {
    bool: (bool, "True or False", ""),
    int: (numbers.Integral, "a whole number", "=INTEGER"),
    float: (numbers.Real, "a number", "=NUMBER"),
    str: (str, "a text", "=TEXT"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Setting:
    """A field as a flag. `settings_of` always returns the same objects for a dataclass.

    Attributes:
      flag: the name of the flag: the field's, after a prefix if its dataclass has one.
      name: the name of the field.
      kind: bool, int, float or str.
      optional: whether the value may be None.
      repeated: whether the value is a tuple of ``kind`` and the flag may be repeated.
      default: the default value.
      info: the rest of the declaration.
    """

    flag: str
    name: str
    kind: type
    optional: bool
    repeated: bool
    default: Any
    info: Info

    @property
    def compiled(self) -> str:
        """How compiled programs see the setting: ``argument``, ``constant`` or ``no`` (see `Info`)."""
        return self.info.compiled or ("argument" if self.kind is float and not self.repeated else "constant")

    @property
    def is_number(self) -> bool:
        """Whether the setting is a number that compiled programs take as an argument."""
        return self.kind is float and self.compiled == "argument"

    def check(self, value: Any, label: str = "") -> None:
        """Check the type and the range of a value.

        Args:
          value: the value.
          label: the name of the setting in messages. Default: its flag.

        Raises:
          UserError: the value does not fit; the message names the setting, the value and the values allowed.
        """
        label = label or f"--{self.flag}"
        if self.repeated:
            if not isinstance(value, tuple | list):
                raise UserError(f"{label}={_shown(value)} is not a tuple; a single value is ({value!r},)")
            for each in value:
                self._single.check(each, label)
        elif not self._fits(value):
            raise UserError(f"{label}={_shown(value)} is not {_KINDS[self.kind][1]}")
        elif isinstance(value, str):
            self._check_text(value, label)
        elif value is not None and not isinstance(value, bool):
            self._check_number(value, label)

    def plain(self, value: Any) -> Any:
        """The value in a form for JSON: True, 1, 1.0, "text", None, or a list."""
        if self.repeated:
            return [self._single.plain(each) for each in value]
        return None if value is None else self.kind(value)

    def as_flags(self, value: Any) -> list[str]:
        """The flags that set a value."""
        plain = self.plain(value)
        if self.kind is bool:
            return [f"--{self.flag}" if plain else f"--no{self.flag}"]
        if self.repeated:
            return [f"--{self.flag}={each}" for each in plain] or [f"--{self.flag}=none"]
        return [f"--{self.flag}={'none' if plain is None else plain}"]

    def help(self, width: int) -> list[str]:
        """The lines of help about the setting, at most ``width`` characters each (except for long names)."""
        choices = self.info.choices or self.info.names
        facts = [self.info.unit, self.info.allowed(), f"one of {', '.join(choices)}" if choices else ""]
        facts.append("repeatable" if self.repeated else "")
        default = self.default
        if self.kind is bool:
            default = "on" if default else "off"
        elif default in (None, ()):
            default = "none"
        source = self.info.source or ("our choice" if self.flag == self.name else "")
        facts.append(f"default {default}" + (f" [{source}]" if source else ""))
        text = f"{self.info.help} ({'; '.join(fact for fact in facts if fact)})"
        head = f"  --{self.flag}{_KINDS[self.kind][2]}"
        column = min(34, width // 2)
        body = textwrap.wrap(text, width - column, break_long_words=False, break_on_hyphens=False)
        if len(head) + 2 > column:
            return [head, *(" " * column + line for line in body)]
        return [head.ljust(column) + body[0], *(" " * column + line for line in body[1:])]

    @functools.cached_property
    def _single(self) -> "Setting":
        """The setting of a single value of a repeated flag."""
        return dataclasses.replace(self, repeated=False)

    @functools.cached_property
    def _ranges(self) -> list[Info]:
        """The declarations whose ranges a number must be in."""
        if self.info.high is not None:
            return [self.info]
        largest = {int: LARGEST_INT32, float: LARGEST_FLOAT32}[self.kind]
        return [self.info, dataclasses.replace(self.info, high=largest)]

    def _fits(self, value: Any) -> bool:
        if isinstance(value, bool) or value is None:  # a bool is an int to Python
            return self.kind is bool if isinstance(value, bool) else self.optional
        return isinstance(value, _KINDS[self.kind][0])

    def _check_number(self, value: float, label: str) -> None:
        """Check a number by its declaration, then by the bound of all numbers."""
        for each in self._ranges:
            if not each.allows(value):
                shown = value if self.kind is float or abs(value) < 10**15 else f"{str(value)[:15]}..."
                raise UserError(f"{label}={shown} is out of range (allowed: {each.allowed() or 'finite numbers'})")

    def _check_text(self, value: str, label: str) -> None:
        if value != value.strip() or not value.isprintable():
            raise UserError(f"{label}={value!r} has spaces at an end or unprintable characters")
        if self.info.choices is not None and value not in self.info.choices:
            hint = did_you_mean(value, self.info.choices)
            raise UserError(f"{label}={value!r} is not one of {', '.join(self.info.choices)}{hint}")
        if self.info.path:
            longest = max(map(len, os.fsencode(value).split(b"/")))
            if longest > LONGEST_NAME or len(os.fsencode(value)) > LONGEST_PATH:
                raise UserError(
                    f"{label}={value[:40]}... is too long for a path: names have at most {LONGEST_NAME} bytes, "
                    f"the whole path {LONGEST_PATH}"
                )


def _shown(value: Any) -> str:
    """A value of the wrong type, such as an array, as one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


# --- The settings of a dataclass -------------------------------------------------------------------------------------


def settings_of(owner: Any, prefix: str = "") -> Sequence[Setting]:
    """The settings of a dataclass, in order. Fields without `Info` are not settings.

    Args:
      owner: the dataclass or an instance of it; None has no settings.
      prefix: the prefix of its flags.
    """
    if owner is None:
        return ()
    return _settings_of(owner if isinstance(owner, type) else type(owner), prefix)


@functools.cache  # a sweep asks for them thousands of times
def _settings_of(owner: type, prefix: str) -> tuple[Setting, ...]:
    hints, settings = typing.get_type_hints(owner), []
    # The fields of a base class come after those of the class itself.
    for each in sorted(dataclasses.fields(owner), key=lambda each: each.name not in inspect.get_annotations(owner)):
        declared = info(each)
        if declared is None:
            continue
        options = [hint for hint in _options(hints[each.name]) if hint is not types.NoneType]
        optional, hint = len(options) < len(_options(hints[each.name])), options[0]
        repeated = typing.get_origin(hint) is tuple
        kind = typing.get_args(hint)[0] if repeated else hint
        flag = prefix + (declared.flag or each.name)
        settings.append(Setting(flag, each.name, kind, optional, repeated, each.default, declared))
    groups = list(dict.fromkeys(setting.info.group for setting in settings))
    return tuple(sorted(settings, key=lambda setting: groups.index(setting.info.group)))


def values_of(instance: Any, prefix: str = "") -> Iterator[tuple[Setting, Any]]:
    """Yield each setting of an instance of a dataclass (None has none) with its value."""
    for setting in settings_of(instance, prefix):
        yield setting, getattr(instance, setting.name)


def build(owner: type[Owner], values: Mapping[str, Any], prefix: str = "") -> Owner:
    """Make an instance of a dataclass.

    Args:
      owner: the dataclass.
      values: by flag, as returned by `parse` or read from JSON. A setting without a value has its default. Values of
        other flags are ignored.
      prefix: the prefix of its flags.
    """
    named = {setting.name: values[setting.flag] for setting in settings_of(owner, prefix) if setting.flag in values}
    return owner(**{name: _after_none(value) if isinstance(value, list) else value for name, value in named.items()})


def recorded(values: Mapping[str, Any], prefix: str, name: str = "Hyper") -> Any:
    """Settings in JSON whose dataclass is not available, as an instance of a new one; None if there are none.

    Args:
      values: by flag.
      prefix: the prefix of the flags.
      name: the name of the new dataclass.
    """
    fields = [
        (flag.removeprefix(prefix), _kind_of(value), field(tuple(value) if isinstance(value, list) else value, ""))
        for flag, value in values.items()
        if flag.startswith(prefix)
    ]
    return dataclasses.make_dataclass(name, fields, frozen=True)() if fields else None


def _kind_of(value: Any) -> Any:
    """The type of a setting with this value."""
    if isinstance(value, list):
        return tuple[_kind_of(value[0]) if value else str, ...]
    if not isinstance(value, str | int | float | None):
        raise TypeError(f"{value} is not a valid value of a setting")
    return (str | None) if value is None else type(value)


def _options(hint: Any) -> tuple[Any, ...]:
    """The types in a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _after_none(values: list[Any]) -> tuple[Any, ...]:
    """The values of a repeated flag after the last ``none``, which clears those before it."""
    cleared = [position for position, value in enumerate(values) if value is None]
    return tuple(values[cleared[-1] + 1 :] if cleared else values)


# --- Flags -----------------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str], settings: Iterable[Setting]) -> dict[str, Any]:
    """Read the values of all flags, by name; `build` makes an instance of a dataclass from them.

    Args:
      arguments: the command line, without the program's name. Flag files expand in place, and the last value wins.
      settings: those of one or more dataclasses.

    Raises:
      UserError: an unknown flag, a missing flag file, a value that is not a number. `Setting.check` checks ranges.
    """
    with _READING:
        return _read(arguments, tuple(settings))


def _read(arguments: Sequence[str], settings: tuple[Setting, ...]) -> dict[str, Any]:
    with _errors_in_one_line([setting.flag for setting in settings]):
        values = _defined(settings)
        values.unparse_flags()
        values.__dict__["files_read"] = 0  # setting an attribute sets a flag
        unexpected = values(["fedjax-mr", *arguments])[1:]
    if unexpected:
        raise UserError(
            f"unexpected argument {unexpected[0]!r}: every setting is a flag, --name=value (--help=all lists them)"
        )
    read = {name: values[name].value for name in values}
    return {name: list(value) if isinstance(value, list) else value for name, value in read.items()}


def values_of_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """All values of one repeated flag on the command line and in its flag files, read before the other flags exist.

    Raises:
      UserError: a missing flag file, or the flag has no value.
    """
    values = _FlagValues()
    parser: Any = _Parser(str, optional=True, repeated=True)
    values.set_gnu_getopt()  # read on after the value of an unknown flag
    flags.DEFINE_multi(parser, flags.ArgumentSerializer(), flag, [], "", flag_values=values)
    with _errors_in_one_line():
        values(["fedjax-mr", *arguments], known_only=True)
    return list(_after_none(values[flag].value or []))


@contextlib.contextmanager
def _errors_in_one_line(known: Collection[str] = ()) -> Iterator[None]:
    """Raise the errors of absl as a `UserError`. ``known``: the names of all flags."""
    try:
        yield
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag(error.flagname, known) from None
    except flags.CantOpenFlagFileError as error:
        raise UserError(f"cannot read the flag file: {str(error).rpartition('] ')[2]}") from None
    except (flags.Error, ValueError) as error:
        raise UserError(" ".join(str(error).split())) from None


class _FlagValues(flags.FlagValues):
    """absl's flags, with a limit on nested flag files; exp/NAME.flags is found from every folder."""

    def _get_flag_file_lines(self, filename, parsed_file_stack=None):
        if not filename:
            raise UserError("--flagfile= is empty: it takes the path of a file")
        if len(parsed_file_stack or ()) >= DEEPEST_FLAG_FILES:
            raise UserError(f"flag files include each other more than {DEEPEST_FLAG_FILES} deep, at {filename}")
        self.__dict__["files_read"] = self.__dict__.get("files_read", 0) + 1  # as in `parse`
        if self.__dict__["files_read"] > MOST_FLAG_FILES:
            raise UserError(f"flag files include each other more than {MOST_FLAG_FILES:,} times, at {filename}")
        included = PACKAGE / filename
        if included.suffix == ".flags" and os.path.isfile(included) and not os.path.exists(filename):
            filename = str(included)
        try:
            return super()._get_flag_file_lines(filename, parsed_file_stack)
        except UnicodeDecodeError:
            raise UserError(f"cannot read the flag file {filename}: it is not UTF-8 text") from None


class _TrueOrFalse(flags.BooleanParser):
    """Reads a flag that is true or false."""

    def parse(self, argument: Any) -> bool:
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError("neither true nor false") from None


class _Parser(flags.ArgumentParser):
    """Reads one value of a flag; ``none`` is valid if the field may be None or is a list."""

    def __init__(self, kind: type, optional: bool, repeated: bool):
        super().__init__()
        self.kind, self.optional, self.repeated = kind, optional or repeated, repeated

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str) or (self.kind is str and not self.optional):
            return argument
        if self.repeated and not argument.strip():
            raise ValueError("the value is empty; 'none' clears the list")
        if self.optional and argument.strip().lower() in ("none", ""):
            return None
        try:
            return self.kind(argument)
        except ValueError:
            raise ValueError({int: "not a whole number", float: "not a number"}[self.kind]) from None


@functools.lru_cache(maxsize=8)  # a sweep reads the flags of hundreds of runs
def _defined(settings: tuple[Setting, ...]) -> _FlagValues:
    """The flags of some settings. Every command line is read into the same ones."""
    values = _FlagValues()
    serializer: Any = flags.ArgumentSerializer()
    for setting in settings:
        name, default, text = setting.flag, setting.default, setting.info.help
        parser: Any = _Parser(setting.kind, setting.optional, setting.repeated)
        if setting.kind is bool:
            flags.DEFINE_boolean(name, default, text, flag_values=values)
            values[name].parser = _TrueOrFalse()
        elif setting.repeated:
            flags.DEFINE_multi(parser, serializer, name, list(default), text, flag_values=values)
        else:
            flags.DEFINE(parser, name, default, text, flag_values=values, serializer=serializer)
    return values


def _unknown_flag(name: str, known: Collection[str]) -> UserError:
    renamed = [flag for flag in OTHER_NAMES.get(name, ()) if flag in known]
    hint = did_you_mean(renamed[0] if renamed else name, renamed or known, form="--{}")
    return UserError(f"unknown flag --{name}{hint} (--help=all lists all flags)")


# --- Help ------------------------------------------------------------------------------------------------------------


def help_width(width: int | None = None) -> int:
    """Width of a help text in characters. Default: that of the terminal, within bounds."""
    return max(40, min(width or shutil.get_terminal_size().columns, 110))


def help_of(owner: type, width: int | None = None) -> str:
    """The help text of the flags of one dataclass."""
    return "\n".join(line for setting in settings_of(owner) for line in setting.help(help_width(width)))
