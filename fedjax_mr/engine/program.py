"""Compiled functions: `jax.jit` with our options for XLA, shared by all simulators of a process, counted and timed."""

import contextlib
import ctypes
import functools
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator
from platform import machine
from typing import Any

import jax
from jax.core import Tracer

from fedjax_mr.engine.devices import refuse_settings
from fedjax_mr.errors import UserError
from fedjax_mr.models import platforms

MAX_KEPT = 32  # programs, of some 8 MB each for a small network


class Traced:
    """A function as programs trace it. Programs of the same object share its traces.

    Attributes:
      traces: number of times that it was traced for arguments of one kind. More than one means a fault.
    """

    def __init__(self, function: Callable[..., Any], name: str = "", platform: str | None = None) -> None:
        """Wrap ``function``.

        Args:
          function: the function to trace.
          name: its name in profiles and in the text of programs. Default: its own.
          platform: the platform to trace for. Default: the platform of this process.
        """
        self.traces, self.platform = 0, platform
        self._function = function
        self.__name__ = OURS + (name or function.__name__)

    def __call__(self, *args: Any) -> Any:
        self.traces += 1
        with platforms.tracing_for(self.platform), numbers_are_arguments():
            return self._function(*args)


class Program:
    """One compiled function: `jax.jit` for arguments of one kind."""

    def __init__(self, function: Callable[..., Any], *, donate: tuple[int, ...] = (), out: Any = None) -> None:
        """Wrap ``function``.

        Args:
          function: the function to compile, or one that other programs compile, too, as a `Traced`.
          donate: positions of the arguments whose buffers a call consumes.
          out: the shardings of the results, as a prefix of their tree. Default: chosen by the compiler.
        """
        self._traced = traced = function if isinstance(function, Traced) else Traced(function)
        jitted = functools.partial(jax.jit, traced, donate_argnums=donate, out_shardings=out)
        with platforms.tracing_for(traced.platform):
            options = compiler_options()
        self._jit = jitted(compiler_options=options)
        self._without_sums = jitted(compiler_options=options | {LIBRARY: PRODUCTS}) if LIBRARY in options else None

    def __call__(self, *args: Any) -> Any:
        """Run the function, compiled at the first call.

        Raises:
          UserError: as `refuse_settings`.
        """
        refuse_settings()
        with donations_may_fail():
            if self._without_sums is not None:
                if adds_up_products(self._jit.lower(*args).compile().as_text() or ""):
                    self._jit = self._without_sums
                self._without_sums = None
            return self._jit(*args)

    @property
    def traces(self) -> int:
        """Number of times that the function was traced. More than one means a fault."""
        return self._traced.traces

    def compile(self, *args: Any) -> jax.stages.Compiled:
        """The compiled program, for arrays or for shapes with shardings (``jax.ShapeDtypeStruct``). Nothing is run."""
        with donations_may_fail():
            return self._jit.lower(*args).compile()

    def shapes(self, *args: Any) -> Any:
        """The shapes and dtypes of the results, as ``jax.ShapeDtypeStruct``. Nothing is compiled."""
        return self._jit.eval_shape(*args)


@contextlib.contextmanager
def donations_may_fail() -> Iterator[None]:
    """Accept donated rows whose size no result has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        yield


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
PRODUCTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def compiler_options() -> dict[str, Any]:
    """Options of XLA for the current platform. Those that the user has set in ``XLA_FLAGS`` are kept.

    On CPUs:
    - Level 2 of LLVM's optimizations compiles in 0.6 to 0.8 of the time of level 3, which is XLA's default. FedMR with
      `cnn_digits`, LeNet-5 and McMahan's CNN trained as fast, with the same bits; others were not compared.
    - On x86, YNNPACK computes products and sums, as by default, but Eigen the convolutions. Steps of LeNet-5, ResNet-20
      and two other networks took 0.78 to 0.94 of the time, with the blocks of `models.windows` (a CPU with AVX2).
      A program in which it would compute a product and its sum in one step is compiled without its sums, see
      `adds_up_products`.
    """
    if platforms.current() != "cpu":
        return {}
    options: dict[str, Any] = {LEVEL: 2}
    if machine() in ("x86_64", "AMD64") and _is_known(LIBRARY):
        options[LIBRARY] = f"{PRODUCTS},LIBRARY_FUSION_TYPE_REDUCE"
    return {name: value for name, value in options.items() if name not in os.environ.get("XLA_FLAGS", "")}


@functools.cache
def _is_known(option: str) -> bool:
    """Whether the installed XLA has an experimental option."""
    probe = jax.jit(lambda: 0, compiler_options={option: "LIBRARY_FUSION_TYPE_REDUCE"})
    try:
        probe.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if option in str(error):
            return False
        raise
    return True


def adds_up_products(text: str) -> bool:
    """Whether YNNPACK computes a product and its sum in one step of a compiled program.

    In jaxlib 0.10.2 such a step is wrong without a warning if a factor is constant along the columns. Neither FedAvg,
    FedCross nor SCAFFOLD with `lstm1` or `cnn_mcmahan` has one; programs with one lose the speed of the other sums.
    """
    steps = set(re.findall(r"calls=(%[\w.\-]+)[^\n]*__ynn_fusion", text))
    bodies = re.findall(r"^(%[\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL) if steps else []
    return any(name in steps and " dot(" in body and " reduce(" in body for name, body in bodies)


def memory_needed(compiled: jax.stages.Compiled) -> int:
    """Memory of a compiled program on a device in bytes: arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    assert memory is not None
    both = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return both + memory.temp_size_in_bytes


def give_back_memory() -> None:
    """Return freed memory of this process to the operating system, if the C library supports it (glibc).

    A compilation allocates hundreds of megabytes for a moment. Without this call, a process that runs many experiments
    grows by about 10 MB per experiment although everything has been freed.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


# --- programs that simulators share -----------------------------------------------------------------------------------


class Programs(dict[str, Program]):
    """The programs of an object, by name: the methods of its ``owner``.

    Objects with equal owners share the programs for arguments of the same kind. The last `MAX_KEPT` programs are kept.
    """

    def __init__(self, owner: Any) -> None:
        """Create the set, without programs.

        Args:
          owner: a frozen dataclass of everything that its methods depend on except their arguments, with an ``axis``.
        """
        super().__init__()
        self._owner = owner
        self._arguments: dict[str, Any] = {}  # shapes

    def call(self, name: str, *args: Any, donate: tuple[int, ...] = (), out: Any = None) -> Any:
        """Call the method ``name`` of the owner. ``donate`` and ``out`` matter only the first time (see `Program`).

        On a machine that is not present, the arguments and results are shapes with shardings.
        """
        if name not in self:
            self._arguments[name] = jax.tree.map(_described, args)
            self[name] = _program(self._owner, name, _kind_of(args), donate, *_hashable(out))
        if not self._owner.axis.described:
            return self[name](*args)
        with_sharding = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.tree.map(with_sharding, self[name].shapes(*args), self.compiled(name).output_shardings)

    def compiled(self, name: str) -> Any:  # a jax.stages.Compiled, whose text and memory some backends lack
        """The compiled code of a program that was called, for example for its text."""
        return self[name].compile(*self._arguments[name])

    def shapes(self, name: str, *args: Any) -> Any:
        """The shapes and dtypes of the results of the method ``name``. Nothing is compiled."""
        return _program(self._owner, name, _kind_of(args), (), *_hashable(None)).shapes(*args)


@functools.lru_cache(maxsize=MAX_KEPT)
def _program(owner: Any, name: str, kind: Hashable, donate: tuple[int, ...], out: Any, structure: Any) -> Program:
    """``kind`` bounds the memory: a program that is dropped takes its compiled code along."""
    return Program(_traced(owner, name, kind), donate=donate, out=jax.tree.unflatten(structure, out))


@functools.lru_cache(maxsize=MAX_KEPT)
def _traced(owner: Any, name: str, kind: Hashable) -> Traced:
    """``kind``: what a trace depends on, so each is traced once."""
    del kind
    return Traced(getattr(owner, name), name, owner.axis.platform)


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    placed = isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer))
    sharding = leaf.sharding if placed and getattr(leaf, "committed", True) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _hashable(tree: Any) -> tuple[tuple, Hashable]:
    leaves, structure = jax.tree.flatten(tree)
    return tuple(leaves), structure


def _kind_of(arguments: Any) -> Hashable:
    """Everything that a trace depends on: the structure of a tree with its static parts, the shapes and the dtypes."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def forget() -> None:
    """Drop all programs that are kept for other simulators."""
    _program.cache_clear()
    _traced.cache_clear()


def is_of_this_package(code: Any) -> bool:
    """Whether a function, a class or an object of a class is part of this package.

    Other code may depend on values that change without a trace, such as a variable of a notebook.
    """
    while isinstance(code, functools.partial):
        code = code.func
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] == __name__.partition(".")[0]


# --- time -------------------------------------------------------------------------------------------------------------

OURS = "fedjax_mr_"  # begins the names of our programs
PHASES = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
_seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)


def _on_duration(event: str, duration_secs: float, **facts: str | int) -> None:
    phase = event.rpartition("/")[2]
    if phase in _seconds and OURS in str(facts.get("fun_name", "")):
        _seconds[phase] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_on_duration)


def compile_seconds(*phases: str) -> float:
    """Seconds that this process has spent in tracing, lowering and compilation of our programs.

    Args:
      phases: some of `PHASES`. Default: all.
    """
    return sum(_seconds[phase] for phase in phases or PHASES)


class Stopwatch:
    """Seconds that rounds spend on the clients and on the server, without compilation.

    Attributes:
      rounds: number of rounds timed.
    """

    def __init__(self, *, waits: bool) -> None:
        """Start at zero.

        Args:
          waits: whether to wait for the results of each side. Without waiting, no seconds are reported.
        """
        self.rounds = 0
        self._waits = waits
        self._seconds = {"clients": 0.0, "server": 0.0}

    @contextlib.contextmanager
    def side(self, side: str) -> Iterator[list[Any]]:
        """Add the time of the body to a side. The body appends its results to the list, and they are waited for."""
        results: list[Any] = []
        compiled, started = compile_seconds(), time.perf_counter()
        yield results
        if self._waits:
            jax.block_until_ready(results)
        self._seconds[side] += time.perf_counter() - started - (compile_seconds() - compiled)

    def seconds_per_round(self) -> dict[str, float]:
        """``clients_seconds_per_round`` and ``server_seconds_per_round``, or {} if no round was timed."""
        if not (self._waits and self.rounds):
            return {}
        return {f"{side}_seconds_per_round": total / self.rounds for side, total in self._seconds.items()}
