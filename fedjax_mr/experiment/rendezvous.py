"""The meeting of a run's processes before JAX connects them, so that who is missing can be named.

JAX's own way to wait (0.10 to 0.12) hears no Ctrl-C and ends in an abort with a C++ stack when somebody stays away. So
process 0 first listens at the coordinator's port itself. Everybody, process 0 included, connects, says who it is in one
line of JSON and gets one line as the answer: all are here, or what is wrong. Then process 0 gives the port to JAX's
service (`coordination`). Nobody logs in at this port: keep it in a private network.
"""

import contextlib
import ipaddress
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_mr.errors import LostError, UserError

RESOLVE_SECONDS = 10  # a name that nobody knows for so long is mistyped; that of a host just started can be late
RETRY_SECONDS = 0.2
GRACE_SECONDS = 5  # how much longer the others wait for process 0, which can name who is missing
MOST_BYTES = 4096  # of a line
MARK = "fedjax_mr"  # the name in every line, which tells them from those of other programs
OPENING = b'{"fedjax_mr": {'


def address_of(coordinator: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; the host may be in square brackets.

    Raises:
      UserError: it is not of this form, or there is no such port.
    """
    host, colon, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        raise UserError(f"--coordinator={coordinator} is not of the form host:port")
    if not 0 < int(port[:6]) < 2**16:
        raise UserError(f"--coordinator={coordinator}: a port is a number from 1 to 65535")
    return host, int(port)


def listening_address(host: str) -> str:
    """Choose the address of this machine at which process 0 listens, for the host in ``--coordinator``.

    It is the first address of that host that belongs to this machine, IPv4 before IPv6. It is "", all addresses, where
    the host is none of this machine's (behind address translation), or where the machine's own name means a loopback
    address here (as on Debian) and another one elsewhere.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # `_ask` reports it, if it stays so
        return ""
    own_name = host != "localhost" and host.partition(".")[0] == socket.gethostname().partition(".")[0]
    for family, _, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        if own_name and ipaddress.ip_address(address[0]).is_loopback:
            continue
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
            return str(address[0])
    return ""


def meet(
    coordinator: str,
    *,
    process_id: int,
    num_processes: int,
    seconds: float,
    listen_at: tuple[str, int] | None = None,
) -> None:
    """Return once all processes are here; all of them call this.

    Args:
      coordinator: host:port of process 0.
      process_id: this one's number.
      num_processes: how many there are.
      seconds: how long to wait.
      listen_at: the address and port at which process 0 listens; the address "" means all of this machine. Default:
        `listening_address` and the port of ``coordinator``.

    Raises:
      LostError: somebody did not come in time; the message names who, or the address that did not answer.
      UserError: the address is wrong, or two processes have one number or differ in how many there are.
    """
    host, port = address_of(coordinator)
    waiting = f"within {seconds:g} s (--join_timeout)"
    line = _line(process=process_id, of=num_processes, host=socket.gethostname())
    hosting: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if process_id == 0:
        hosting = _hosting(*(listen_at or (listening_address(host), port)), num_processes, seconds)
    try:
        with hosting:
            answer = _parse(_ask(host, port, line, time.monotonic() + seconds))
    except _Unanswered as error:
        raise LostError(f"process 0 does not answer at {coordinator} {waiting}: {error}") from None
    except TimeoutError:
        raise LostError(
            f"process 0 at {coordinator} waits for other processes, too: not all {num_processes} came {waiting}"
        ) from None
    if answer is None or answer.keys() != {"code", "said"}:
        raise UserError(
            f"what listens at {coordinator} is no process 0 that waits for others: another program, or a run under way"
        )
    if answer["code"]:
        kind = LostError if answer["code"] == LostError.exit_code else UserError
        raise kind(" ".join(str(answer["said"]).split()))


class _Unanswered(Exception):
    """Nobody has listened; the text says why the last try failed."""


def _ask(host: str, port: int, line: bytes, deadline: float) -> bytes:
    """Return the answer to a line, from whoever listens there.

    Raises:
      TimeoutError: somebody listens, but does not answer in time.
      UserError: the host has no address.
      _Unanswered: nobody has listened until the deadline.
    """
    resolved_by = time.monotonic() + RESOLVE_SECONDS
    while True:
        seconds_left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=max(1.0, min(10.0, seconds_left)))
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: no name that DNS could hold
            problem = f"no address is known for the host {host!r} ({getattr(error, 'strerror', None) or 'no name'})"
            if time.monotonic() > resolved_by or isinstance(error, UnicodeError):
                raise UserError(f"--coordinator={host}:{port}: {problem}") from None
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            with connection:
                if answer := _talk(connection, line, deadline + GRACE_SECONDS):
                    return answer
            problem = "it hung up"
        if seconds_left < RETRY_SECONDS:
            raise _Unanswered(problem)
        time.sleep(RETRY_SECONDS)


def _talk(connection: socket.socket, line: bytes, deadline: float) -> bytes:
    """Send a line and return the answer, of other programs its beginning; nothing if the other one hangs up.

    Raises:
      TimeoutError: no answer came in time.
    """
    text = b""
    with contextlib.suppress(ConnectionError):
        if connection.getsockname() == connection.getpeername():  # TCP can connect a port of this machine with itself
            return text
        connection.sendall(line)
        while text[: len(OPENING)] == OPENING[: len(text)] and len(text) < MOST_BYTES and not text.endswith(b"\n"):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(MOST_BYTES)
            text += part
            if not part:
                break
    return text


# --- Process 0 -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hosting(address: str, port: int, num_processes: int, seconds: float) -> Iterator[None]:
    """Listen there in a thread of its own until all have their answer, at the latest until the block ends.

    Raises:
      UserError: the port is taken.
    """
    try:
        both = address in ("", "::") and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=num_processes, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"process 0 cannot listen at port {port} of --coordinator ({reason}): choose another one"
        ) from None
    over = threading.Event()
    thread = threading.Thread(target=_host, args=(listener, num_processes, seconds, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _host(listener: socket.socket, num_processes: int, seconds: float, over: threading.Event) -> None:
    """Take in the others and answer all of them at once; a process that hangs up before has not come."""
    deadline = time.monotonic() + seconds
    came: dict[int, tuple[socket.socket, str]] = {}  # connection and host by number
    answer = None
    with listener, selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_the_end:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while not over.is_set() and not (answer and 0 in came):  # process 0 itself has to hear the answer, too
            for connection in [key.fileobj for key, _ in selector.select(RETRY_SECONDS)]:
                if connection is listener:
                    with contextlib.suppress(OSError):  # it has hung up already
                        connection = at_the_end.enter_context(listener.accept()[0])
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                elif said := _hear(connection):
                    problem = _take_in(connection, said, came, num_processes)
                    answer = answer or problem
                else:
                    came = {process: each for process, each in came.items() if each[0] is not connection}
                    selector.unregister(connection)
            missing = [process for process in range(num_processes) if process not in came]
            if answer is None and not missing:
                answer = _line(code=0, said="all are here")
            elif answer is None and time.monotonic() > deadline:
                named = f"process{'es' * (len(missing) > 1)} {_enumerated(missing)} of {num_processes}"
                problem = f"{named} did not come within {seconds:g} s (--join_timeout)"
                answer = _line(code=LostError.exit_code, said=problem)
        for key in list(selector.get_map().values()):
            if key.fileobj is not listener and answer:
                with contextlib.suppress(OSError):
                    key.fileobj.sendall(answer)  # type: ignore[union-attr]


def _hear(connection: Any) -> dict[str, Any] | None:
    """Return what a process says of itself; None if it has hung up, or is no process of a run."""
    with contextlib.suppress(OSError):
        said = _parse(connection.recv(MOST_BYTES))
        if said and {name: type(value) for name, value in said.items()} == {"process": int, "of": int, "host": str}:
            return said
    return None


def _take_in(
    connection: Any, said: dict[str, Any], came: dict[int, tuple[socket.socket, str]], num_processes: int
) -> bytes | None:
    """Note that a process has come; return the answer to everybody if it cannot belong to the run."""
    process, of, host = said["process"], said["of"], said["host"]
    if of != num_processes:
        problem = f"process {process} on {host} was started with --num_processes={of}, process 0 with {num_processes}"
    elif process in came:
        problem = f"two processes were started with --process_id={process}, on {came[process][1]} and on {host}"
    else:
        came[process] = connection, host
        return None
    return _line(code=UserError.exit_code, said=problem)


def _enumerated(numbers: Sequence[int]) -> str:
    """Return numbers in words, at most ten of them."""
    *words, last = map(str, numbers)
    if len(words) > 9:
        words, last = words[:9], f"{len(words) - 8} more"
    return f"{', '.join(words)} and {last}" if words else last


# --- Lines -----------------------------------------------------------------------------------------------------------


def _line(**said: Any) -> bytes:
    return json.dumps({MARK: said}).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return what a line says, or None if it is none of ours."""
    try:
        said = json.loads(line)[MARK]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return said if isinstance(said, dict) else None
