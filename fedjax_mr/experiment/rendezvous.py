"""The meeting of a run's processes before JAX connects them, so that a missing process can be named.

Fills: if a process is missing, `jax.distributed.initialize` (0.10 to 0.12) ignores Ctrl-C while it waits, and then
aborts with a C++ stack that names no process.

Process 0 first listens at the coordinator's port itself. Every process, process 0 included, connects, identifies itself
in one line of JSON and gets one line back: all processes are here, or an error. Then process 0 releases the port for
JAX's service (`coordination`). The port has no authentication: keep it in a private network.
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

RESOLVE_SECONDS = 10  # the name of a host that has just started may become known late
RETRY_SECONDS = 0.2
GRACE_SECONDS = 5  # the others wait this much longer than process 0, which can name the missing processes
LINE_BYTES = 4096  # the longest line
MARK = "fedjax_mr"  # the key in every line, which distinguishes our lines from those of other programs
OPENING = b'{"fedjax_mr": {'


def address_of(coordinator: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port; the host may be in square brackets.

    Raises:
      UserError: the text has another form, or the port is not in 1..65535.
    """
    host, colon, port = coordinator.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        raise UserError(f"--coordinator={coordinator} is not of the form host:port")
    if not 0 < int(port[:6]) < 2**16:
        raise UserError(f"--coordinator={coordinator}: a port is a number from 1 to 65535")
    return host, int(port)


def listening_address(host: str) -> str:
    """Choose the address at which process 0 listens, for the host in ``--coordinator``.

    Returns:
      The first address of the host that belongs to this machine, IPv4 before IPv6. Or "", which means all addresses:
      if the host has no address of this machine (address translation), or if the machine's own name resolves to a
      loopback address here (as on Debian) and to another one elsewhere.
    """
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # `_ask` reports a name that stays unknown
        return ""
    own_name = host != "localhost" and host.partition(".")[0] == socket.gethostname().partition(".")[0]
    for family, _, _, _, address in sorted(addresses, key=lambda each: each[0] != socket.AF_INET):
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
    """Wait until all processes have called this function.

    Args:
      coordinator: host:port of process 0.
      process_id: number of this process.
      num_processes: number of processes.
      seconds: how long to wait.
      listen_at: the address and port at which process 0 listens; the address "" means all addresses of this machine.
        Default: `listening_address` and the port of ``coordinator``.

    Raises:
      LostError: a process did not arrive in time. The message names the missing processes, or the address that did not
        answer.
      UserError: the address is wrong, two processes have the same number, or they differ in the number of processes.
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
            f"process 0 at {coordinator} also waits: not all {num_processes} processes arrived {waiting}"
        ) from None
    if answer is None or answer.keys() != {"code", "text"}:
        raise UserError(
            f"the program at {coordinator} is not a process 0 that waits for others: another program, or a running run"
        )
    if answer["code"]:
        kind = LostError if answer["code"] == LostError.exit_code else UserError
        raise kind(" ".join(str(answer["text"]).split()))


class _Unanswered(Exception):
    """No program listened at the address; the text is the reason of the last failed attempt."""


def _ask(host: str, port: int, line: bytes, deadline: float) -> bytes:
    """Send a line to an address, with retries, and return the answer.

    Raises:
      TimeoutError: a program listens there, but does not answer in time.
      UserError: the host has no address.
      _Unanswered: no program listened there before the deadline.
    """
    resolved_by = time.monotonic() + RESOLVE_SECONDS
    while True:
        seconds_left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=max(1.0, min(10.0, seconds_left)))
        except (socket.gaierror, UnicodeError) as error:  # UnicodeError: not a valid name
            problem = f"no address is known for the host {host!r} ({getattr(error, 'strerror', None) or 'no name'})"
            if time.monotonic() > resolved_by or isinstance(error, UnicodeError):
                raise UserError(f"--coordinator={host}:{port}: {problem}") from None
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            with connection:
                if answer := _talk(connection, line, deadline + GRACE_SECONDS):
                    return answer
            problem = "it closed the connection"
        if seconds_left < RETRY_SECONDS:
            raise _Unanswered(problem)
        time.sleep(RETRY_SECONDS)


def _talk(connection: socket.socket, line: bytes, deadline: float) -> bytes:
    """Send a line and return the answer, or the beginning of another program's answer. Empty if it disconnects.

    Raises:
      TimeoutError: no answer in time.
    """
    text = b""
    with contextlib.suppress(ConnectionError):
        if connection.getsockname() == connection.getpeername():  # TCP can connect a local port to itself
            return text
        connection.sendall(line)
        while text[: len(OPENING)] == OPENING[: len(text)] and len(text) < LINE_BYTES and not text.endswith(b"\n"):
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(LINE_BYTES)
            text += part
            if not part:
                break
    return text


# --- Process 0 -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hosting(address: str, port: int, num_processes: int, seconds: float) -> Iterator[None]:
    """Listen in a thread until all processes have their answer, at most until the block ends.

    Raises:
      UserError: the port is in use.
    """
    try:
        both = address in ("", "::") and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=num_processes, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"process 0 cannot listen at port {port} of --coordinator ({reason}): choose another port"
        ) from None
    ended = threading.Event()
    thread = threading.Thread(target=_host, args=(listener, num_processes, seconds, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _host(listener: socket.socket, num_processes: int, seconds: float, ended: threading.Event) -> None:
    """Register the processes and answer all of them at once. A process that disconnects before is not counted."""
    deadline = time.monotonic() + seconds
    present: dict[int, tuple[socket.socket, str]] = {}  # connection and host by number of the process
    answer = None
    with listener, selectors.DefaultSelector() as selector, contextlib.ExitStack() as at_the_end:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        while not ended.is_set() and not (answer and 0 in present):  # process 0 needs the answer, too
            for connection in [key.fileobj for key, _ in selector.select(RETRY_SECONDS)]:
                if connection is listener:
                    with contextlib.suppress(OSError):  # already disconnected
                        connection = at_the_end.enter_context(listener.accept()[0])
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                elif introduction := _read_introduction(connection):
                    problem = _register(connection, introduction, present, num_processes)
                    answer = answer or problem
                else:
                    present = {process: each for process, each in present.items() if each[0] is not connection}
                    selector.unregister(connection)
            missing = [process for process in range(num_processes) if process not in present]
            if answer is None and not missing:
                answer = _line(code=0, text="all processes are here")
            elif answer is None and time.monotonic() > deadline:
                named = f"process{'es' * (len(missing) > 1)} {_enumerated(missing)} of {num_processes}"
                problem = f"{named} did not arrive within {seconds:g} s (--join_timeout)"
                answer = _line(code=LostError.exit_code, text=problem)
        for key in list(selector.get_map().values()):
            if key.fileobj is not listener and answer:
                with contextlib.suppress(OSError):
                    key.fileobj.sendall(answer)  # type: ignore[union-attr]


def _read_introduction(connection: Any) -> dict[str, Any] | None:
    """Read the line in which a process identifies itself. None if it has disconnected or is another program."""
    with contextlib.suppress(OSError):
        content = _parse(connection.recv(LINE_BYTES)) or {}
        if {name: type(value) for name, value in content.items()} == {"process": int, "of": int, "host": str}:
            return content
    return None


def _register(
    connection: Any, introduction: dict[str, Any], present: dict[int, tuple[socket.socket, str]], num_processes: int
) -> bytes | None:
    """Add a process to those present. If it cannot belong to the run, return the answer to all processes instead."""
    process, of, host = introduction["process"], introduction["of"], introduction["host"]
    if of != num_processes:
        problem = f"process {process} on {host} was started with --num_processes={of}, process 0 with {num_processes}"
    elif process in present:
        problem = f"two processes were started with --process_id={process}, on {present[process][1]} and on {host}"
    else:
        present[process] = connection, host
        return None
    return _line(code=UserError.exit_code, text=problem)


def _enumerated(numbers: Sequence[int]) -> str:
    """At most ten numbers as text."""
    *words, last = map(str, numbers)
    if len(words) > 9:
        words, last = words[:9], f"{len(words) - 8} more"
    return f"{', '.join(words)} and {last}" if words else last


# --- Lines -----------------------------------------------------------------------------------------------------------


def _line(**content: Any) -> bytes:
    return json.dumps({MARK: content}).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The content of a line, or None for a line of another program."""
    try:
        content = json.loads(line)[MARK]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
