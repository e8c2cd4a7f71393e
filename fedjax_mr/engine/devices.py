"""The devices of this machine: JAX set up before it starts."""

import contextlib
import hashlib
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from fedjax_mr.data import files
from fedjax_mr.errors import UserError

CACHE_BYTES = 2 * 1024**3
_cpu_devices = -1  # as set here from the cores, so that a later run may want more; -1 is JAX's own default
MOST_CPU_DEVICES = 64  # unless there are as many cores; hundreds take minutes to start
PATIENT = {  # seconds: uneven devices may wait long for each other
    "xla_cpu_collective_call_terminate_timeout_seconds": "3600",
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": "3600",
}


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_up_jax(*, devices: int | None, cohort_size: int, num_processes: int = 1) -> None:
    """Set up JAX before it starts: CPU cores as devices, room for their threads, the compilation cache.

    What the user has set (in the environment or through ``jax.config``) is left alone. Once JAX has started, its number
    of CPU devices is fixed: a warning says how to get more if cores are idle.

    Args:
      devices: the number of devices asked for, or None, which takes the cores that there are.
      cohort_size: K; more CPU devices than clients would idle.
      num_processes: how many processes share the devices, each with the same number of them.
    """
    count = -(-devices // num_processes) if devices else min(usable_cores(), -(-cohort_size // num_processes))
    count = min(count, max(MOST_CPU_DEVICES, usable_cores()))  # `client_axis` refuses what is more
    # A waiting CPU collective occupies a thread of the pool that its partner may need, and uneven devices may wait
    # long. The devices of one process have none here (see `ClientAxis.fused`), so it keeps one thread per core: XLA
    # splits operations into as many parts as the pool has threads, and four times as many cost a third of the speed.
    if num_processes > 1 or count > usable_cores():
        os.environ.setdefault("NPROC", str(max(4 * count, usable_cores())))
    _use_compilation_cache()
    if num_processes > 1:
        add_xla_flags(PATIENT)
    _use_cores(count, requested=devices is not None)


def _use_cores(count: int, *, requested: bool) -> None:
    """Set the number of CPU devices, unless the user has; warn if JAX has started with fewer and cores will idle.

    JAX can start anew (``jax.extend.backend.clear_backends``), but that would delete the user's arrays.
    """
    global _cpu_devices
    forced = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if forced or jax.config.values["jax_num_cpu_devices"] not in (_cpu_devices, -1):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
        _cpu_devices = -1 if requested else count
    except RuntimeError:  # JAX has started
        found = jax.local_device_count()
        if not requested and jax.default_backend() == "cpu" and found < count:
            warnings.warn(
                f"JAX had started with {found} CPU device{'s' if found > 1 else ''} before this run, which therefore "
                f"uses {found} of {count} cores. To use them, start Python with JAX_NUM_CPU_DEVICES={usable_cores()} "
                "in the environment, or restart it and train before anything else uses JAX",
                stacklevel=4,  # at the user's call
            )


@contextlib.contextmanager
def memory_by_name() -> Iterator[None]:
    """Turn an error of a device or of this machine that ran out of memory into one line.

    Raises:
      UserError: the memory is exhausted.
    """
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        reason = " ".join(str(error).split())[:160] or "MemoryError"
        raise UserError(
            f"the memory does not suffice ({reason}): a smaller --batch_size, --cohort or --lanes, or a smaller "
            "network, needs less"
        ) from None


def add_xla_flags(flags: Mapping[str, str]) -> None:
    """Add flags to ``XLA_FLAGS``: those that are not there already and that this XLA knows.

    XLA ends the whole process at a flag that it does not know, and flags come and go from version to version. So
    another process is asked first, which costs a second; XLA names the unknown flags there when it ends.
    """
    given = os.environ.get("XLA_FLAGS", "")
    added = [f"--{name}={value}" for name, value in flags.items() if name not in given]
    ask = [sys.executable, "-c", "import jax; jax.devices()"]
    while added:
        tried = " ".join([given, *added]).strip()
        answer = subprocess.run(
            ask, env=os.environ | {"XLA_FLAGS": tried, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
        )
        if answer.returncode == 0:
            os.environ["XLA_FLAGS"] = tried
            return
        unknown = [flag for flag in added if flag in answer.stderr]
        added = [flag for flag in added if flag not in unknown] if unknown else []


def _use_compilation_cache() -> None:
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    if (root := files.cache_folder()) is None:
        return
    folder = root / "xla" / _machine()
    _remove_half_written(folder)
    # The cache saves time and no more, so that it is no news if an entry cannot be written or read.
    warnings.filterwarnings("ignore", "Error (writing|reading) persistent compilation cache entry", UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _remove_half_written(folder: Path) -> None:
    """Remove the entries of the cache whose writing was cut short (a kill, a full disk).

    JAX would try to read them for ever: it never replaces an entry. It writes an entry's time of use when the entry is
    whole; without one it also stops with an error where old entries make room, and keeps nothing any more.
    """
    with contextlib.suppress(OSError):
        for entry in folder.glob("*-cache"):
            used = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
            if not used.exists():
                entry.unlink()


def _machine() -> str:
    """Return a name for this kind of machine: compiled CPU programs may not run on another kind.

    They are also made for a number of threads.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind = "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        kind = platform.processor()
    threads = os.environ.get("NPROC", usable_cores())
    return f"{platform.machine()}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}-{threads}"
