"""A compiled function that is traced exactly once."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax


class Program:
    """A function compiled at its first call; a second trace is impossible: arguments of other shapes are refused.

    Attributes:
      traces: how often the function was traced.
      compile_seconds: time spent in tracing and compiling.
      compiled: the compiled program, for its HLO text; None before the first call.
    """

    def __init__(self, function: Callable, *, donate: tuple[int, ...] = (), out: Any = None) -> None:
        """Wrap ``function``.

        Args:
          function: what to compile.
          donate: the numbers of the arguments whose buffers are consumed by a call.
          out: the shardings of the results, as a prefix of their tree; None leaves them to the compiler.
        """
        self.traces = 0
        self.compile_seconds = 0.0
        self.compiled: Any = None
        self._function = function
        self._donate = donate
        self._out = out

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        if self.compiled is None:
            started = time.perf_counter()
            program = jax.jit(self._traced, donate_argnums=self._donate, out_shardings=self._out)
            with warnings.catch_warnings():  # what is sent need not be of the sizes of what comes back
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
                self.compiled = program.lower(*args).compile()
            self.compile_seconds = time.perf_counter() - started
        return self.compiled(*args)

    def _traced(self, *args: Any) -> Any:
        self.traces += 1
        return self._function(*args)
