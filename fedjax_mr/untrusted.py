"""Files that another person may have written: read within bounds, and JSON checked by a schema.

A schema is one of these:

- a type: ``str``, ``bool``, ``dict``, ``list``, ``int`` (of 64 bits, no bool), ``float`` (any finite number) or
  ``object`` (anything);
- a compiled pattern: a text that matches as a whole;
- ``None``: null;
- a tuple of schemas: a value that fits one of them;
- ``[schema]``: a list whose items fit;
- ``{"name": schema, ...}``: an object with these entries and any others. A name that ends with "?" may be missing;
- ``{str: schema}``, ``{pattern: schema}`` or ``{int: schema}``: an object with any such names. The names of the last
  one become whole numbers.
"""

import errno
import gzip
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedjax_mr.errors import UserError

MAX_LINE = 1 << 26
"""Bytes of one line. The longest text that a tokenizer cuts to 16,384 tokens has far fewer than 64 MiB."""
MAX_INFLATED = 1 << 33
"""Bytes of a decompressed file. Texts are Python objects in memory, of about this many bytes, so larger files are in
several parts or in the format of Hugging Face's ``datasets``, which is read from the disk."""
_BLOCK = 1 << 20
_WORDS = {
    str: "a text", int: "a whole number", float: "a finite number", bool: "true or false", dict: "an object",
    list: "a list", None: "null",
}  # fmt: skip


def read_text(path: Path | str) -> str:
    """Read the text of a regular file. Other kinds are refused, because reading a named pipe could wait forever.

    Raises:
      OSError: there is no such file, or it is not a regular file.
      ValueError: the text is not UTF-8.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return path.read_text(encoding="utf-8")


def parse_json(text: str, schema: Any = object) -> Any:
    """Parse a JSON text and check it by a schema.

    Raises:
      ValueError: the text is not JSON, is nested too deeply for Python, or does not fit the schema.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _checked(value, schema, "")


def read_json(path: Path | str, schema: Any, remedy: str = "") -> Any:
    """Read a file of JSON and check it by a schema.

    Raises:
      FileNotFoundError: there is no such file.
      UserError: the file cannot be read, is not JSON, or does not fit the schema. ``remedy`` ends the message.
    """
    try:
        return parse_json(read_text(path), schema)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged ({reason})" + (f": {remedy}" if remedy else "")) from None


def _checked(value: Any, schema: Any, place: str) -> Any:
    """Return a value that fits a schema, with whole numbers as names where the schema has them.

    Raises:
      ValueError: it does not fit. The message names the place in the value.
    """
    match schema:
        case dict() if isinstance(value, dict):
            (first, inner), *_ = schema.items()
            if not isinstance(first, str):
                checked = {
                    _name(name, first, place): _checked(each, inner, _at(place, name)) for name, each in value.items()
                }
                if len(checked) < len(value):
                    raise ValueError(f"two names in {place or 'it'} are the same number, such as 1 and 01")
                return checked
            checked = dict(value)
            for name, inner in schema.items():
                plain = name.removesuffix("?")
                if plain in value:
                    checked[plain] = _checked(value[plain], inner, _at(place, plain))
                elif plain == name:
                    raise ValueError(f"{_at(place, name)} is missing")
            return checked
        case [inner] if isinstance(schema, list) and isinstance(value, list):
            return [_checked(each, inner, _at(place, str(number))) for number, each in enumerate(value)]
        case tuple():
            for each in schema:
                try:
                    return _checked(value, each, place)
                except ValueError:
                    continue
        case re.Pattern():
            if isinstance(value, str) and schema.fullmatch(value):
                return value
        case _ if _is_kind(value, schema):
            return value
    raise ValueError(f"{place or 'it'} is {_shown(value)}, not {_described(schema)}")


def _is_kind(value: Any, kind: Any) -> bool:
    if kind is object:
        return True
    if kind is None:
        return value is None
    if kind is int:
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e308 and math.isfinite(value)
    return isinstance(kind, type) and type(value) is kind


def _name(name: str, kind: Any, place: str) -> Any:
    if kind is not int:
        return _checked(name, kind, f"a name in {place or 'it'}")
    if re.fullmatch(r"-?\d{1,18}", name, re.ASCII):
        return int(name)
    raise ValueError(f"a name in {place or 'it'} is {_shown(name)}, not a whole number")


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _shown(value: Any) -> str:
    """A value of any size as a few printable characters."""
    text = ascii(value) if isinstance(value, str | int | float | bool | None) else _WORDS.get(type(value), "something")
    return text if len(text) <= 40 else f"{text[:40]}..."


def _described(schema: Any) -> str:
    match schema:
        case tuple():
            return " or ".join(map(_described, schema))
        case re.Pattern():
            return "of the expected form"
        case dict() | list():
            return _WORDS[type(schema)]
    return _WORDS.get(schema, "of the expected kind")


def lines(path: Path | str, *, max_line: int = MAX_LINE, max_total: int = MAX_INFLATED) -> Iterator[str]:
    """Yield the lines of a text file, decompressed if its name ends with ``.gz``, without their ends.

    A small compressed file can have a content of any size, so both bounds apply to the decompressed content. Lines end
    with a line feed alone: a text may contain other characters that `str.splitlines` takes for ends, such as U+2028.

    Raises:
      OSError, EOFError, zlib.error: the file cannot be read or decompressed.
      ValueError: the text is not UTF-8, or a bound is exceeded.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    number = total = 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while line := file.readline(max_line + 1):
            number, total = number + 1, total + len(line)
            if len(line) > max_line:
                raise ValueError(f"line {number} has more than {max_line:,} bytes")
            if total > max_total:
                raise ValueError(f"it has more than {max_total:,} bytes")
            yield line.decode("utf-8").removesuffix("\n")
