"""Several processes in one run: joining them, agreeing, exchanging short texts, and naming a lost one.

Fills: `jax.distributed` neither names a missing process nor reacts to Ctrl-C, and no public function of JAX exchanges
texts before devices are used or compares the settings of processes.

JAX connects the processes (``jax.distributed``) and runs each program on all devices of all of them. The texts go
through the key-value store of JAX's coordination service, which needs no device and no compiled program. JAX (0.10 to
0.12) has no public name for the client of that store, nor for the place that a cluster assigns to a process. So
`_coordination_state` and `_place_in_cluster` import from ``jax._src``, and only in runs of several processes.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax

from fedjax_mr.errors import LostError, UserError
from fedjax_mr.experiment import coordination, heartbeats, interrupts, rendezvous

TIMEOUTS: dict[str, Any] = {  # of JAX, for its client and its service
    "heartbeat_timeout_seconds": 60,  # then JAX aborts the other processes; `heartbeats` notices a loss much earlier
    "shutdown_timeout_seconds": 20,  # how long a process that has finished waits for the others
}
JOIN_SECONDS = 300  # default of --join_timeout
CONNECT_SECONDS = 60  # how long JAX may take to connect processes that have met
LEAVE_SECONDS = 5  # how long a process waits for the others to exit together after an error
EXCHANGE_SECONDS = 24 * 3600  # practically unlimited, because `heartbeats` notices a lost process

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

    def __init__(self, index: int, count: int, client: Any = None, watch: heartbeats.Heartbeats | None = None) -> None:
        """Describe the place of this process; `join_processes` connects it.

        Args:
          index: number of this process.
          count: number of processes.
          client: client of JAX's coordination service, if there are several processes.
          watch: the heartbeats, if there are several processes.
        """
        self.index = index
        self.count = count
        self._client = client
        self._watch = watch
        self._exchanges = itertools.count()
        self._previous: str | None = None  # name of this process's text in the exchange before

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
        number = next(self._exchanges)
        names = [f"fedjax_mr/{number}/{process}" for process in range(self.count)]
        with self.lost_by_name():
            self._client.key_value_set(names[self.index], text)
            texts = [self._client.blocking_key_value_get(name, EXCHANGE_SECONDS * 1000) for name in names]
            if self._previous:  # every process has sent its text, so it has read those of the previous exchange
                self._client.key_value_delete(self._previous)
        self._previous = names[self.index]
        return texts

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

    @contextlib.contextmanager
    def lost_by_name(self) -> Iterator[None]:
        """Replace the error that JAX raises after the loss of another process by one line that names it.

        Raises:
          LostError: a transfer failed and another process is lost.
        """
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises both, with the same text
            if self._watch is None or not _may_be_a_loss(error):
                raise
            lost = self._watch.find_lost()
            if not lost:
                raise
            reason = " ".join(str(error).split())[:160]
            raise LostError(heartbeats.lost_line(lost, self.count, reason)) from None

    def leave(self, code: int) -> None:
        """After an error, wait a short time for the other processes; exit at once if they do not arrive."""
        if self.count == 1:
            return
        try:
            self._client.wait_at_barrier("fedjax_mr/leave", LEAVE_SECONDS * 1000)
        except jax.errors.JaxRuntimeError:
            heartbeats.exit_at_once(self.index, code)


ALONE = Processes(0, 1)


def _may_be_a_loss(error: Exception) -> bool:
    code, _, _ = str(error).partition(":")  # JAX keeps the status code when it raises a ValueError
    return code in _CODES_OF_LOSS or any(library in str(error) for library in _COLLECTIVES)


@functools.cache
def _membership() -> Processes:
    """The place of this process. Cached, because a Python process can join only once."""
    state = _coordination_state()
    if state.client is None or state.num_processes == 1:
        return ALONE
    place = state.process_id, state.num_processes
    return Processes(*place, state.client, heartbeats.watch(state.client, *place))


def _coordination_state() -> Any:
    """JAX's connection to the coordination service: the client, the process's number, the number of processes."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        raise UserError(f"JAX {jax.__version__} is too new for several processes: use 0.10 to 0.12") from None
    return global_state


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process among those of its run, from the flags or the cluster."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None = None


def join_processes(
    *, coordinator: str | None, num_processes: int | None, process_id: int | None, join_timeout: int = JOIN_SECONDS
) -> Processes:
    """Connect to the other processes of the run, before JAX uses a device.

    Without arguments, JAX detects SLURM, Open MPI, Kubernetes and Cloud TPUs. If it detects none, this process is the
    only one.

    Args:
      coordinator: host:port of process 0.
      num_processes: number of processes. 1 disables the detection.
      process_id: number of this process.
      join_timeout: seconds to wait for the others.

    Raises:
      LostError: a process did not arrive in time.
      UserError: the arguments are inconsistent, or differ from those of the other processes.
    """
    place_in_flags = (coordinator, num_processes, process_id)
    if jax.distributed.is_initialized():
        return _membership()
    if num_processes == 1:
        return ALONE
    if any(each is not None for each in place_in_flags) and None in place_in_flags:
        raise UserError("--coordinator, --num_processes and --process_id belong together: set all three or none")
    if process_id is not None and num_processes is not None and process_id >= num_processes:
        raise UserError(f"--process_id={process_id} is not below --num_processes={num_processes}")
    if coordinator is not None:
        rendezvous.address_of(coordinator)
    if _jax_has_started():  # as in a notebook
        if coordinator is not None:
            raise UserError("--coordinator is too late: JAX has already started in this process")
        return ALONE
    if coordinator is not None and num_processes is not None and process_id is not None:
        place: Place | None = Place(coordinator, num_processes, process_id)
    else:
        place = _place_in_cluster(join_timeout)
    jax.config.update("jax_enable_preemption_service", False)  # the run handles SIGTERM
    with contextlib.ExitStack() as until_joined:
        if place is None:
            options: dict[str, Any] = {"initialization_timeout": join_timeout}
        else:
            options = _meet(place, join_timeout, until_joined)
        try:
            jax.distributed.initialize(**options, **TIMEOUTS)
        except ValueError:
            if place is not None:
                raise
        except jax.errors.JaxRuntimeError as error:
            raise UserError(f"cannot join the other processes ({' '.join(str(error).split())[:200]})") from None
    return _membership() if jax.distributed.is_initialized() else ALONE


def _meet(place: Place, seconds: int, until_joined: contextlib.ExitStack) -> dict[str, Any]:
    """Wait for the other processes, and start the coordination service in process 0.

    Args:
      place: of this process.
      seconds: to wait.
      until_joined: stops the service if an exception leaves it.

    Returns:
      The arguments of `jax.distributed.initialize`.
    """
    host, port = rendezvous.address_of(place.coordinator_address)
    meeting = functools.partial(
        rendezvous.meet,
        place.coordinator_address,
        process_id=place.process_id,
        num_processes=place.num_processes,
        seconds=seconds,
    )
    options = dataclasses.asdict(place) | {
        "cluster_detection_method": "deactivate",
        "initialization_timeout": CONNECT_SECONDS,
    }
    if place.process_id > 0:
        meeting()
        return options
    if bind_address := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        host, port = rendezvous.address_of(bind_address)
    else:
        host = rendezvous.listening_address(host)
    address = f"[{host or '::'}]:{port}" if not host or ":" in host else f"{host}:{port}"
    try:
        serve = until_joined.enter_context(coordination.prepared())
        meeting(listen_at=(host, port))
        serve(coordinator_bind_address=address, num_processes=place.num_processes, **TIMEOUTS)
    except OSError as error:
        raise UserError(
            f"cannot start JAX's coordination service at {address} ({error}): choose another port for --coordinator"
        ) from None
    return options | {"coordinator_bind_address": coordination.UNUSED}


def _jax_has_started() -> bool:
    """Whether JAX has used its devices, after which it cannot connect to other processes."""
    try:
        jax.distributed.initialize(num_processes=0, process_id=0, cluster_detection_method="deactivate")
    except ValueError:  # about the missing address, which JAX checks later than whether it has started
        return False
    except RuntimeError:
        return True
    raise AssertionError("JAX has connected to no address")


def _place_in_cluster(seconds: int) -> Place | None:
    """The place that a cluster assigns to this process, or None if JAX detects no cluster."""
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError:  # a newer JAX: it detects the cluster and waits for the others itself
        return None
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    detected = ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, None, seconds)
    address, num_processes, process_id, local_device_ids = detected
    if address is None or num_processes is None or process_id is None:
        return None
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):  # JAX reads it if the argument is None
        local_device_ids = None
    return Place(address, num_processes, process_id, local_device_ids)  # type: ignore[arg-type]


def leave(code: int) -> NoReturn:
    """Exit with ``code``, without waiting for lost processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code and jax.distributed.is_initialized():
        _membership().leave(code)
    elif code:
        interrupts.leave_if_interrupted()  # do not wait for the threads of a download
    sys.exit(code)
