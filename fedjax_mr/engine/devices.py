"""The devices of this machine: JAX is configured here before it starts."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fedjax_mr import files
from fedjax_mr.errors import UserError
from fedjax_mr.models.platforms import skip_absent_accelerators

CACHE_BYTES = 2 * 1024**3
_cpu_devices = -1  # value set by `_use_cores`, which a later run may raise; -1 is the default of JAX
MAX_CPU_DEVICES = 64  # or the number of cores, if larger; hundreds of devices take minutes to start
LONG_TIMEOUTS = {  # in seconds, because devices with uneven work wait long for each other
    "xla_cpu_collective_call_terminate_timeout_seconds": "3600",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "3600",
}

# JAX's global settings by which programs compute or draw other numbers, and the environment variables of their names.
CHANGING_NUMBERS = (
    "jax_threefry_partitionable", "jax_random_seed_offset", "jax_high_dynamic_range_gumbel",
    "jax_default_matmul_precision", "jax_softmax_custom_jvp", "jax_use_direct_linearize", "jax_explicit_x64_dtypes",
    "jax_disable_most_optimizations", "jax_optimization_level", "jax_exec_time_optimization_effort",
)  # fmt: skip
_LAYOUT = re.compile(r"--xla_(force_host_platform_device_count|dump_|\w+_timeout_seconds)")  # flags that change none


def settings_of_numbers() -> dict[str, str]:
    """The values of the settings of JAX that change numbers, as texts by name. The kind of keys is fixed in `keys`."""
    # Another version of JAX may lack some. The attribute of `jax.config` also knows a surrounding context manager.
    return {name: str(getattr(jax.config, name)) for name in CHANGING_NUMBERS if hasattr(jax.config, name)}


def compiler_flags() -> str:
    """The words of ``XLA_FLAGS`` that may change the last bits of numbers, in alphabetical order."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(sorted(word for word in words if not _LAYOUT.match(word)))


def _value(name: str) -> Any:
    """A setting of JAX, also of a surrounding context manager; None if this version of JAX has none of this name."""
    return getattr(jax.config, name, None)


def refuse_settings() -> None:
    """Refuse settings of JAX with which no run works, and a process in which JAX would hang.

    Raises:
      UserError: the message names the setting.
    """
    if _forked_after_start:
        raise UserError(
            "this process was forked from one in which JAX had started, so it would hang: start processes by "
            'multiprocessing.get_context("spawn"), or fork before JAX is used'
        )
    if _value("jax_enable_x64"):  # programs would have other numbers, and checkpoints other types
        raise UserError(
            "JAX computes with 64 bits, but this package with 32: unset JAX_ENABLE_X64, or call "
            'jax.config.update("jax_enable_x64", False) first'
        )
    if _value("jax_disable_jit"):
        raise UserError("every round is a compiled program, which JAX_DISABLE_JIT (jax_disable_jit) forbids: unset it")
    for name in ("", "_host_to_device", "_device_to_device", "_device_to_host"):
        value = _value(f"jax_transfer_guard{name}") or ""
        if value.startswith("disallow"):
            raise UserError(
                f"numbers and samples are sent to the devices, which JAX_TRANSFER_GUARD{name.upper()}={value} forbids: "
                "unset it, or use log"
            )


def _started() -> bool:
    """Whether JAX has started. From then on it refuses another number of CPU devices."""
    count = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", max(count, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def _note_fork() -> None:
    global _forked_after_start
    _forked_after_start = _forked_after_start or _started()


def _is_alone() -> bool:
    """Whether this process has one thread. False if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


_forked_after_start = _started() and _is_alone()  # the threads of JAX do not exist in a child
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_up_jax(
    *, devices: int | None, cohort_size: int, num_processes: int = 1, cache_dir: Path | str | None = None
) -> None:
    """Configure JAX before it starts: one CPU device per core, enough threads, the compilation cache.

    Settings of the user (in the environment or through ``jax.config``) are kept. Once JAX has started, its number of
    CPU devices is fixed. If cores stay idle, a warning says how to use them.

    Args:
      devices: number of devices D. None uses all cores.
      cohort_size: K. CPU devices beyond K would be idle.
      num_processes: number of processes that share the devices evenly.
      cache_dir: folder of the compilation cache. Default: the package's folder in the user's cache.

    Raises:
      UserError: as `refuse_settings`, or JAX has no device of the platform that the user asks for.
    """
    refuse_settings()
    skip_absent_accelerators()
    count = cpu_devices(devices, cohort_size, num_processes=num_processes)
    # A waiting CPU collective occupies a thread that its partner may need, so several processes get more threads. One
    # process has no collectives (see `ClientAxis.fused`) and keeps one thread per core: XLA splits operations into as
    # many parts as there are threads, and four times as many threads cost a third of the speed.
    if num_processes > 1 or count > usable_cores():
        os.environ.setdefault("NPROC", str(max(4 * count, usable_cores())))
    _use_compilation_cache(Path(cache_dir) if cache_dir is not None else files.cache_folder())
    if num_processes > 1:
        add_xla_flags(LONG_TIMEOUTS)
    _use_cores(count, requested=devices is not None)
    if num_processes == 1:  # several may not have joined yet, and JAX must start afterwards
        _require_platforms()


def _require_platforms() -> None:
    """Start JAX if the user asks for an accelerator, which may be missing. Without such a request, JAX finds a CPU.

    Raises:
      UserError: it is missing.
    """
    if (platforms := _value("jax_platforms")) in (None, "", "cpu"):
        return
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: no plugin of the platform is installed
        reason = " ".join(str(error).split())[:160] or "its plugin is not installed"
        raise UserError(
            f"JAX has no device of JAX_PLATFORMS={platforms} ({reason}): unset it, or install JAX for this device"
        ) from None


def cpu_devices(devices: int | None, cohort_size: int, *, num_processes: int = 1) -> int:
    """Number of CPU devices of a process. JAX fixes it when it starts. The arguments are those of `set_up_jax`."""
    count = -(-devices // num_processes) if devices else min(usable_cores(), -(-cohort_size // num_processes))
    return min(count, max(MAX_CPU_DEVICES, usable_cores()))  # `client_axis` rejects larger numbers


def _use_cores(count: int, *, requested: bool) -> None:
    """Set the number of CPU devices, unless the user has set it. Warn if JAX has started and cores stay idle.

    JAX could be restarted (``jax.extend.backend.clear_backends``), but that would delete the user's arrays.
    """
    global _cpu_devices
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if forced or jax.config.values["jax_num_cpu_devices"] not in (_cpu_devices, -1):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
        _cpu_devices = -1 if requested else count
    except RuntimeError:  # JAX has started
        available = jax.local_device_count()
        if not requested and jax.default_backend() == "cpu" and available < count:
            warnings.warn(
                f"JAX had already started with {available} CPU device{'s' if available > 1 else ''}, so this run uses "
                f"{available} of {count} cores. To use all, start Python with JAX_NUM_CPU_DEVICES={usable_cores()} "
                "in the environment, or restart Python and train before anything else uses JAX",
                stacklevel=4,  # at the user's call
            )


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """Replace an out-of-memory error by a UserError of one line.

    Raises:
      UserError: a device or the machine is out of memory.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        reason = " ".join(str(error).split())[:160] or "MemoryError"
        raise UserError(
            f"out of memory ({reason}): use a smaller batch_size=, cohort= or lanes=, or a smaller network"
        ) from None


def add_xla_flags(flags: Mapping[str, str]) -> None:
    """Add flags to ``XLA_FLAGS``, except those that are set already or unknown to the installed XLA.

    XLA aborts the process at an unknown flag, and its flags change between versions. So the flags are tried in another
    process first, which takes a second; XLA names the unknown flags there when it aborts.
    """
    present = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in present]
    trial = [sys.executable, "-c", "import jax; jax.devices()"]
    while added:
        combined = " ".join([present, *added]).strip()
        result = subprocess.run(
            trial, env=os.environ | {"XLA_FLAGS": combined, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
        )
        if result.returncode == 0:
            os.environ["XLA_FLAGS"] = combined
            return
        unknown = [flag for flag in added if flag in result.stderr]
        added = [flag for flag in added if flag not in unknown] if unknown else []


def _use_compilation_cache(root: Path | None) -> None:
    if root is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = root / "xla" / _machine()
    _remove_half_written(folder)
    # The cache only saves time, so a failure to write or read an entry needs no warning.
    warnings.filterwarnings("ignore", "Error (writing|reading) persistent compilation cache entry", UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _remove_half_written(folder: Path) -> None:
    """Remove cache entries that were not written completely (a killed process, a full disk).

    JAX never replaces an entry, so it would try to read a broken one in every run. JAX writes the time of use after the
    entry; an entry without one also makes JAX's eviction of old entries fail, and then nothing more is cached.
    """
    with contextlib.suppress(OSError):
        for entry in folder.glob("*-cache"):
            used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            if not used.exists():
                entry.unlink()


def _machine() -> str:
    """Name of this kind of machine and its number of threads; compiled CPU programs fit no other combination."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        kind = platform.processor()
    threads = os.environ.get("NPROC", usable_cores())
    return f"{platform.machine()}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}-{threads}"
