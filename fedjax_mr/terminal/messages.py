"""Messages of the library, which name arguments, for the users of a command, who know flags.

A message of the library writes an argument as ``cohort=8``, or ``cohort=`` if no value matters, and a strategy's own
hyper-parameter as ``hyper.mu=0.1`` or ``hyper.mu``. These are also the fields of `Config`, so that Python callers of
`run` get such a message unchanged. A command shows ``--cohort=8`` and ``--fedprox_mu=0.1``. Some arguments of the
channel's links have shorter names than their fields (`Info.argument`).
"""

import contextlib
import re
import shlex
from collections.abc import Iterator

from fedjax_mr.config.config import Config
from fedjax_mr.config.settings import settings_of
from fedjax_mr.errors import UserError
from fedjax_mr.strategies import STRATEGIES

_CALL = r"\w\([^()]*\)"  # Python, such as fmr.run(config, model=...), and no setting
_VALUE = r"'[^']*'|\([^()]*\)|[^\s,;:()]*[^\s,;:().]"
_ARGUMENT = re.compile(rf"{_CALL}|(?<![\w.:=/*-])(hyper\.)?([a-z]\w*)(=?)((?<==)(?:{_VALUE}))?")


@contextlib.contextmanager
def flags_in_errors(strategy: str = "") -> Iterator[None]:
    """Name flags in the message of a `UserError` that passes.

    Args:
      strategy: the method of the run. Default: unknown, and ``hyper.NAME`` stays.
    """
    try:
        yield
    except UserError as error:
        error.args = (with_flags(str(error), strategy),)
        raise


def with_flags(message: str, strategy: str) -> str:
    """The message with flags in the place of the arguments that are settings of a run."""
    row = STRATEGIES.get(strategy)
    common = {name: each for each in settings_of(Config) for name in (each.name, each.info.argument) if name}
    own = {setting.name: setting for setting in settings_of(row and row.hyper, f"{strategy}_")}

    def flag(match: re.Match[str]) -> str:
        hyper, name, equals, value = match.groups()
        setting = own.get(name) if hyper else common.get(name) if equals else None
        if setting is None:
            return match[0]
        if value is None:
            return f"--{setting.flag}"
        if setting.kind is bool:
            return f"--{'no' if value == 'False' else ''}{setting.flag}"
        values = value.strip("()").split(",") if setting.repeated else [value]
        values = [each.strip().strip("'") for each in values if each.strip()] or ["none"]
        return " ".join(f"--{setting.flag}={shlex.quote(each) if each else ''}" for each in values)

    return _ARGUMENT.sub(flag, message)
