"""Compiled functions, each traced exactly once, and the time that they take."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fedjax_mr import platforms


class Program:
    """A function compiled at its first call; a second trace is impossible: arguments of other shapes are refused.

    Where a program is only compiled, for a machine that is not here, a call takes shapes with shardings
    (``jax.ShapeDtypeStruct``) in place of arrays and returns such shapes.

    Attributes:
      traces: how often the function was traced.
      trace_seconds: time spent in tracing and lowering.
      compile_seconds: time spent in tracing and compiling.
      compiled: the compiled program, for its HLO text; None before the first call.
    """

    def __init__(
        self,
        function: Callable,
        *,
        donate: tuple[int, ...] = (),
        out: Any = None,
        platform: str | None = None,
        only_compiled: bool = False,
    ) -> None:
        """Wrap ``function``.

        Args:
          function: what to compile.
          donate: the numbers of the arguments whose buffers are consumed by a call.
          out: the shardings of the results, as a prefix of their tree; None leaves them to the compiler.
          platform: what it is traced for; None is the process's own.
          only_compiled: calls compile and run nothing.
        """
        self.traces = 0
        self.trace_seconds = 0.0
        self.compile_seconds = 0.0
        self.compiled: Any = None
        self._function = function
        self._donate = donate
        self._out = out
        self._platform = platform
        self._only_compiled = only_compiled
        self._results: Any = None

    def __call__(self, *args: Any) -> Any:
        """Run the function."""
        if self.compiled is None:
            self.compiled = self._compile(args)
        return self._results if self._only_compiled else self.compiled(*args)

    def _compile(self, args: tuple) -> Any:
        started = time.perf_counter()
        program = jax.jit(self._traced, donate_argnums=self._donate, out_shardings=self._out)
        with warnings.catch_warnings():  # what is sent need not be of the sizes of what comes back
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            with platforms.tracing_for(self._platform):
                lowered = program.lower(*args)
            self.trace_seconds = time.perf_counter() - started
            compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - started
        if self._only_compiled:
            described = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            self._results = jax.tree.map(described, lowered.out_info, compiled.output_shardings)
        return compiled

    def _traced(self, *args: Any) -> Any:
        self.traces += 1
        return self._function(*args)


def memory_needed(program: Program) -> int:
    """Return the bytes that a compiled program takes on a device: arguments, results and temporaries."""
    memory = program.compiled.memory_analysis()
    both = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return both + memory.temp_size_in_bytes


class Programs(dict[str, Program]):
    """Programs by name, each made at its first call."""

    def __init__(self, *, platform: str | None = None, only_compiled: bool = False, **programs: Program) -> None:
        """Begin with some programs; the other arguments are those of every `Program` made later."""
        super().__init__(programs)
        self._options: dict[str, Any] = {"platform": platform, "only_compiled": only_compiled}

    def call(self, name: str, function: Callable, *args: Any, donate: tuple[int, ...] = (), out: Any = None) -> Any:
        """Run the program of a name; ``function``, ``donate`` and ``out`` matter at its first call (see `Program`)."""
        if name not in self:
            self[name] = Program(function, donate=donate, out=out, **self._options)
        return self[name](*args)

    @property
    def compile_seconds(self) -> float:
        """The time spent in tracing and compiling."""
        return sum(program.compile_seconds for program in self.values())


class Clock:
    """The seconds of rounds on the clients' side and on the server's, without compilation.

    Attributes:
      rounds: how many were timed.
    """

    def __init__(self, programs: Programs, *, waits: bool) -> None:
        """Time nothing yet.

        Args:
          programs: whose compilation is not counted.
          waits: wait for the results of each side; without this the seconds mean nothing and are not reported.
        """
        self.rounds = 0
        self._programs = programs
        self._waits = waits
        self._seconds = {"clients": 0.0, "server": 0.0}

    @contextlib.contextmanager
    def side(self, side: str) -> Iterator[list[Any]]:
        """Add the time of the body to a side; the body lists its results, which are waited for."""
        results: list[Any] = []
        compiled, started = self._programs.compile_seconds, time.perf_counter()
        yield results
        if self._waits:
            jax.block_until_ready(results)
        self._seconds[side] += time.perf_counter() - started - (self._programs.compile_seconds - compiled)

    def seconds_per_round(self) -> dict[str, float]:
        """Return ``clients_seconds_per_round`` and ``server_seconds_per_round``; nothing if no round was timed."""
        if not (self._waits and self.rounds):
            return {}
        return {f"{side}_seconds_per_round": total / self.rounds for side, total in self._seconds.items()}
