"""Names of samples and networks that were given in Python: ``given:NAME:HASH``, kept where a registered name stands."""

import collections
import re
from collections.abc import Iterable
from typing import Any

from fedjax_mr.errors import UserError

PREFIX = "given:"
HOW = {"dataset": "these samples were", "model": "this network was"}


def full_name(name: str, digest: str = "") -> str:
    """Return the recorded name of something with a name and a digest of its content ("": not known yet)."""
    simple = re.sub(r"[^\w.+-]+", "_", name).strip("_") or "unnamed"
    return f"{PREFIX}{simple}:{digest[:8]}".removesuffix(":")


def is_given(name: str) -> bool:
    """Return whether a recorded name (of several networks: one of them) stands for something given in Python."""
    return any(each.startswith(PREFIX) for each in name.split(","))


def shown(name: str) -> str:
    """Return a name as people read it: NAME of ``given:NAME:HASH``, any other as it is."""
    return ",".join(each.split(":")[1] if each.startswith(PREFIX) else each for each in name.split(","))


def digests(name: str) -> list[str]:
    """Return the digests of ``given:NAME:HASH``, of several networks each one's."""
    return [each.rpartition(":")[2] for each in name.split(",")]


def short_names(names: Iterable[str]) -> dict[str, str]:
    """Return each recorded name as people read it, with its hash where several would read the same."""
    count = collections.Counter(map(shown, dict.fromkeys(names)))
    return {name: shown(name) if count[shown(name)] == 1 else name.replace(PREFIX, "") for name in names}


def needed(config: Any) -> str:
    """Return the arguments of `run` that a configuration asks for, such as ``dataset=..., model=...``; "" if none."""
    return ", ".join(f"{flag}=..." for flag in HOW if is_given(getattr(config, flag)))


def missing(flag: str, name: str) -> UserError:
    """Return the error of a run that lacks what was given in Python for a flag, ``dataset`` or ``model``."""
    return UserError(
        f"--{flag}={name}: {HOW[flag]} given in Python and cannot be found by name: start such a run by "
        f"fmr.run(config, {flag}=...), go on with it by fmr.load(FOLDER).resume({flag}=...)"
    )


def other(flag: str, name: str, recorded: str) -> UserError:
    """Return the error for something else than what the configuration has recorded."""
    return UserError(
        f"{flag}= is {name.removeprefix(PREFIX)}, but the configuration is of {recorded.removeprefix(PREFIX)}: give "
        f"the same, or a configuration without it"
    )
