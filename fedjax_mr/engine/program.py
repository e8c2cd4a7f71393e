"""Compiled functions that are traced exactly once, their cache for later runs of this process, and their timing."""

import contextlib
import ctypes
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator
from platform import machine
from typing import Any

import jax

from fedjax_mr.engine.devices import refuse_settings
from fedjax_mr.errors import UserError
from fedjax_mr.models import platforms

MAX_KEPT = 4  # sets of programs, some 40 MB each for a small network


class Program:
    """A function that is compiled at its first call. Later calls with other shapes raise, so it is traced only once.

    With ``only_compiled`` (for a machine that is not present), a call takes and returns shapes with shardings
    (``jax.ShapeDtypeStruct``) in place of arrays.

    Attributes:
      traces: number of times that the function was traced.
      trace_seconds: seconds of tracing and lowering.
      compile_seconds: seconds of tracing and compilation.
      compiled: the compiled program, for example for its HLO text. None before the first call.
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
          function: the function to compile.
          donate: positions of the arguments whose buffers a call consumes.
          out: the shardings of the results, as a prefix of their tree. Default: chosen by the compiler.
          platform: the platform to trace for. Default: the platform of this process.
          only_compiled: whether calls compile without executing.
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
        """Run the function.

        Raises:
          UserError: as `refuse_settings`.
        """
        refuse_settings()
        if self.compiled is None:
            self.compiled = self._compile(args)
        return self._results if self._only_compiled else self.compiled(*args)

    def _compile(self, args: tuple) -> Any:
        started = time.perf_counter()
        program = jax.jit(self._traced, donate_argnums=self._donate, out_shardings=self._out)
        with warnings.catch_warnings():  # donated rows and results may have different sizes
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            with platforms.tracing_for(self._platform), numbers_are_arguments():
                lowered = program.lower(*args)
                self.trace_seconds = time.perf_counter() - started
                compiled = compile_lowered(lowered)
        self.compile_seconds = time.perf_counter() - started
        self._function = None  # frees the data and the network in its closure
        if self._only_compiled:
            described = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            self._results = jax.tree.map(described, lowered.out_info, compiled.output_shardings)
        return compiled

    def _traced(self, *args: Any) -> Any:
        self.traces += 1
        assert self._function is not None
        return self._function(*args)


@contextlib.contextmanager
def numbers_are_arguments() -> Iterator[None]:
    """Name the number if Python code of a strategy needs its value while a program is traced.

    Raises:
      UserError: the code decides by the number in Python, or passes it to a function of Python or NumPy.
    """
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        argument = re.search(r"value of the argument \S*?(?:\.build\S*|\.local)\.(\w+)\.\s", str(error))
        frame = [each for each in traceback.extract_tb(error.__traceback__) if "/jax/" not in each.filename][-1]
        name = argument[1] if argument else "a number"
        raise UserError(
            f"{frame.filename}:{frame.lineno} needs the value of {name} in Python, but it is not known while a program "
            "is compiled: compute with jax.numpy (jnp.where in place of if), or declare a hyper-parameter with "
            "field(..., static=True)"
        ) from error


LEVEL = "xla_backend_optimization_level"
LIBRARY = "xla_cpu_experimental_ynn_fusion_type"


def compiler_options() -> dict[str, Any]:
    """Options of XLA for the current platform. Those that the user has set in ``XLA_FLAGS`` are kept.

    On CPUs:
    - Level 2 of LLVM's optimizations compiles in 0.6 to 0.8 of the time of level 3, which is XLA's default. FedMR with
      `cnn_digits`, LeNet-5 and McMahan's CNN trained as fast, with the same bits; others were not compared.
    - On x86, YNNPACK computes products and sums, as by default, but Eigen the convolutions. Steps of LeNet-5, ResNet-20
      and two other networks took 0.78 to 0.94 of the time, with the blocks of `models.windows` (a CPU with AVX2).
    """
    if platforms.current() != "cpu":
        return {}
    options: dict[str, Any] = {LEVEL: 2}
    if machine() in ("x86_64", "AMD64"):
        options[LIBRARY] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


def compile_lowered(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile with `compiler_options`, without the experimental one if the installed XLA does not know it."""
    options = compiler_options()
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if LIBRARY not in options or LIBRARY not in str(error):
            raise
        return lowered.compile({name: value for name, value in options.items() if name != LIBRARY})


def memory_needed(program: Program) -> int:
    """Memory of a compiled program on a device in bytes: arguments, results and temporaries."""
    memory = program.compiled.memory_analysis()
    both = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return both + memory.temp_size_in_bytes


_kept: dict[Hashable, dict[Hashable, Program]] = {}  # in order of last use


def _kept_under(key: Hashable) -> dict[Hashable, Program]:
    """The set of programs of a key; beyond `MAX_KEPT` sets, the least recently used one is dropped."""
    programs = _kept.pop(key, {})
    _kept[key] = programs
    while len(_kept) > MAX_KEPT:
        del _kept[next(iter(_kept))]
    return programs


def forget() -> None:
    """Drop all programs that are kept for later runs."""
    _kept.clear()


def give_back_memory() -> None:
    """Return freed memory of this process to the operating system, if the C library supports it (glibc).

    A compilation allocates hundreds of megabytes for a moment. Without this call, a process that runs many experiments
    grows by about 10 MB per experiment although everything has been freed.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _kind_of(arguments: Any) -> Hashable:
    """Everything that a trace depends on: the structure of a tree with its static parts, the shapes and the dtypes."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


class Programs(dict[str, Program]):
    """Programs by name. Each is compiled at its first call or taken from the cache of this process.

    Attributes:
      compile_seconds: seconds that the calls of this object have spent in tracing and compilation.
    """

    def __init__(
        self,
        *,
        platform: str | None = None,
        only_compiled: bool = False,
        key: Hashable = None,
        **programs: Program,
    ) -> None:
        """Create the set.

        Args:
          platform: ``platform`` of the programs compiled later (see `Program`).
          only_compiled: ``only_compiled`` of these programs.
          key: everything that the programs close over, by value. Sets with equal keys share the programs for arguments
            of equal shapes. The last `MAX_KEPT` keys are kept. Default: nothing is shared.
          programs: programs to start with, by name.
        """
        super().__init__(programs)
        self.compile_seconds = 0.0
        self._options: dict[str, Any] = {"platform": platform, "only_compiled": only_compiled}
        settings = tuple((name, repr(value)) for name, value in jax.config.values.items())  # such as the precision
        self._kept = {} if key is None else _kept_under((key, platform, only_compiled, settings))

    def call(self, name: str, function: Callable, *args: Any, donate: tuple[int, ...] = (), out: Any = None) -> Any:
        """Run the program ``name``. The other options matter only at its first call (see `Program`)."""
        if name in self:
            return self._counted(self[name], args)
        kind = name, _kind_of(args)
        self[name] = self._kept.get(kind) or Program(function, donate=donate, out=out, **self._options)
        result = self._counted(self[name], args)
        self._kept[kind] = self[name]  # after the call, so a failed compilation is not kept
        return result

    def _counted(self, program: Program, args: tuple) -> Any:
        before = program.compile_seconds
        try:
            return program(*args)
        finally:
            self.compile_seconds += program.compile_seconds - before


class Stopwatch:
    """Seconds that rounds spend on the clients and on the server, without compilation.

    Attributes:
      rounds: number of rounds timed.
    """

    def __init__(self, programs: Programs, *, waits: bool) -> None:
        """Start at zero.

        Args:
          programs: the programs whose compilation time is subtracted.
          waits: whether to wait for the results of each side. Without waiting, no seconds are reported.
        """
        self.rounds = 0
        self._programs = programs
        self._waits = waits
        self._seconds = {"clients": 0.0, "server": 0.0}

    @contextlib.contextmanager
    def side(self, side: str) -> Iterator[list[Any]]:
        """Add the time of the body to a side. The body appends its results to the list, and they are waited for."""
        results: list[Any] = []
        compiled, started = self._programs.compile_seconds, time.perf_counter()
        yield results
        if self._waits:
            jax.block_until_ready(results)
        self._seconds[side] += time.perf_counter() - started - (self._programs.compile_seconds - compiled)

    def seconds_per_round(self) -> dict[str, float]:
        """``clients_seconds_per_round`` and ``server_seconds_per_round``, or {} if no round was timed."""
        if not (self._waits and self.rounds):
            return {}
        return {f"{side}_seconds_per_round": total / self.rounds for side, total in self._seconds.items()}
