"""Multi-model federated learning in one XLA program.

``Simulator("fedmr", "cnn_digits", federated, cohort=5)`` trains in a notebook, without folders and files.
``run(Config(strategy="fedmr"))`` records a run in a folder, as ``python -m fedjax_mr.main --strategy=fedmr`` does.
Your own method is a function ``build(hyper, problem) -> Strategy``, written from scratch or made from other methods
(`transforms`). A row in ``STRATEGIES`` gives it a name; rows in ``MODELS`` and ``SOURCES`` name networks and datasets.

The names are those of `api`, which is imported when one of them is first used. ``import fedjax_mr`` alone imports
nothing, not even JAX. So a command decides what Ctrl-C does before the imports that take seconds.
"""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedjax_mr.api import *  # noqa: F403

__version__ = "0.4.0"


def _is_for_a_command() -> bool:
    """Whether Python imports this package for ``python -m fedjax_mr.NAME`` or for the script ``fedjax-mr``."""
    words = [*sys.orig_argv, "-m", ""]
    module = words[words.index("-m") + 1]
    return Path(words[1]).stem == "fedjax-mr" or re.fullmatch(r"fedjax_mr\.\w+", module) is not None


if _is_for_a_command():  # before the imports that take seconds
    importlib.import_module("fedjax_mr.terminal.interrupts").begin()


def __getattr__(name: str) -> Any:
    """Import the module of this name, or `api` for one of its names, at the first use."""
    if not name.startswith("_") and importlib.util.find_spec(f"fedjax_mr.{name}"):
        return importlib.import_module(f"fedjax_mr.{name}")
    if name == "__all__" or (not name.startswith("_") and name in __dir__()):
        return getattr(importlib.import_module("fedjax_mr.api"), name)
    raise AttributeError(f"module 'fedjax_mr' has no attribute {name!r}")


def __dir__() -> list[str]:
    return importlib.import_module("fedjax_mr.api").__all__
