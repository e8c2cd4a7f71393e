"""The pages of ``--help``: a short one, all flags, and one for each method, dataset, network, partition and flag."""

import difflib
import functools
import inspect
import itertools
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from fedjax_mr import __version__, models
from fedjax_mr.channel import LINKS
from fedjax_mr.config import config as configuration
from fedjax_mr.config import settings
from fedjax_mr.config.config import COMMAND, GROUPS, ROWS, Config
from fedjax_mr.config.settings import Setting
from fedjax_mr.data import SOURCES
from fedjax_mr.data.partition import PARTITIONS
from fedjax_mr.data.sources.text import TextLength
from fedjax_mr.data.sources.tfds import IMAGE_SETS
from fedjax_mr.errors import UserError
from fedjax_mr.models import MODELS
from fedjax_mr.models.base import describe
from fedjax_mr.strategies import STRATEGIES, by_group

COMMANDS = {
    "main": "one run",
    "sweep": "many runs: methods x settings x seeds",
    "tune": "the same search for every method, chosen on validation samples",
    "whatif": "what each client contributes, from federations without it",
    "analysis": "tables and pictures of runs",
    "data": "show a partition, or prepare a dataset",
    "models": "the table of all networks",
    "export": "the trained network of a run, for Flax and orbax alone",
    "deploy": "a federation of real clients, through Flower",
    "testing": "the contract that every method must pass",
}


def version() -> str:
    """The line of ``--version``."""
    return f"fedjax_mr {__version__} (JAX {jax.__version__}, Python {platform.python_version()})"


def help_topic(arguments: Sequence[str]) -> str | None:
    """The topic of ``--help`` on the command line: "" for the short page, None without ``--help``."""
    for position, argument in enumerate(arguments):
        name, _, topic = argument.partition("=")
        if name in ("--help", "-help", "-h"):
            following = arguments[position + 1] if position + 1 < len(arguments) else "-"
            return topic or ("" if following.startswith("-") else following)
    return None


def page(topic: str, width: int | None = None) -> str:
    """The help on a topic: "" (the short page), "all", or the name of a strategy, dataset, network, partition or flag.

    Raises:
      UserError: the topic is unknown; the message has the nearest names.
    """
    if topic in ("", "all"):
        return short_page(width) if not topic else all_flags(width)
    topic = topic.lstrip("-")
    kinds: dict[Callable[[str, int], str], Collection[str]] = {
        _strategy: STRATEGIES, _data_set: SOURCES, _network: MODELS,
        **{functools.partial(_row, flag): rows for flag, rows in ROWS.items() if flag != "dataset"},
        _flag: _flags(),
    }  # fmt: skip
    pages = [write(topic, settings.help_width(width)) for write, names in kinds.items() if topic in names]
    if not pages:
        known = [*itertools.chain(*kinds.values())]
        nearest = difflib.get_close_matches(topic, known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        raise UserError(f"no help on {topic!r}{hint} (--help lists the topics)")
    return "\n\n".join(pages)


# --- All flags -------------------------------------------------------------------------------------------------------


def short_page(width: int | None = None) -> str:
    """The commands, the flags that most runs need with their defaults, and the topics of ``--help``."""
    width = settings.help_width(width)
    lines = [f"usage: {COMMAND} [--flag=value ...] [--flagfile=FILE ...]", ""]
    lines += textwrap.wrap("Train a federation in one XLA program. Without flags: FedMR on the embedded digits.", width)
    lines += ["", "Commands (python -m fedjax_mr.NAME --help)"]
    lines += [f"  {name.ljust(10)}{line}" for name, line in COMMANDS.items()]
    for group in GROUPS:
        lines += ["", group, *(_one_line(setting, width) for setting in _of_group(group) if setting.info.short)]
    lines += [
        "",
        "More",
        "  --help=all          every flag: unit, range, default and its source",
        "  --help=NAME         one strategy, dataset, network, partition, link or flag:",
        *(
            line
            for group, names in by_group().items()
            for line in _listed(f"strategies, {group or 'imported'}", names, width)
        ),
        *_listed("datasets", SOURCES, width),
        *_listed("networks", MODELS, width),
        *_listed("partitions", PARTITIONS, width),
        *_listed("links", LINKS, width),
        "  --version           the versions of this package, JAX and Python",
    ]
    return "\n".join(lines)


def _one_line(setting: Setting, width: int) -> str:
    default = setting.default
    if setting.kind is bool:
        default = "on" if default else "off"
    ending = "" if default in (None, ()) else f" (default {default})"
    first, _, _ = setting.info.help.partition(". ")
    text = textwrap.shorten(first, max(20, width - 21 - len(ending)), placeholder=" ...")
    return f"  {f'--{setting.flag}'.ljust(19)}{text}{ending}"


def _listed(kind: str, names: Iterable[str], width: int) -> list[str]:
    indent = " " * 22
    return textwrap.wrap(
        f"{kind}: {', '.join(names)}", width, initial_indent=indent, subsequent_indent=indent + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def all_flags(width: int | None = None) -> str:
    """Every flag by group, with unit, range, default and its source."""
    width = settings.help_width(width)
    groups = {name: _of_group(name) for name in GROUPS}
    for name, row in STRATEGIES.items():
        if hyper := list(settings.settings_of(row.hyper, f"{name}_")):
            groups[f"Strategy {name} ({row.paper})"] = hyper

    intro = (
        "Train a federation in one XLA program. Without flags: FedMR on the embedded digits. Flags are read from left "
        "to right and the last value wins. --flagfile=FILE inserts the flags of a file. A switch is set by --name and "
        "cleared by --noname. The value 'none' clears an optional value or a list."
    )
    usage = f"usage: {COMMAND} [--help[=NAME]] [--flag=value ...] [--flagfile=FILE ...]"
    lines = [*textwrap.wrap(usage, width, subsequent_indent="  "), "", *textwrap.wrap(intro, width)]
    for title, group in groups.items():
        lines += ["", title, *(line for setting in group for line in setting.help(width))]
    return "\n".join(lines)


def _of_group(group: str) -> list[Setting]:
    return [setting for setting in settings.settings_of(Config) if setting.info.group == group]


def _flags() -> dict[str, Setting]:
    """All flags by name, those of users' rows among them."""
    return {setting.flag: setting for setting in configuration.all_settings()}


# --- One thing -------------------------------------------------------------------------------------------------------


def _strategy(name: str, width: int) -> str:
    row = STRATEGIES[name]
    facts = {
        "paper": row.paper,
        "group": row.group or "imported methods",
        "networks": "clients may have different networks" if row.several else "the same network for all clients",
        "public data": "used (--public_share)" if row.public else "not used",
        "file": _file(row.build),
    }
    return _page(f"--strategy={name}", _sentence(sys.modules.get(_module(row.build))), facts, width, _flags_of(name))


def _data_set(name: str, width: int) -> str:
    row = SOURCES[name]
    facts = {"file": _file(row.load)}
    if name in (*IMAGE_SETS, "sentiment"):
        facts["to prepare it"] = f"python -m fedjax_mr.data prepare {name} --data_dir=FOLDER"
    flags = ["data_dir", "offline", *_flags_of_row(name, row.settings)]
    flags += ["pretrained"] if row.settings is TextLength else []
    flags += ["min_samples_per_client"] if _module(row.load).endswith(".leaf") else []
    return _page(f"--dataset={name}", _sentence(sys.modules.get(_module(row.load))), facts, width, flags)


def _network(name: str, width: int) -> str:
    entry = MODELS[name]
    model = models.as_in_source(name)
    facts = {
        "source": entry.source,
        "samples there": f"{describe(entry.input_shape, entry.input_dtype)}, {entry.num_classes} classes",
        "parameters": f"{model.num_parameters():,}",
        "file": _file(entry.network),
    }
    flags = ["init", "norm", "projection"]
    return _page(f"--model={name}", _sentence(_plain(entry.network)), facts, width, flags)


def _row(flag: str, name: str, width: int) -> str:
    row, rows = ROWS[flag][name], ROWS[flag]
    title = f"link {name}" if flag == "links" and rows.is_ours(name) else f"--{flag}={name}"
    sentence = _sentence(row[0]) or _sentence(row.settings)
    flags = [*_flags_of_row(name, row.settings), *(("clients", "partition_seed") if flag == "partition" else ())]
    return _page(title, sentence, {"file": _file(row[0])}, width, flags)


def _flags_of_row(name: str, owner: type | None) -> list[str]:
    """The flags of a row; those of a user's row begin with its name."""
    prefix = "" if owner is None or issubclass(Config, owner) else f"{name}_"
    return [setting.flag for setting in settings.settings_of(owner, prefix)]


def _flag(name: str, width: int) -> str:
    return "\n".join(_flags()[name].help(width))


def _flags_of(strategy: str) -> list[str]:
    return [setting.flag for setting in settings.settings_of(STRATEGIES[strategy].hyper, f"{strategy}_")]


def _page(title: str, sentence: str, facts: dict[str, str], width: int, flags: Iterable[str]) -> str:
    lines = [title, *textwrap.wrap(sentence, width), ""]
    indent = " " * 16
    for name, text in facts.items():
        lines += textwrap.wrap(f"{name.ljust(16)}{text}", width, subsequent_indent=indent, break_long_words=False)
    entries = [line for flag in flags for line in _flags()[flag].help(width)]
    return "\n".join([*lines, "", *(entries or ["  no flags of its own"])])


def _plain(function: Any) -> Any:
    """The function or class behind partial applications."""
    return _plain(function.func) if isinstance(function, functools.partial) else function


def _module(function: Any) -> str:
    return getattr(_plain(function), "__module__", None) or ""


def _sentence(thing: Any) -> str:
    """The first paragraph of a docstring as one line."""
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    return re.sub(r"`+", "", " ".join(paragraph.split()))


def _file(function: Any) -> str:
    return str(getattr(sys.modules.get(_module(function)), "__file__", None) or "in this program")
