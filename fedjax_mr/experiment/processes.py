"""Several processes: joining them, what they agree on, which of them writes, and what is said when one is lost.

JAX connects the processes (``jax.distributed``) and runs every program on all devices of all of them; here is only what
a program of JAX cannot say. Processes exchange short texts through JAX's coordination service, which works before any
device is touched and needs no compiled program. No public name of JAX leads to that service (0.10 to 0.12), nor to the
place that a cluster gives a process, so `_coordination` and `_found_place` reach into JAX; only runs of several
processes need that.
"""

import atexit
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax

from fedjax_mr.errors import LostError, UserError
from fedjax_mr.experiment import coordination, heartbeats, interrupts, rendezvous

HEARTBEAT_SECONDS = 60  # after which JAX aborts the others; `heartbeats` has noticed long before, and says what to do
SHUTDOWN_SECONDS = 20  # how long a process that has ended waits for the others
JOIN_SECONDS = 300  # how long the processes of one run wait for each other at the start, unless told
CONNECT_SECONDS = 60  # how long JAX may take to connect processes that are all there
ROLL_CALL_SECONDS = 5  # after an error: how long the others have to answer before they are named as lost
EXCHANGE_SECONDS = 24 * 3600  # no limit in practice: a lost process is noticed by `heartbeats`

# What a lost process causes elsewhere: these status codes, and failed collectives, which have no code of their own.
_CODES_OF_LOSS = {"ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
_COLLECTIVES = ("Gloo", "NCCL")

T = TypeVar("T")


class Processes:
    """The processes of this run; all methods are called by all of them, in the same order.

    Attributes:
      index: this process's number.
      count: how many there are.
    """

    def __init__(self, index: int, count: int) -> None:
        """Describe the place of this process; `join_processes` makes the connection."""
        self.index = index
        self.count = count
        self._exchanges = itertools.count()
        self._said_before: str | None = None

    @property
    def writes(self) -> bool:
        """Whether this process writes metrics, pictures and the terminal."""
        return self.index == 0

    def exchange(self, text: str) -> list[str]:
        """Return every process's text, in the order of their numbers.

        Raises:
          LostError: a process is out of reach.
        """
        if self.count == 1:
            return [text]
        number = next(self._exchanges)
        names = [f"fedjax_mr/{number}/{process}" for process in range(self.count)]
        with self.lost_by_name():
            client = _client()
            client.key_value_set(names[self.index], text)
            texts = [client.blocking_key_value_get(name, EXCHANGE_SECONDS * 1000) for name in names]
            if self._said_before:  # who answered now has read all of the exchange before
                client.key_value_delete(self._said_before)
        self._said_before = names[self.index]
        return texts

    def together(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns here, once it has succeeded everywhere.

        Raises:
          UserError: it failed in some process; all of them raise.
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
        """Return in all processes what ``function``, called by process 0 alone, returns: a value that JSON can hold.

        Raises:
          UserError: it failed.
        """
        result = self.together(lambda: function() if self.writes else None)
        return result if self.count == 1 else json.loads(self.exchange(json.dumps(result))[0])

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on unless all processes know the same facts; they are compared as JSON.

        Raises:
          UserError: names the first process that differs from process 0, and the facts.
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
        """Turn the errors that JAX raises when another process is gone into one line that names it.

        Raises:
          LostError: in place of JAX's error, if there are several processes and one of them does not answer.
        """
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # JAX raises either, with the same text
            if self.count == 1 or not _speaks_of_loss(error):
                raise
            lost = self._roll_call()
            if not lost:
                raise
            reason = " ".join(str(error).split())[:160]
            _found_lost.extend(lost)
            raise LostError(heartbeats.lost_line(lost, self.count, reason)) from None

    def _roll_call(self) -> list[int]:
        """Return the processes that do not answer any more; process 0 keeps the list, so without it it is process 0."""
        client = _client()
        lost = []
        try:
            client.key_value_set(f"fedjax_mr/here/{self.index}", "here", allow_overwrite=True)
        except jax.errors.JaxRuntimeError:
            return [0]
        for process in range(self.count):
            seconds = ROLL_CALL_SECONDS if not lost else 1
            try:
                client.blocking_key_value_get(f"fedjax_mr/here/{process}", seconds * 1000)
            except jax.errors.JaxRuntimeError:
                lost.append(process)
        return [0] if 0 in lost else lost


ALONE = Processes(0, 1)
_found_lost: list[int] = []  # processes that a LostError has named


def _speaks_of_loss(error: Exception) -> bool:
    code, _, _ = str(error).partition(":")  # of a status, also where JAX turns it into a ValueError
    return code in _CODES_OF_LOSS or any(library in str(error) for library in _COLLECTIVES)


@functools.cache
def _membership() -> Processes:
    """Return the place of this process; a Python process joins at most once, so there is one."""
    state = _coordination()
    if state.client is None or state.num_processes == 1:
        return ALONE
    atexit.register(_leave_if_lost)  # called after the end of the heartbeats and before JAX's own
    heartbeats.watch(state.client, state.process_id, state.num_processes)
    return Processes(state.process_id, state.num_processes)


def _client() -> Any:
    """Return the client of the service's store of texts."""
    return _coordination().client


def _coordination() -> Any:
    """Return what JAX knows of the coordination service: its client, this process's number, how many there are."""
    try:
        from jax._src.distributed import global_state
    except ImportError:
        raise UserError(f"JAX {jax.__version__} is too new for several processes: use 0.10 to 0.12") from None
    return global_state


@dataclasses.dataclass(frozen=True)
class Place:
    """A process's place among those of its run, as the flags or the cluster say."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None = None


def join_processes(
    *, coordinator: str | None, num_processes: int | None, process_id: int | None, join_timeout: int = JOIN_SECONDS
) -> Processes:
    """Connect with the other processes of the run, before JAX touches a device.

    Without arguments JAX looks whether it runs under SLURM, Open MPI, Kubernetes or on a Cloud TPU; if not, this
    process is alone.

    Args:
      coordinator: host:port of process 0.
      num_processes: how many there are; 1 keeps JAX from looking.
      process_id: this one's number.
      join_timeout: seconds to wait for the others.

    Raises:
      LostError: the others did not come in time.
      UserError: the arguments do not fit together or with those of the others.
    """
    given = (coordinator, num_processes, process_id)
    if jax.distributed.is_initialized():
        return _membership()
    if num_processes == 1:
        return ALONE
    if any(each is not None for each in given) and None in given:
        raise UserError("--coordinator, --num_processes and --process_id belong together: give all three or none")
    if process_id is not None and num_processes is not None and process_id >= num_processes:
        raise UserError(f"--process_id={process_id} is not below --num_processes={num_processes}")
    if coordinator is not None:
        rendezvous.address_of(coordinator)
    if _jax_has_started():  # as in a notebook
        if coordinator is not None:
            raise UserError("--coordinator comes too late: JAX has already started in this process")
        return ALONE
    if coordinator is not None and num_processes is not None and process_id is not None:
        place: Place | None = Place(coordinator, num_processes, process_id)
    else:
        place = _found_place(join_timeout)
    jax.config.update("jax_enable_preemption_service", False)  # the run handles SIGTERM itself
    with contextlib.ExitStack() as until_joined:
        if place is None:
            options: dict[str, Any] = {"initialization_timeout": join_timeout}
        else:
            options = _met(place, join_timeout, until_joined)
        try:
            jax.distributed.initialize(
                **options, heartbeat_timeout_seconds=HEARTBEAT_SECONDS, shutdown_timeout_seconds=SHUTDOWN_SECONDS
            )
        except ValueError:
            if place is not None:
                raise
        except jax.errors.JaxRuntimeError as error:
            raise UserError(f"cannot join the other processes ({' '.join(str(error).split())[:200]})") from None
    return _membership() if jax.distributed.is_initialized() else ALONE


def _met(place: Place, seconds: int, until_joined: contextlib.ExitStack) -> dict[str, Any]:
    """Wait for the other processes; return what `jax.distributed.initialize` needs to connect to the service.

    Process 0 also starts the service. It ends again if ``until_joined`` is left by an exception.
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
    if given := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        host, port = rendezvous.address_of(given)
    else:
        host = rendezvous.listening_address(host)
    address = f"[{host or '::'}]:{port}" if not host or ":" in host else f"{host}:{port}"
    try:
        serve = until_joined.enter_context(coordination.prepared())
        meeting(listen_at=(host, port))
        serve(
            coordinator_bind_address=address,
            num_processes=place.num_processes,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except OSError as error:
        raise UserError(
            f"cannot start JAX's coordination service at {address} ({error}): choose another port for --coordinator"
        ) from None
    return options | {"coordinator_bind_address": coordination.UNUSED}


def _jax_has_started() -> bool:
    """Return whether JAX has touched its devices, after which it connects to nobody."""
    try:
        jax.distributed.initialize(num_processes=0, process_id=0, cluster_detection_method="deactivate")
    except ValueError:  # nothing to connect to, which JAX notices only after the question asked here
        return False
    except RuntimeError:
        return True
    raise AssertionError("JAX has joined no processes")


def _found_place(seconds: int) -> Place | None:
    """Return the place that a cluster gives this process; None if JAX knows no cluster here, or does not show it."""
    try:
        from jax._src.clusters import ClusterEnv
    except ImportError:  # of a newer JAX, which then looks and waits by itself
        return None
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    found = ClusterEnv.auto_detect_unset_distributed_params(address, None, None, None, None, seconds)
    address, num_processes, process_id, local_device_ids = found
    if address is None or num_processes is None or process_id is None:
        return None
    if os.environ.get("JAX_LOCAL_DEVICE_IDS"):  # which JAX reads where nothing else is given
        local_device_ids = None
    return Place(address, num_processes, process_id, local_device_ids)  # type: ignore[arg-type]


def leave(code: int) -> NoReturn:
    """End this process with ``code``, without waiting for processes that may be gone.

    After an error that all processes share they part in order; otherwise this one goes after a short while, in which
    the others can ask process 0 who is lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code and jax.distributed.is_initialized():
        try:
            _client().wait_at_barrier("fedjax_mr/leave", ROLL_CALL_SECONDS * 1000)
        except jax.errors.JaxRuntimeError:
            _leave_at_once(code)
    elif code:
        interrupts.leave_if_interrupted()  # do not wait for the threads of a download
    sys.exit(code)


def _leave_if_lost() -> None:
    """End a program that has called `run` and met a LostError; JAX would wait for all processes, and then abort."""
    if _found_lost:
        sys.stdout.flush()
        sys.stderr.flush()
        _leave_at_once(LostError.exit_code)


def _leave_at_once(code: int) -> NoReturn:
    if _membership().writes:
        time.sleep(heartbeats.LAST_SECONDS)
    os._exit(code)
