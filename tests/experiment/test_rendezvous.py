"""The meeting of processes, with threads in their place: who is missing is named, and what is wrong, to everybody."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedjax_mr.errors import LostError, UserError
from fedjax_mr.experiment import rendezvous


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.01)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(port, numbers, *, count=3, seconds=0.3, **options):
    """Let processes meet, all at once; return what each raised, or None."""

    def come(number):
        try:
            rendezvous.meet(
                f"127.0.0.1:{port}",
                process_id=number,
                num_processes=options.get("counts", {}).get(number, count),
                seconds=seconds,
            )
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(come, numbers))


def assert_all_say(errors, kind, text):
    assert {type(error) for error in errors} == {kind}
    assert {str(error) for error in errors} == {text}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_are_here_and_the_port_is_free_again(port, count):
    for _ in range(2):
        assert meet(port, range(count), count=count, seconds=20) == [None] * count
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(
    ("numbers", "count", "said"),
    [
        ([0], 2, "process 1 of 2"),
        ([0, 2], 3, "process 1 of 3"),
        ([0, 1], 4, "processes 2 and 3 of 4"),
        ([0], 20, "processes 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10 more of 20"),
    ],
)
def test_the_missing_are_named_to_all_who_came(port, numbers, count, said):
    errors = meet(port, numbers, count=count)
    assert_all_say(errors, LostError, f"{said} did not arrive within 0.3 s (--join_timeout)")
    assert errors[0].exit_code == 4


def test_without_process_0_its_address_is_named(port):
    (error,) = meet(port, [1])
    assert isinstance(error, LostError)
    assert str(error).startswith(f"process 0 does not answer at 127.0.0.1:{port} within 0.3 s (--join_timeout): ")


def test_one_number_for_two_is_told_to_all(port):
    here = socket.gethostname()
    said = f"two processes were started with --process_id=1, on {here} and on {here}"
    assert_all_say(meet(port, [0, 1, 1], seconds=20), UserError, said)


def test_another_count_is_told_to_all(port):
    said = f"process 1 on {socket.gethostname()} was started with --num_processes=4, process 0 with 3"
    assert_all_say(meet(port, [0, 1], counts={1: 4}, seconds=20), UserError, said)


def test_strangers_and_those_who_hang_up_do_not_count(port):
    hello = lambda **said: json.dumps({rendezvous.MARK: said}).encode() + b"\n"
    lines = [
        b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9000, b"[1]\n", hello(), hello(process=1),
        hello(process=[], of=3, host=""), hello(process=True, of=3, host=""), hello(process=1, of=3, host="gone"),
    ]  # fmt: skip

    def disturb():
        for line in lines:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as other:
                other.sendall(line)
                time.sleep(0.01)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, port, [0], seconds=20)
        while not first.done():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
        disturb()
        assert meet(port, [1, 2], seconds=20) == [None, None]
        assert first.result() == [None]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.0 400 Bad request\r\n\r\n", "is not a process 0 that waits for others"),
        (b"\x00\x00\x12\x04\x00", "is not a process 0 that waits for others"),
        (b'{"fedjax_mr": {}}\n', "is not a process 0 that waits for others"),
        (b'{"fedjax_mr": {"code": 2, "text": "two\\nlines"}}\n', "two lines"),
        (b"", "also waits: not all 3 processes arrived within 0.3 s"),
    ],
)
def test_other_programs_are_told_apart(port, monkeypatch, answer, said):
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 0.1)
    over = threading.Event()

    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)
            over.wait(20)

    with socket.create_server(("127.0.0.1", port)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(serve, listener)
        (error,) = meet(port, [1])
        over.set()
    assert said in str(error) and "\n" not in str(error)


def test_process_0_listens_at_the_given_host_alone(port):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, port, [0], count=2, seconds=20)
        assert meet(port, [1], count=2, seconds=20) == [None] and first.result() == [None]
        for address, reached in (("127.0.0.1", False), ("", True)):
            with rendezvous._hosting(address, port, 2, 0.1):
                other = socket.socket()  # 127.0.0.2 is this machine, too
                assert (other.connect_ex(("127.0.0.2", port)) == 0) == reached
                other.close()


@pytest.mark.parametrize(
    ("host", "found", "address"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("localhost", ["::1", "127.0.0.1"], "127.0.0.1"),
        ("alias", ["127.0.0.1"], "127.0.0.1"),
        ("node1", ["127.0.1.1"], ""),  # as Debian has it; the other machines know another address
        ("node1.cluster", ["127.0.1.1"], ""),
        ("node1", ["192.0.2.1"], ""),  # not of this machine: behind address translation
        ("nobody", [], ""),
    ],
)
def test_where_process_0_listens(monkeypatch, host, found, address):
    def look_up(*_, **__):
        if not found:
            raise socket.gaierror
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in each], socket.SOCK_STREAM, 6, "", (each, 0)) for each in found]

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert rendezvous.listening_address(host) == address


def test_a_port_that_is_taken(port):
    with socket.create_server(("", port)):
        (error,) = meet(port, [0])
    assert f"process 0 cannot listen at port {port} of --coordinator (Address already in use)" in str(error)


def test_a_host_that_nobody_knows(port, monkeypatch):
    monkeypatch.setattr(rendezvous, "RESOLVE_SECONDS", 0)
    for host in ("no.such.host.invalid", "a" * 70 + ".b"):
        with pytest.raises(UserError, match="no address is known for the host") as caught:
            rendezvous.meet(f"{host}:{port}", process_id=1, num_processes=2, seconds=20)
        assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "coordinator", ["localhost", ":1", "localhost:", "localhost:1.5", "localhost:٣", "localhost:-1"]
)
def test_what_is_no_address(coordinator):
    with pytest.raises(UserError, match="not of the form host:port"):
        rendezvous.address_of(coordinator)


@pytest.mark.parametrize("port", ["0", "65536", "99999999", "9" * 5000])
def test_what_is_no_port(port):
    with pytest.raises(UserError, match="a port is a number from 1 to 65535"):
        rendezvous.address_of(f"localhost:{port}")


def test_addresses():
    assert rendezvous.address_of("localhost:65535") == ("localhost", 65535)
    assert rendezvous.address_of("[::1]:1") == ("::1", 1)
