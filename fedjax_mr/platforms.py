"""The platform that programs are traced for: the machine's own, or that of a machine that is only described.

Which formulation of a convolution or a maximum is fast depends on it. JAX's own ``jax.default_backend`` names the
platform of the process, which may be another one where programs are compiled ahead for a described machine.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

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
