"""The platform that programs are traced for: this machine's, or that of an absent machine.

The fastest formulation of a convolution or a maximum depends on the platform. ``jax.default_backend`` names the
platform of the process, which differs if programs are compiled ahead of time for an absent machine.

If compilers for accelerators are installed without an accelerator, JAX searches for one and prints many errors;
`skip_absent_accelerators` prevents the search.
"""

import contextlib
import contextvars
import importlib.metadata
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import jax

COMPILERS = {"xla_cuda12", "xla_cuda13", "libtpu"}
# Files in /dev of NVIDIA GPUs (including Jetson and WSL) and of TPUs.
ACCELERATORS = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "accel*", "vfio/[0-9]*")

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def current() -> str:
    """The platform of the program that is being traced: ``cpu``, ``gpu`` or ``tpu``."""
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def tracing_for(platform: str | None) -> Iterator[None]:
    """Trace for a platform inside the ``with`` block. None means the platform of the process."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def skip_absent_accelerators(dev: Path = Path("/dev")) -> None:
    """Choose the CPU before JAX starts if compilers for accelerators are installed, but no accelerator is present.

    The function changes nothing if the user has chosen a platform, or if a compiler is installed that is not in
    `COMPILERS`, because the names of its device files are unknown.

    Args:
      dev: the folder of device files.
    """
    if jax.config.values["jax_platforms"]:
        return
    compilers = _compilers()
    if compilers and compilers <= COMPILERS and not any(any(dev.glob(name)) for name in ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")


def _compilers() -> set[str]:
    """Names of the installed JAX plugins, searched in the places where JAX searches."""
    names = {entry.value.rpartition(".")[2] for entry in importlib.metadata.entry_points(group="jax_plugins")}
    if (namespace := importlib.util.find_spec("jax_plugins")) is not None:
        names |= {module.name for module in pkgutil.iter_modules(namespace.submodule_search_locations)}
    return names | ({"libtpu"} if importlib.util.find_spec("libtpu") else set())
