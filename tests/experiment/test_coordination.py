"""The process of JAX's coordination service: it outlives process 0 while others are connected, and not for long."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from fedjax_mr.experiment import coordination

PARENT = """
import os, sys
sys.path.insert(0, {folder!r})
import coordination
with coordination.prepared() as serve:
    serve(coordinator_bind_address="127.0.0.1:{port}", num_processes=2)
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port, host="127.0.0.1"):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def wait_until(true, seconds):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextlib.contextmanager
def parent(port):
    """Yield a process 0 whose service listens at a port."""
    program = PARENT.format(folder=os.path.dirname(coordination.__file__), port=port)
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdin=subprocess.PIPE) as process:
        wait_until(lambda: listens(port) or process.poll() is not None, 60)
        yield process
        process.kill()


def test_it_outlives_a_killed_process_0_until_the_others_have_gone(port):
    with parent(port) as process:
        with socket.create_connection(("127.0.0.1", port)):
            process.kill()
            process.wait()
            time.sleep(10 * coordination.POLL_SECONDS)
            assert listens(port)
        wait_until(lambda: not listens(port), 10)


def test_it_ends_at_once_where_nobody_is_left(port):
    with parent(port) as process:
        assert not listens(port, "127.0.0.2")  # at the address that was given, and at no other one
        process.communicate()
        wait_until(lambda: not listens(port), 10)


@pytest.mark.slow  # half a minute
def test_it_ends_although_somebody_stays_connected(port):
    with parent(port) as process, socket.create_connection(("127.0.0.1", port)):
        process.kill()
        began = time.monotonic()
        wait_until(lambda: not listens(port), coordination.LINGER_SECONDS + 10)
        assert time.monotonic() - began > coordination.LINGER_SECONDS - 5


def test_a_port_that_is_taken_meanwhile(port):
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ChildProcessError, match="coordination service ended with code"),
        coordination.prepared() as serve,
    ):
        serve(coordinator_bind_address=f"127.0.0.1:{port}", num_processes=2)


def test_it_is_not_left_behind_by_a_meeting_that_fails():
    with pytest.raises(ZeroDivisionError), coordination.prepared() as serve:
        child = serve.args[0]
        raise ZeroDivisionError
    assert child.returncode is not None
