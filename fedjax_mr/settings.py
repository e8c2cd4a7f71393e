"""Fields of configuration dataclasses: one declaration makes the default, the flag, its help and its check."""

import dataclasses
from collections.abc import Sequence
from typing import Any

KEY = "fedjax_mr"


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of a field beyond its default.

    Attributes:
      help: one sentence; for hyper-parameters it names the paper's symbol.
      group: the heading under which ``--help`` lists the flag ("" for a strategy's own fields).
      unit: the unit of the value, such as "samples" or "rounds".
      low, high: the least and the largest value allowed; ``open_low`` excludes ``low`` itself.
      choices: the names allowed.
      source: where the default comes from.
      affects_results: whether the field can change the numbers of a run (a run folder, say, cannot).
    """

    help: str
    group: str = ""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    open_low: bool = False
    choices: Sequence[str] | None = None
    source: str = ""
    affects_results: bool = True


def field(default: Any, help: str, **info: Any) -> Any:
    """Return a dataclass field with its `Info`; keyword arguments are those of `Info`."""
    return dataclasses.field(default=default, metadata={KEY: Info(help, **info)})


def info(field: dataclasses.Field) -> Info | None:
    """Return the `Info` of a dataclass field, or None if it was declared without one."""
    return field.metadata.get(KEY)
