"""Several processes in one run: joining them, agreeing, exchanging short texts, and the end after a loss.

JAX does the work: `jax.distributed` connects the processes and notices a lost one, `multihost_utils` gathers arrays of
all of them. A lost process makes JAX abort the others from C++, which no Python code survives. The last line that they
print and their exit code are ours.
"""

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_mr.errors import LostError, UserError
from fedjax_mr.terminal import interrupts

TIMEOUTS: dict[str, Any] = {
    "heartbeat_timeout_seconds": 30,  # a process that is silent for so long is lost
    "shutdown_timeout_seconds": 20,  # how long a process that has finished waits for the others
}
JOIN_SECONDS = 300  # default of --join_timeout
LEAVE_SECONDS = 5  # how long a process waits for the others to leave together after an error
LAST_SECONDS = 2  # process 0 exits this much later, because JAX aborts the others when it has gone
COUNTS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")  # variables with the number of processes
GO_ON = "go on with --resume"

# Status codes of errors that a lost process causes in the others, and libraries whose errors have no code of their own.
_CODES_OF_LOSS = {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
_COLLECTIVES = ("Gloo", "NCCL")

T = TypeVar("T")


class Processes:
    """The processes of this run. Each method must be called by all of them, in the same order.

    Attributes:
      index: number of this process.
      count: number of processes.
    """

    def __init__(
        self, index: int, count: int, gather: Callable[[np.ndarray], np.ndarray] = multihost_utils.process_allgather
    ) -> None:
        """Describe the place of this process among those that `join_processes` has connected.

        Args:
          index: number of this process.
          count: number of processes P.
          gather: the function that stacks the arrays of all processes, [...] -> [P, ...].
        """
        self.index = index
        self.count = count
        self._gather = gather

    @property
    def writes(self) -> bool:
        """Whether this process writes metrics, pictures and to the terminal."""
        return self.index == 0

    def exchange(self, text: str) -> list[str]:
        """Collect the texts of all processes, in the order of their numbers.

        Raises:
          LostError: a process is lost.
        """
        if self.count == 1:
            return [text]
        content = np.frombuffer(text.encode(), np.uint8)
        with lost_in_one_line():
            sizes = self._gather(np.array(len(content), np.int32))
            width = 1 << int(sizes.max()).bit_length()  # few widths, so JAX compiles few programs
            rows = self._gather(np.pad(content, (0, width - len(content))))
        return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def together(self, function: Callable[[], T]) -> T:
        """Call ``function``, wait until it has succeeded in all processes, and return this process's result.

        Raises:
          UserError: the function failed in a process. Then all processes raise.
        """
        result: Any = None
        failure = ""
        try:
            result = function()
        except UserError as error:
            if self.count == 1:
                raise
            failure = str(error)
        failures = self.exchange(failure)
        if failure:
            raise UserError(failure)
        for process, other in enumerate(failures):
            if other:
                raise UserError(f"process {process} failed: {other}")
        return result

    def on_first(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` in process 0 only and return its result in all processes.

        Args:
          function: its result must be a value that JSON can represent.

        Raises:
          UserError: the function failed.
        """
        result = self.together(lambda: function() if self.writes else None)
        return result if self.count == 1 else json.loads(self.exchange(json.dumps(result))[0])

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that all processes have the same values, compared as JSON.

        Args:
          facts: values by name.

        Raises:
          UserError: a process differs from process 0. The message names the first such process and the differences.
        """
        mine = {name: json.dumps(fact, sort_keys=True) for name, fact in facts.items()}
        everyone = [json.loads(text) for text in self.exchange(json.dumps([socket.gethostname(), mine]))]
        first = everyone[0][1]
        for process, (host, theirs) in enumerate(everyone):
            different = [
                f"{name}: {theirs.get(name, '-')} (process 0: {first.get(name, '-')})"
                for name in dict.fromkeys((*first, *theirs))
                if theirs.get(name) != first.get(name)
            ]
            if different:
                raise UserError(f"process {process} on {host} was started differently: {'; '.join(different)}")


ALONE = Processes(0, 1)


# --- Joining ---------------------------------------------------------------------------------------------------------


def join_processes(
    *, coordinator: str | None, num_processes: int | None, process_id: int | None, join_timeout: int = JOIN_SECONDS
) -> int:
    """Connect to the other processes of the run, before JAX uses a device. `connected` describes them afterwards.

    Without arguments, JAX detects SLURM, Open MPI, Kubernetes and Cloud TPUs. If it detects none, this process is the
    only one.

    Args:
      coordinator: host:port of process 0.
      num_processes: number of processes. 1 disables the detection.
      process_id: number of this process.
      join_timeout: seconds to wait for the others. Then the process exits with one line and code 4.

    Returns:
      The number of processes, as far as it is known before JAX starts: at least 2 if there are several.

    Raises:
      UserError: the arguments are inconsistent, or process 0 cannot listen at its port.
    """
    place = {"coordinator_address": coordinator, "num_processes": num_processes, "process_id": process_id}
    if num_processes == 1:
        return 1
    if len({each is None for each in place.values()}) == 2:
        raise UserError("--coordinator, --num_processes and --process_id belong together: set all three or none")
    if process_id is not None and num_processes is not None and process_id >= num_processes:
        raise UserError(f"--process_id={process_id} is not below --num_processes={num_processes}")
    options: dict[str, Any] = {"initialization_timeout": join_timeout, **TIMEOUTS}
    if coordinator is not None:
        options |= place | {"cluster_detection_method": "deactivate"}
        options |= _listening(coordinator, check=process_id == 0 and not jax.distributed.is_initialized())
    late = f"not all processes of the run arrived within {join_timeout} s (--join_timeout)"
    before = _end_aborts_with(f"{late}: process 0 or another one is missing, or two have the same number")
    if not jax.distributed.is_initialized() and not _join(options, coordinator):
        _on_abort(before)
        return 1
    _end_aborts_with(f"another process of this run is lost, or JAX has failed: {GO_ON} (the reason is above)")
    counts = (int(os.environ[name]) for name in COUNTS if os.environ.get(name, "").isdecimal())
    return num_processes or max(2, next(counts, 2))


def connected() -> Processes:
    """The place of this process among those that have joined. JAX starts.

    Raises:
      LostError: another process has not started JAX.
      UserError: the processes have different numbers of devices.
    """
    if not jax.distributed.is_initialized():
        return ALONE
    with lost_in_one_line():
        devices = jax.device_count()
    if devices != jax.local_device_count() * jax.process_count():
        raise UserError(
            f"process {jax.process_index()} has {jax.local_device_count()} of {devices} devices, but all "
            f"{jax.process_count()} processes must have equally many"
        )
    return Processes(jax.process_index(), jax.process_count())


def _join(options: dict[str, Any], coordinator: str | None) -> bool:
    """Call `jax.distributed.initialize`. Return whether this process has joined others."""
    jax.config.update("jax_enable_preemption_service", False)  # the run handles SIGTERM
    errors: list[Exception] = []

    def call() -> None:
        try:
            jax.distributed.initialize(**options)
        except Exception as error:  # broad: the main thread raises it
            errors.append(error)

    # JAX waits in C++, where Ctrl-C has no effect, so the main thread waits for a thread. A library that was being
    # imported may have caught an earlier Ctrl-C.
    thread = threading.Thread(target=call, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        interrupts.check()
        thread.join(1)
    match errors:
        case []:
            return True
        case [jax.errors.JaxRuntimeError() as error]:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"cannot join the other processes ({reason})")
        case [RuntimeError()] if coordinator is not None:
            raise UserError("--coordinator is too late: JAX has already started in this process")
        case [RuntimeError() | ValueError()] if coordinator is None:  # as in a notebook; or JAX has detected no cluster
            return False
    raise errors[0]


def _listening(coordinator: str, *, check: bool) -> dict[str, str]:
    """Return the option that keeps a port of the loopback closed to other machines.

    Args:
      coordinator: ``host:port`` of process 0.
      check: whether to check that the port is free. If it is in use, JAX (0.10) sometimes crashes.

    Raises:
      UserError: the text has another form, the port is not in 1..65535 or in use, or the host is unknown.
    """
    host, colon, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        raise UserError(f"--coordinator={coordinator} is not of the form host:port")
    if not 0 < int(port[:6]) < 2**16:
        raise UserError(f"--coordinator={coordinator}: a port is a number from 1 to 65535")
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError):  # UnicodeError: not a valid name
        raise UserError(f"--coordinator={coordinator}: no address is known for the host {host!r}") from None
    chosen = "JAX_COORDINATOR_BIND_ADDRESS" in os.environ
    is_loopback = host in ("127.0.0.1", "::1", "localhost") and not chosen
    try:
        if check and not chosen:
            family = socket.AF_INET6 if host == "::1" else socket.AF_INET
            socket.create_server((host if is_loopback else "", int(port)), family=family).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(
            f"process 0 cannot listen at port {port} of --coordinator ({reason}): choose another port"
        ) from None
    return {"coordinator_bind_address": coordinator} if is_loopback else {}


# --- The end after a loss --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lost_in_one_line() -> Iterator[None]:
    """Replace the error that JAX raises after the loss of another process by one line.

    Raises:
      LostError: a transfer between processes has failed. The process then exits with code 4, even if a program catches
        the error, because JAX could only wait for the others and abort.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises both, with the same text
        code, _, _ = str(error).partition(":")  # JAX keeps the status code when it raises a ValueError
        is_loss = code in _CODES_OF_LOSS or any(library in str(error) for library in _COLLECTIVES)
        if not is_loss or not jax.distributed.is_initialized():
            raise
        atexit.register(_exit_at_once, LostError.exit_code)  # called before JAX's own function
        reason = " ".join(str(error).split())[:160]
        raise LostError(f"another process of this run is lost: {GO_ON} ({reason})") from None


def _end_aborts_with(line: str) -> int | None:
    """Let aborts of this process end with a line and code 4. Return the address of the function that was called before.

    A handler of `signal.signal` would be too late: Python calls it in the main thread after the C code has returned.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def end(_: int) -> None:
        newline = "\n" if sys.stderr.isatty() else ""  # ends the line of a progress bar
        os.write(2, f"{newline}fedjax-mr: {line}\n".encode())
        os._exit(LostError.exit_code)

    _handlers.append(end)
    return _on_abort(ctypes.cast(end, ctypes.c_void_p).value)


def _on_abort(address: int | None) -> int | None:
    """Set the C function that an abort calls, by its address. Return the address of the one before."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    return set_handler(signal.SIGABRT, address)


_handlers: list[Any] = []  # C holds no reference to them


def _exit_at_once(code: int) -> NoReturn:
    """Exit without JAX's wait for the other processes. Process 0 gives them time to say what happened."""
    sys.stdout.flush()
    sys.stderr.flush()
    if jax.process_index() == 0:
        time.sleep(LAST_SECONDS)
    os._exit(code)


def leave(code: int) -> NoReturn:
    """Exit with ``code``. After an error, wait only a short time for other processes, which may not have failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        interrupts.leave_if_interrupted()  # do not wait for the threads of a download
    if code and code != LostError.exit_code and jax.distributed.is_initialized():
        waiting = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        waiting.start()
        waiting.join(LEAVE_SECONDS)
        os._exit(code)
    sys.exit(code)
