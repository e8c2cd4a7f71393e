"""The platform that programs are traced for: the machine's own, or that of a machine that is only described.

Which formulation of a convolution or a maximum is fast depends on it. JAX's own ``jax.default_backend`` names the
platform of the process, which may be another one where programs are compiled ahead for a described machine.

Where the compilers for accelerators are installed but no accelerator is there, JAX looks for one all the same and
prints a screen of errors; `skip_absent_accelerators` keeps it from looking.
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
# Files in /dev of NVIDIA's GPUs (also those of a Jetson and of WSL) and of TPUs.
ACCELERATORS = ("nvidia*", "nvhost*", "nvgpu*", "nvmap", "dxg", "accel*", "vfio/[0-9]*")

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)


def current() -> str:
    """Return the platform of what is being traced: ``cpu``, ``gpu`` or ``tpu``."""
    return _target.get() or jax.default_backend()


@contextlib.contextmanager
def tracing_for(platform: str | None) -> Iterator[None]:
    """Trace for a platform in the body; None is the process's own."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)


def skip_absent_accelerators(dev: Path = Path("/dev")) -> None:
    """Choose the CPU before JAX starts if compilers for accelerators are installed, but no accelerator is there.

    A platform that the user has chosen stays, and so does everything where a compiler is installed that is not in
    `COMPILERS`: nobody here knows what its devices look like.

    Args:
      dev: the folder of the devices' files.
    """
    if jax.config.values["jax_platforms"]:
        return
    compilers = _compilers()
    if compilers and compilers <= COMPILERS and not any(any(dev.glob(name)) for name in ACCELERATORS):
        jax.config.update("jax_platforms", "cpu")


def _compilers() -> set[str]:
    """Return the names of JAX's installed plugins, found as JAX finds them."""
    found = {entry.value.rpartition(".")[2] for entry in importlib.metadata.entry_points(group="jax_plugins")}
    if (namespace := importlib.util.find_spec("jax_plugins")) is not None:
        found |= {module.name for module in pkgutil.iter_modules(namespace.submodule_search_locations)}
    return found | ({"libtpu"} if importlib.util.find_spec("libtpu") else set())
