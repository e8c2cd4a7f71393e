"""JAX's coordination service in a small process of its own, which outlives process 0.

Fills: JAX (0.10 to 0.12) runs the service inside process 0. If process 0 is killed, JAX aborts all other processes
within 0.2 s with pages of C++, also with ``jax_enable_recoverability``.

Process 0 starts a child process that runs the service. If process 0 dies, the others stay connected, and exit with one
line after `heartbeats` has noticed the loss.

`jax.distributed.initialize` with process_id=0 starts a service at ``coordinator_bind_address`` and then connects a
client to ``coordinator_address``. The child passes its client the address of a socket that never answers, so the child
only serves. Process 0 connects its client to the child. JAX also starts a service in process 0 (at `UNUSED`), which has
no clients.

The child runs this file as its program. It imports nothing from this package, because that takes seconds.
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

LINGER_SECONDS = 30  # how long the service outlives process 0; the others notice its loss after 20 s (`heartbeats`)
POLL_SECONDS = 0.2
FOREVER_SECONDS = 10**8  # timeout of the connection to the socket that never answers
UNUSED = "127.0.0.1:0"  # a free loopback port, for the unused service in process 0
READY = b"ready\n"


@contextlib.contextmanager
def prepared() -> Iterator[Callable[..., None]]:
    """Start the child, which imports JAX meanwhile, and yield the function that starts the service.

    The function takes the arguments of `jax.distributed.initialize` that configure the service, and returns when the
    service listens. If the block raises, the child is killed.

    Raises:
      ChildProcessError: from that function, if the service could not be started.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # finds JAX where this process found it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # JAX's messages about lost processes repeat those of `heartbeats`
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
    )
    try:
        with child.stdin, child.stdout:  # type: ignore[union-attr]
            yield functools.partial(_serve, child)
    except BaseException:
        child.kill()
        child.wait()
        raise
    threading.Thread(target=child.wait, name="coordination", daemon=True).start()  # avoids a zombie process


def _serve(child: subprocess.Popen[bytes], **options: Any) -> None:
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(options).encode() + b"\n")  # type: ignore[union-attr]
        child.stdin.flush()  # type: ignore[union-attr]
    if child.stdout.readline() != READY:  # type: ignore[union-attr]
        raise ChildProcessError(f"the process of JAX's coordination service ended with code {child.wait()}")


# --- The child -------------------------------------------------------------------------------------------------------


def _main(parent: int) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # schedulers send these to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # process 0 has exited
        return
    options = json.loads(line)
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    threading.Thread(target=_initialize, args=(address, options), daemon=True).start()
    _client = silent.accept()  # JAX connects its client after its service listens; kept open, without an answer
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    while os.getppid() == parent:  # not a closed pipe, which forks of process 0 may hold open
        time.sleep(POLL_SECONDS)
    port = int(options["coordinator_bind_address"].rpartition(":")[2])
    until = time.monotonic() + LINGER_SECONDS
    while _is_connected(port) and time.monotonic() < until:
        time.sleep(POLL_SECONDS)


def _initialize(address: str, options: dict[str, Any]) -> None:
    try:
        jax.distributed.initialize(
            address,
            process_id=0,
            initialization_timeout=FOREVER_SECONDS,
            cluster_detection_method="deactivate",
            **options,
        )
    finally:
        os._exit(1)  # the service could not listen, which `_serve` reports


def _is_connected(port: int) -> bool:
    """Whether another process is connected to a port of this process."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # not a socket, not connected, or already closed
            own = socket.socket(fileno=int(name))
            try:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == port:
                    own.getpeername()
                    return True
            finally:
                own.detach()  # keeps it open, because it belongs to JAX
    return False


if __name__ == "__main__":
    _main(int(sys.argv[1]))
    os._exit(0)  # JAX's threads still wait
