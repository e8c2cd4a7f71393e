"""Ctrl-C in a command is one line and code 130, whenever it comes and whatever swallows it."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

import fedjax_mr
from fedjax_mr.deploy import server
from fedjax_mr.errors import Interrupted, UserError
from fedjax_mr.terminal import interrupts, streams
from fedjax_mr.testing.messages import fake_messenger


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    monkeypatch.setattr(interrupts, "_received", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def swallowed_in_a_destructor():
    class Garbage:
        def __del__(self):
            ctrl_c()

    Garbage()
    time.sleep(20)


def swallowed_by_a_library():
    with contextlib.suppress(BaseException):
        ctrl_c()
    interrupts.check()
    pytest.fail("it went on")


@pytest.mark.parametrize("main", [ctrl_c, swallowed_in_a_destructor, swallowed_by_a_library])
def test_ctrl_c_is_one_line(main, capfd):
    assert interrupts.run(main) == 130
    assert capfd.readouterr() == ("", "fedjax-mr: interrupted\n")


@pytest.mark.parametrize(("message", "reported"), [("Event loop is closed", False), ("another error", True)])
def test_threads_that_end_after_a_failed_write_are_not_reported(message, reported, capfd):
    class Garbage:
        def __del__(self):
            raise RuntimeError(message)

    assert interrupts.run(lambda: Garbage() and None) is None
    assert (message in capfd.readouterr().err) == reported


def test_without_ctrl_c_nothing_changes():
    interrupts.check()
    assert interrupts.run(lambda: 3) == 3
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells do for what they start in the background
    assert interrupts.run(lambda: signal.getsignal(signal.SIGINT)) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-m fedjax_mr.main --lr=1", True),
        ("-X dev -m fedjax_mr.sweep", True),
        ("/usr/bin/fedjax-mr --lr=1", True),
        ("train.py -m", False),
        ("-m pytest -m fedjax_mr.main", False),
        ("-m fedjax_mr.sweep.process 6", False),  # a process that the command has started
        ("-c from_multiprocessing --multiprocessing-fork", False),
        ("", False),  # interactive
    ],
)
def test_only_commands_change_what_ctrl_c_does(monkeypatch, words, expected):
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split()])
    assert fedjax_mr._is_for_a_command() == expected


@pytest.mark.parametrize("name", ["sweep", "data"])  # packages, whose own imports come before the command's
def test_ctrl_c_while_a_command_imports_is_one_line(name):
    slow = "import signal, os, sys; os.kill(os.getpid(), signal.SIGINT)"  # at the first import of JAX
    script = f"""
import runpy, sys
class Press:
    def find_spec(self, name, *rest):
        if name == "jax":
            {slow}
sys.orig_argv[1:] = ["-m", "fedjax_mr.{name}"]
sys.meta_path.insert(0, Press())
runpy.run_module("fedjax_mr.{name}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (interrupts.EXIT_CODE, interrupts.LINE)


def test_importing_the_package_imports_nothing_and_its_names_leave_signals_and_devices_alone():
    script = """
import signal, sys
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook
import fedjax_mr as fmr
ours = {name for name in sys.modules if name.startswith("fedjax_mr")}
assert ours == {"fedjax_mr"} and "jax" not in sys.modules, ours
from fedjax_mr import *
import jax
assert Simulator is fmr.Simulator and fmr.trees.mean and set(dir(fmr)) == set(fmr.__all__) <= set(globals())
assert not hasattr(fmr, "Simulater") and not hasattr(fmr, "_private")
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before
assert jax.config.values["jax_platforms"] is None
jax.config.update("jax_num_cpu_devices", 3)  # refused if JAX had started
"""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


@pytest.mark.parametrize(
    "words",
    [
        "main --help",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("sweep --help", "analysis", "deploy --help")),
    ],
)
def test_a_reader_that_leaves_ends_a_command_without_a_traceback(words):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", *f"fedjax_mr.{words}".split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == streams.CLOSED_PIPE == 141


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.15, 0.7, 1.5, 2.5, 3.5, 5.0])
def test_the_real_command_while_it_starts(tmp_path, seconds):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedjax_mr.main", f"--run_dir={tmp_path / 'run'}", "--rounds=100000", "--noprogress"],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, shown = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert shown.splitlines()[-1].startswith(("fedjax-mr: interrupted", "fedjax-mr: stopped after round "))
    assert "Traceback" not in shown


def test_a_stopped_server_of_real_clients_tells_flower(monkeypatch):
    """Flower catches every `Exception` of an app and reports it; anything else would leave the run as "running"."""

    def stop(*_):
        raise Interrupted("stopped after round 3", 143)

    monkeypatch.setattr(server, "run", stop)
    with pytest.raises(UserError, match="stopped after round 3"):
        server.serve(fake_messenger({}), {"flags": "", "server-data": "server.npz"})


def test_a_second_sigterm_of_a_scheduler_does_not_end_a_run_at_once_and_a_second_ctrl_c_does():
    with interrupts.stop_signals() as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
    assert received == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
