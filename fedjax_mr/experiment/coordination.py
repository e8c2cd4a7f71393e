"""JAX's coordination service in a small process of its own, which outlives process 0.

JAX (0.10 to 0.12) runs this service inside process 0. When process 0 is killed, the service is gone, and JAX aborts
every other process at once with pages of C++. Therefore process 0 starts a child process that runs the service. When
process 0 dies, the others stay connected. `heartbeats` notices that process 0 is silent, and they exit with one line.

`jax.distributed.initialize` with process_id=0 starts a service at ``coordinator_bind_address`` and then connects a
client to ``coordinator_address``. The child gives its client the address of a socket that never answers, so it only
serves. Process 0 connects its client to the child; the service that JAX starts in process 0 as well (at `UNUSED`) has
no clients.

The child runs this file as its program. The file imports nothing from this package, because that takes seconds.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

LINGER_SECONDS = 30  # how long the service outlives process 0; the others need 20 s to notice (`heartbeats`)
POLL_SECONDS = 0.2
FOR_EVER_SECONDS = 10**8  # of waiting for the socket that never answers
UNUSED = "127.0.0.1:0"  # a free loopback port, for the service in process 0 that nobody uses
READY = b"ready\n"


@contextlib.contextmanager
def prepared() -> Iterator[Callable[..., None]]:
    """Start the child, which imports JAX in the meantime, and yield the function that lets it serve.

    The function takes the arguments of `jax.distributed.initialize` that concern the service, and returns when the
    service listens. If the block raises, the child is killed.

    Raises:
      ChildProcessError: from that function; the service could not be started.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # finds JAX where this process found it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # JAX's messages about lost processes repeat what `heartbeats` says
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )
    try:
        with child.stdin, child.stdout:  # type: ignore[union-attr]
            yield functools.partial(_serve, child)
    except BaseException:
        child.kill()
        child.wait()
        raise
    threading.Thread(target=child.wait, name="coordination", daemon=True).start()  # leaves no zombie


def _serve(child: subprocess.Popen[bytes], **options: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(options).encode() + b"\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
    if child.stdout.readline() != READY:  # type: ignore[union-attr]
        raise ChildProcessError(f"the process of JAX's coordination service ended with code {child.wait()}")


# --- The child -------------------------------------------------------------------------------------------------------


def _main(parent: int) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # schedulers send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # process 0 has died
        return
    options = json.loads(line)
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    threading.Thread(target=_initialize, args=(address, options), daemon=True).start()
    _client = silent.accept()  # JAX connects its client only when its service listens; kept open, without an answer
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while os.getppid() == parent:  # a closed pipe says less: processes that process 0 has forked may hold it open
        time.sleep(POLL_SECONDS)
    port = int(options["coordinator_bind_address"].rpartition(":")[2])
    until = time.monotonic() + LINGER_SECONDS
    while _anybody_at(port) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def _initialize(address: str, options: dict[str, Any]) -> None:
    try:
        jax.distributed.initialize(
            address,
            process_id=0,
            initialization_timeout=FOR_EVER_SECONDS,
            cluster_detection_method="deactivate",
            **options,
        )
    finally:
        os._exit(1)  # the service could not listen (or 3 years have passed); `_serve` says so


def _anybody_at(port: int) -> bool:
    """Return whether another process is connected to a port of this process."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # no socket, not connected, or closed by now
            own = socket.socket(fileno=int(name))
            try:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == port:
                    own.getpeername()
                    return True
            finally:
                own.detach()  # it stays open: it belongs to JAX
    return False


if __name__ == "__main__":
    _main(int(sys.argv[1]))
    os._exit(0)  # JAX's threads still wait
