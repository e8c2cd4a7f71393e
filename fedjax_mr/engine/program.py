"""Compiled functions, each traced exactly once, those kept for later runs of this process, and the time they take."""

import contextlib
import ctypes
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from fedjax_mr.models import platforms

MOST_KEPT = 4  # sets of programs, some 40 MB each for a small network


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
        function: Callable[..., Any],
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
        self._function: Callable[..., Any] | None = function
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
        self._function = None  # with it go the data and the network that it knew
        if self._only_compiled:
            described = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            self._results = jax.tree.map(described, lowered.out_info, compiled.output_shardings)
        return compiled

    def _traced(self, *args: Any) -> Any:
        self.traces += 1
        assert self._function is not None
        return self._function(*args)


def memory_needed(program: Program) -> int:
    """Return the bytes that a compiled program takes on a device: arguments, results and temporaries."""
    memory = program.compiled.memory_analysis()
    both = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return both + memory.temp_size_in_bytes


_kept: dict[Hashable, dict[Hashable, Program]] = {}  # the set that was asked for last comes last


def _kept_under(key: Hashable) -> dict[Hashable, Program]:
    """The set of programs of a key; beyond `MOST_KEPT` sets, the least recently used one is dropped."""
    programs = _kept.pop(key, {})
    _kept[key] = programs
    while len(_kept) > MOST_KEPT:
        del _kept[next(iter(_kept))]
    return programs


def forget() -> None:
    """Let go of all programs that are kept for later runs."""
    _kept.clear()


def give_back_memory() -> None:
    """Give memory that is free inside this process back to the system, where the C library can do so (glibc).

    A compilation takes hundreds of megabytes for a moment. Without this, a process that runs many experiments grows by
    about 10 MB with each, although everything has been freed.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _kind_of(arguments: Any) -> Hashable:
    """Return the structure of a tree of arrays, static parts included, shapes and dtypes: what a trace sees of it."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


class Programs(dict[str, Program]):
    """Programs by name, each made at its first call, or taken from those that this process keeps.

    Attributes:
      compile_seconds: the time that calls have spent here in tracing and compiling.
    """

    def __init__(
        self,
        *,
        platform: str | None = None,
        only_compiled: bool = False,
        key: Hashable = None,
        **programs: Program,
    ) -> None:
        """Begin with some programs.

        Args:
          platform: of every `Program` made later.
          only_compiled: likewise.
          key: everything that the programs close over, by value: sets of equal keys share the programs of arguments
            of the same kind. The last `MOST_KEPT` keys stay. None shares nothing.
          programs: by name.
        """
        super().__init__(programs)
        self.compile_seconds = 0.0
        self._options: dict[str, Any] = {"platform": platform, "only_compiled": only_compiled}
        settings = tuple((name, repr(value)) for name, value in jax.config.values.items())  # precision and the like
        self._kept = {} if key is None else _kept_under((key, platform, only_compiled, settings))

    def call(self, name: str, function: Callable, *args: Any, donate: tuple[int, ...] = (), out: Any = None) -> Any:
        """Run the program of a name; ``function``, ``donate`` and ``out`` matter at its first call (see `Program`)."""
        if name in self:
            return self._counted(self[name], args)
        kind = name, _kind_of(args)
        self[name] = self._kept.get(kind) or Program(function, donate=donate, out=out, **self._options)
        result = self._counted(self[name], args)
        self._kept[kind] = self[name]  # not before: what could not be compiled is nothing to keep
        return result

    def _counted(self, program: Program, args: tuple) -> Any:
        before = program.compile_seconds
        try:
            return program(*args)
        finally:
            self.compile_seconds += program.compile_seconds - before


class Stopwatch:
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
