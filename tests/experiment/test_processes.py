"""Several processes: the same numbers as one, one writer, named refusals, and an end when one dies."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_mr as fmr
from fedjax_mr.errors import UserError
from fedjax_mr.experiment import processes as distributed
from fedjax_mr.experiment.checkpoint import Checkpoints
from fedjax_mr.experiment.processes import (
    LostError,
    Processes,
    connected,
    join_processes,
    lost_in_one_line,
)
from fedjax_mr.terminal import interrupts

SMALL: dict[str, Any] = dict(
    model="logistic", clients=6, cohort=4, local_epochs=1, rounds=4, eval_every=2, lr=0.05, progress=False
)
LONG: dict[str, Any] = SMALL | dict(rounds=2000)
LOST = "fedjax-mr: another process of this run is lost"
MANY = pytest.mark.parametrize(("processes", "devices"), [(2, 2), (4, 1)])


# --- What processes say to each other, with threads in their place ---------------------------------------------------


def in_each(count, function):
    """Call ``function(processes)`` in ``count`` threads of a new run; return what each returned or raised."""
    meeting, arrays = threading.Barrier(count, timeout=20), [np.zeros(0)] * count

    def call(index):
        def gather(array):
            meeting.wait()  # all have read what was gathered before
            arrays[index] = array
            meeting.wait()
            assert len({each.shape for each in arrays}) == 1
            return np.stack(arrays)

        try:
            return function(Processes(index, count, gather))
        except UserError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


def test_exchange_is_in_the_order_of_the_processes():
    def talk(processes):
        return [processes.exchange(f"{processes.index} säyß {'x' * 100 * processes.index * n}") for n in range(20)]

    expected = [[f"{index} säyß {'x' * 100 * index * n}" for index in range(3)] for n in range(20)]
    assert in_each(3, talk) == [expected] * 3
    assert in_each(2, lambda processes: processes.exchange("")) == [["", ""]] * 2


def test_a_failure_anywhere_is_a_failure_everywhere():
    def fail(processes):
        def own():
            if processes.index == 1:
                raise UserError("no data here")
            return processes.index

        return processes.together(own)

    assert list(map(str, in_each(3, fail))) == [
        "process 1 failed: no data here", "no data here", "process 1 failed: no data here"
    ]  # fmt: skip
    assert in_each(3, lambda processes: processes.together(lambda: processes.index)) == [0, 1, 2]


def test_the_first_process_decides():
    called = []

    def decide(processes):
        return processes.on_first(lambda: called.append(processes.index) or ["a", 1])

    assert in_each(3, decide) == [["a", 1]] * 3
    assert called == [0]


def test_all_take_the_checkpoint_that_the_first_process_finds_whole(tmp_path):
    for round in (1, 2):
        Checkpoints(tmp_path).save(round, {"a": np.arange(3)}, {})
    (tmp_path / "2" / "manifest.json").write_text("")
    first, *others = in_each(3, lambda processes: Checkpoints(tmp_path, processes=processes).newest_intact())
    assert first[0] == 1 and "kept as damaged-2" in first[1][0]
    assert others == [first] * 2


def test_differences_are_named():
    def meet(processes):
        processes.agree({"jax": "0.10.2", "seed": 7 if processes.index == 2 else 0})

    for error in in_each(3, meet):
        assert f"process 2 on {socket.gethostname()} was started differently: seed: 7 (process 0: 0)" in str(error)
    assert in_each(2, lambda processes: processes.agree({"seed": 0})) == [None, None]


@pytest.fixture
def joined(monkeypatch):
    """A process that has joined others; return the functions that Python calls at its end."""
    at_the_end = []
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed.atexit, "register", lambda *call: at_the_end.append(call))
    return at_the_end


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
@pytest.mark.parametrize("text", ["UNKNOWN: Gloo AllReduce failed:\nConnection closed by peer", "UNAVAILABLE: gone"])
def test_a_failed_transfer_is_a_lost_process(joined, kind, text):
    with pytest.raises(LostError) as caught, lost_in_one_line():
        raise kind(text)
    assert str(caught.value) == f"another process of this run is lost: go on with --resume ({' '.join(text.split())})"
    assert caught.value.exit_code == 4
    assert joined == [(distributed._exit_at_once, 4)]  # instead of JAX's wait and its abort


def test_our_own_mistakes_are_not_blamed_on_others(joined, monkeypatch):
    with pytest.raises(ValueError, match="ours"), lost_in_one_line():
        raise ValueError("ours")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="Gloo"), lost_in_one_line():
        raise ValueError("Gloo")
    assert joined == []


ABORTING = """
import os
from fedjax_mr.experiment import processes

before = processes._end_aborts_with("first")
processes._end_aborts_with("another process is lost")
if {restored}:
    processes._on_abort(before)
os.abort()
"""


def test_an_abort_ends_with_our_line_and_code():
    """`os.abort` is what JAX calls in C++ when another process is lost."""
    ended = [
        subprocess.run([sys.executable, "-c", ABORTING.format(restored=restored)], capture_output=True, text=True)
        for restored in (False, True)
    ]
    assert [each.returncode for each in ended] == [4, -signal.SIGABRT]
    assert ended[0].stderr == "fedjax-mr: another process is lost\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, None), "belong together"),
        (("localhost:1", 2, 2), "--process_id=2 is not below --num_processes=2"),
        (("localhost", 2, 0), "not of the form host:port"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        join_processes(**dict(zip(("coordinator", "num_processes", "process_id"), arguments, strict=True)))


@pytest.mark.parametrize(
    ("coordinator", "message"),
    [
        *((text, "not of the form host:port") for text in (":1", "localhost:", "localhost:1.5", "localhost:٣")),
        *((f"localhost:{port}", "a port is a number from 1 to 65535") for port in ("0", "65536", "9" * 5000)),
        *((f"{host}:1", "no address is known for the host") for host in ("no.such.host.invalid", "a" * 70 + ".b")),
    ],
)
def test_what_is_no_address(coordinator, message):
    with pytest.raises(UserError, match=message):
        join_processes(coordinator=coordinator, num_processes=2, process_id=0)


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=r"cannot listen at port \d+ of --coordinator \(Address already in use\)"):
            join_processes(coordinator=place, num_processes=2, process_id=0)
        assert distributed._listening(place, check=False) == {"coordinator_bind_address": place}  # in other processes


def test_a_port_of_the_loopback_is_closed_to_other_machines(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert distributed._listening("127.0.0.1:80", check=False) == {"coordinator_bind_address": "127.0.0.1:80"}
    assert distributed._listening("[::1]:80", check=False) == {"coordinator_bind_address": "[::1]:80"}
    assert distributed._listening("0.0.0.0:80", check=False) == {}
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1:81")
    assert distributed._listening("127.0.0.1:80", check=False) == {}


def test_alone():
    assert join_processes(coordinator=None, num_processes=None, process_id=None) == 1
    processes = connected()
    assert (processes.index, processes.count, processes.writes) == (0, 1, True)
    assert processes.exchange("a") == ["a"]


# --- Real processes --------------------------------------------------------------------------------------------------


FIRST_PORT = 61440  # of those that JAX chooses from under SLURM


def free_port():
    while True:
        port = random.randrange(FIRST_PORT, 65536)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Launched:
    """Processes of one run on this machine, and the files that they print into."""

    def __init__(self, folder, settings, *, processes, devices, differing=None, slurm=False, programs=None):
        """Start them.

        Args:
          folder: the run folder.
          settings: flags of all.
          processes: how many.
          devices: of each.
          differing: further flags by process.
          slurm: whether they are told of each other as ``srun`` does, and by nothing else.
          programs: what Python runs in place of the module, by process.
        """
        port = free_port()
        self.folder, self.output = folder, folder.parent / f"{folder.name}.output"
        self.output.mkdir(exist_ok=True)
        flags = [
            f"--no{name}" if value is False else f"--{name}" if value is True else f"--{name}={value}"
            for name, value in settings.items()
        ]
        flags += [f"--run_dir={folder}"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        # Every process compiles for itself, all at once, which takes most of the time; the numbers bear it.
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        if slurm:  # JAX makes the port from the number of the job
            environment |= {"SLURM_JOB_ID": str(port - FIRST_PORT), "SLURM_STEP_NODELIST": "localhost"}
            environment |= {"SLURM_NTASKS": str(processes), "SLURM_STEP_NUM_NODES": "1"}
        self.processes = []
        for index in range(processes):
            own, place = list((differing or {}).get(index, ())), {}
            if slurm:
                place = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
            else:
                own += [f"--coordinator=127.0.0.1:{port}", f"--num_processes={processes}", f"--process_id={index}"]
            program = (programs or {}).get(index, ["-m", "fedjax_mr.main"])
            with (self.output / f"{index}.out").open("w") as out, (self.output / f"{index}.err").open("w") as err:
                command = [sys.executable, *program, *flags, *own]
                self.processes.append(subprocess.Popen(command, env=environment | place, stdout=out, stderr=err))

    def wait(self, seconds=1200):
        """Return the exit codes; whoever is late is killed."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def wait_for_a_row(self):
        deadline = time.monotonic() + 300
        while not (self.folder / "metrics.jsonl").exists():
            assert time.monotonic() < deadline and all(process.poll() is None for process in self.processes), (
                self.said()
            )
            time.sleep(0.05)

    def said(self, stream="err"):
        """Return what each process printed of its own (gloo, in C++, announces its connections)."""
        texts = [path.read_text() for path in sorted(self.output.glob(f"*.{stream}"))]
        return [
            "".join(line for line in text.splitlines(keepends=True) if not line.startswith("[Gloo]")) for text in texts
        ]


def rows(folder):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def assert_rows_close(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=2e-4, atol=4e-3 if "accuracy" in name else 2e-5)


def assert_equal_to_one_process(tmp_path, settings, *, processes, devices):
    launched = Launched(tmp_path / "several", settings, processes=processes, devices=devices)
    alone = fmr.run(fmr.Config(**settings, run_dir=str(tmp_path / "alone"), devices=1))
    assert launched.wait() == [0] * processes, launched.said()
    assert_rows_close(rows(tmp_path / "several"), rows(alone.folder))
    return launched


@pytest.mark.slow  # what processes say to each other is tested above, with threads in their place
def test_two_processes_train_like_one(tmp_path):
    launched = assert_equal_to_one_process(tmp_path, SMALL, processes=2, devices=1)
    first, second = launched.said("out")
    assert "accuracy, last" in first and second == ""
    assert {path.name for path in launched.folder.iterdir()} >= {"curves.png", "partition.npz", "summary.json"}


@pytest.mark.slow
@MANY
@pytest.mark.parametrize("strategy", ["fedavg", "fedmr", "scaffold", "fedcross"])
def test_processes_and_devices_train_like_one(tmp_path, strategy, processes, devices):
    settings = SMALL | dict(strategy=strategy, model="cnn_digits")
    assert_equal_to_one_process(tmp_path, settings, processes=processes, devices=devices)


@pytest.mark.slow
def test_processes_find_each_other_as_slurm_says(tmp_path):
    launched = Launched(tmp_path / "run", SMALL | {"progress": True}, processes=2, devices=1, slurm=True)
    assert launched.wait() == [0, 0], launched.said()
    first, second = launched.said("out")
    assert "; 2 x cpu, 1 lane\n" in launched.said()[0] and "cpu" not in launched.said()[1]
    assert "accuracy, last" in first and second == ""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedmr", "scaffold"])
def test_samples_that_stay_on_the_hosts_change_nothing(tmp_path, strategy):
    settings = SMALL | dict(strategy=strategy)
    launched = Launched(tmp_path / "hosts", settings | {"data_placement": "host"}, processes=2, devices=2)
    alone = fmr.run(fmr.Config(**settings, run_dir=str(tmp_path / "alone"), data_placement="device", devices=1))
    assert launched.wait() == [0, 0], launched.said()
    assert_rows_close(rows(tmp_path / "hosts"), rows(alone.folder))


@pytest.mark.slow
def test_a_checkpoint_fits_every_layout(tmp_path):
    """Stopped on 2 x 2 by a signal to one process alone; resumed on 1 x 1, 4 x 1, and bit for bit on 2 x 2."""
    settings: dict[str, Any] = SMALL | dict(rounds=60)
    straight = Launched(tmp_path / "straight", settings, processes=2, devices=2)
    assert straight.wait() == [0, 0], straight.said()
    stopped = Launched(tmp_path / "stopped", settings, processes=2, devices=2)
    stopped.wait_for_a_row()
    stopped.processes[1].send_signal(signal.SIGTERM)
    assert stopped.wait() == [128 + signal.SIGTERM] * 2, stopped.said()
    assert rows(tmp_path / "stopped")[-1]["round"] < 60

    folders = {layout: tmp_path / f"{layout[0]}x{layout[1]}" for layout in [(1, 1), (4, 1), (2, 2)]}
    for folder in folders.values():
        shutil.copytree(tmp_path / "stopped", folder)
    fmr.run(fmr.Config(**settings, run_dir=str(folders[1, 1]), resume=True, devices=1))
    for processes, devices in ((4, 1), (2, 2)):
        resumed = Launched(
            folders[processes, devices], settings | {"resume": True}, processes=processes, devices=devices
        )
        assert resumed.wait() == [0] * processes, resumed.said()
    for folder in folders.values():
        assert_rows_close(rows(folder), rows(tmp_path / "straight"))
    assert rows(folders[2, 2]) == rows(tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_the_run_which_can_go_on(tmp_path, victim):
    launched = Launched(tmp_path / "run", LONG, processes=3, devices=1)
    launched.wait_for_a_row()
    launched.processes[victim].kill()
    killed = time.monotonic()
    codes = launched.wait(30)
    assert time.monotonic() - killed < 30
    assert codes[victim] == -signal.SIGKILL
    survivors = {index: code for index, code in enumerate(codes) if index != victim}
    for index, code in survivors.items():
        said = launched.said()[index]
        assert code == 4, said
        assert said.splitlines()[-1].startswith(LOST)
    last_round = lambda: ([0] + [row["round"] for row in rows(tmp_path / "run")])[-1]  # cut back to the checkpoint
    done = last_round()
    assert done < LONG["rounds"]

    resumed = Launched(tmp_path / "run", LONG | {"resume": True}, processes=2, devices=1)
    try:
        deadline = time.monotonic() + 300
        while last_round() <= done + 2:
            assert time.monotonic() < deadline and all(process.poll() is None for process in resumed.processes)
            time.sleep(0.2)
        resumed.processes[0].send_signal(signal.SIGINT)
    finally:
        codes = resumed.wait(60)
    assert codes == [130, 130], resumed.said()


@pytest.mark.slow
def test_a_frozen_process_ends_the_others(tmp_path):
    launched = Launched(tmp_path / "run", LONG, processes=2, devices=1)
    launched.wait_for_a_row()
    launched.processes[1].send_signal(signal.SIGSTOP)
    try:
        assert launched.processes[0].wait(60) == 4, launched.said()
        assert launched.said()[0].splitlines()[-1].startswith(LOST)
    finally:
        for process in launched.processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("arrived", [0, 1])
def test_a_process_that_does_not_arrive_ends_the_other(tmp_path, arrived):
    settings = SMALL | {"join_timeout": 3}
    launched = Launched(tmp_path / "run", settings, processes=2, devices=1, programs={1 - arrived: ["-c", ""]})
    assert launched.wait(60)[arrived] == 4
    line = launched.said()[arrived].splitlines()[-1]
    assert line.startswith("fedjax-mr: not all processes of the run arrived within 3 s (--join_timeout): ")
    assert not (tmp_path / "run").exists()


def test_a_ctrl_c_that_a_library_caught_ends_the_wait_for_others(monkeypatch):
    """Such as one in the middle of an import."""
    arrived = threading.Event()
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: arrived.wait(20))
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(interrupts, "_received", [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        distributed._join({}, None)
    arrived.set()


@pytest.mark.slow
def test_ctrl_c_while_the_others_have_not_arrived(tmp_path):
    launched = Launched(tmp_path / "run", SMALL, processes=2, devices=1, programs={1: ["-c", ""]})
    time.sleep(15)
    launched.processes[0].send_signal(signal.SIGINT)
    assert launched.wait(10)[0] == 130
    assert launched.said()[0] == "fedjax-mr: interrupted\n"


OWN_PROGRAM = """
import sys
import fedjax_mr as fmr
from fedjax_mr.config import config

fmr.run(config.parse(sys.argv[1:]))
"""
JOINED_BEFORE = """
import jax, sys
place = {name: value for name, _, value in (word[2:].partition("=") for word in sys.argv[-3:])}
jax.distributed.initialize(place["coordinator"], int(place["num_processes"]), int(place["process_id"]))
sys.argv[-3:] = []
"""


@pytest.mark.slow
@pytest.mark.parametrize(("before", "victim"), [("", 0), ("", 1), (JOINED_BEFORE, 0), (JOINED_BEFORE, 1)])
def test_a_killed_process_ends_programs_of_ones_own(tmp_path, before, victim):
    programs = {index: ["-c", before + OWN_PROGRAM] for index in range(2)}
    launched = Launched(tmp_path / "run", LONG, processes=2, devices=1, programs=programs)
    launched.wait_for_a_row()
    launched.processes[victim].kill()
    codes = launched.wait(60)
    said = launched.said()[1 - victim].splitlines()
    assert codes[1 - victim] == 4, said
    assert LOST.partition(": ")[2] in said[-1]


@pytest.mark.slow
def test_another_seed_is_refused_by_name(tmp_path):
    launched = Launched(tmp_path / "run", SMALL, processes=3, devices=1, differing={1: ["--seed=7"]})
    assert launched.wait() == [2, 2, 2], launched.said()
    for said in launched.said():
        (line,) = said.splitlines()
        assert line.startswith(f"fedjax-mr: process 1 on {socket.gethostname()} was started differently: data: ")
        assert "seed: 7 (process 0: 0)" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_versions_and_settings_are_refused_by_name(tmp_path):
    pretend = (
        "from importlib import metadata; version = metadata.version; "
        "metadata.version = lambda name: '0.0.1' if name == 'jax' else version(name); "
        "from fedjax_mr.main import console; console()"
    )
    launched = Launched(
        tmp_path / "run", SMALL, processes=2, devices=1, differing={1: ["--lr=0.07"]}, programs={1: ["-c", pretend]}
    )
    assert launched.wait() == [2, 2], launched.said()
    for said in launched.said():
        assert f'process 1 on {socket.gethostname()} was started differently: jax: "0.0.1" (process 0: "' in said
        assert "; lr: 0.07 (process 0: 0.05)\n" in said and "seed" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_missing_data_of_one_process_stops_all(tmp_path):
    settings = SMALL | {"dataset": "mnist", "data_dir": tmp_path / "nowhere", "offline": True}
    launched = Launched(tmp_path / "run", settings, processes=2, devices=1, differing={0: ["--dataset=digits"]})
    assert launched.wait() == [2, 2], launched.said()
    assert "process 1 failed: " in launched.said()[0]
