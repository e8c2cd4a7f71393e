"""Real federations on one machine, for tests and measurements: processes of Flower on loopback addresses.

    python experiments/lab/deployment.py --nodes=2 --model=cnn_digits --rounds=4

This command runs FedMR on two SuperNodes and in the simulator. It prints one line of JSON: seconds and bytes per round,
and the processor seconds of all processes of Flower. It needs the extra ``deploy``. Other options are flags of the run,
such as ``--compress=int8``.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NAME = "trial"  # of the connection
COMMANDS = Path(sys.executable).parent


def free_port() -> int:
    """A free port of the loopback address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Federation:
    """A SuperLink, SuperNodes and runs, each with its own log. `stop` ends the running ones.

    Their child processes end with them.
    """

    def __init__(self, folder: Path, *, tls: bool = False, database: bool = False) -> None:
        self.folder, self.tls, self.port = folder, tls, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "XLA_"))
        } | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}",
            "NO_COLOR": "1",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._database = folder / "superlink.db" if database else None
        if tls:
            certificates(folder, "127.0.0.1")
        self.connect(self.port)

    def connect(self, port: int) -> None:
        """Let `flwr` find the SuperLink at a port."""
        trust = f'root-certificates = "{self.folder / "ca.crt"}"' if self.tls else "insecure = true"
        (self.folder / "home").mkdir(exist_ok=True)
        text = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "127.0.0.1:{port}"\n{trust}\n'
        (self.folder / "home" / "config.toml").write_text(text)

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program, whose log is the file ``name``.log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes[name] = process
        return process

    def superlink(self) -> None:
        """Start the SuperLink and wait until it answers."""
        secure = ["--insecure"]
        if self.tls:
            secure = ["--ssl-ca-certfile=ca.crt", "--ssl-certfile=server.crt", "--ssl-keyfile=server.key"]
            secure += ["--enable-supernode-auth"]
        storage = [f"--database={self._database}"] if self._database else []
        options = ["--host=127.0.0.1", f"--port={self.port}", "--disable-runtime-dependency-installation"]
        self.start("superlink", "flower-superlink", *options, *secure, *storage)
        wait_for(lambda: answers(self.port), 60, f"the SuperLink: {self.log('superlink')}")

    def supernode(self, client: int, settings: Mapping[str, Any], *, port: int | None = None) -> None:
        """Start the SuperNode of a client, which calls the SuperLink at its own port or another one."""
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        secure = ["--insecure"]
        if self.tls:
            secure = ["--root-certificates=ca.crt", f"--auth-supernode-private-key=node-{client}"]
        self.start(
            f"node-{client}",
            *("flower-supernode", f"--superlink=127.0.0.1:{port or self.port}", *secure),
            *(f"--port={free_port()}", f"--node-config={words}"),
        )

    def register(self, client: int) -> None:
        """Make the key pair of a client's SuperNode and tell the SuperLink about it."""
        self.node_key(client)
        self.flwr("supernode", "register", f"node-{client}.pub", NAME)

    def node_key(self, client: int) -> None:
        """Make the key pair of a client's SuperNode."""
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(self.folder / f"node-{client}")]
        subprocess.run(command, check=True)

    def flwr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of Flower to its end."""
        return subprocess.run(
            ["flwr", *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
        )

    def run(self, app: Path | str, *options: str, name: str = "run") -> str:
        """Start an app, whose log is ``name``.log, and return the number of the run."""
        self.start(name, "flwr", "run", str(app), NAME, "--stream", *options)
        number = lambda: re.search(r"run (\d{6,})", self.log(name))
        wait_for(lambda: number() or self._processes[name].poll() is not None, 120, f"the run: {self.log(name)}")
        if found := number():
            return found[1]
        raise RuntimeError(self.log(name))

    def status(self, run: str) -> str:
        """The status of a run, such as ``running`` or ``finished:completed``."""
        listed = json.loads(self.flwr("list", NAME, "--format=json").stdout)
        return next(listed_run["status"] for listed_run in listed["runs"] if str(listed_run["run-id"]) == run)

    def finish(self, run: str, seconds: float, *, name: str = "run") -> str:
        """Wait for the end of a run and return its status."""
        self._processes.pop(name).wait(seconds)
        return self.status(run)

    def python(self, *arguments: str) -> str:
        """Run a command of this package to its end and return what it prints."""
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, check=True, stdout=-1, stderr=-1, text=True
        )
        return done.stdout

    def log(self, name: str) -> str:
        """The output of a program so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{name}.log").read_text(errors="replace")
        return ""

    def process(self, name: str) -> subprocess.Popen[bytes]:
        """A started program."""
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kill a program and its child processes without a warning."""
        self._end(self._processes.pop(name), signal.SIGKILL)

    def interrupt(self, name: str) -> None:
        """End a program as Ctrl-C in its terminal does, and wait until it has ended."""
        process = self._processes.pop(name)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)

    def children(self, name: str, command: str) -> list[int]:
        """The descendant processes of a program whose command line contains ``command``."""
        return self.children_of(self._processes[name].pid, command)

    def children_of(self, pid: int, command: str) -> list[int]:
        """A process and its descendants, restricted to command lines that contain ``command``."""
        wanted, processes = {pid}, []
        for _ in range(4):
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent in wanted:
                        wanted.add(int(folder.name))
        for pid in wanted:
            with contextlib.suppress(OSError):
                if command in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " "):
                    processes.append(pid)
        return processes

    def processor_seconds(self) -> float:
        """Processor seconds of all running processes and of their children that have ended."""
        ticks = 0
        for name in self._processes:
            for pid in self.children(name, ""):
                with contextlib.suppress(OSError):
                    ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End all running programs."""
        for process in reversed(list(self._processes.values())):
            self._end(process, signal.SIGTERM)
        self._processes.clear()

    def _end(self, process: subprocess.Popen[bytes], how: signal.Signals) -> None:
        under = self.children_of(process.pid, "")  # Flower gives some of them groups of their own
        for sign, patience in ((how, 10), (signal.SIGKILL, 10)):
            for pid in under:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)


@contextlib.contextmanager
def federation(folder: Path, **options: Any) -> Iterator[Federation]:
    """A federation that is stopped at the end, also after an error."""
    one = Federation(folder, **options)
    try:
        yield one
    finally:
        one.stop()


class Forwarder:
    """A port that forwards connections to another port of the loopback address, and counts their bytes.

    Attributes:
      port: a free port.
      sent: bytes from the connecting side so far.
    """

    def __init__(self, to: int) -> None:
        self.sent = 0
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> "Forwarder":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as far:
            back = threading.Thread(target=_copy, args=(far, near), daemon=True)
            back.start()
            for size in _copied(near, far):
                self.sent += size
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    for _ in _copied(source, target):
        pass


def _copied(source: socket.socket, target: socket.socket) -> Iterator[int]:
    """Copy until the source ends, and yield the size of each part."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
            yield len(data)
        target.shutdown(socket.SHUT_WR)


def wait_for(condition: Any, seconds: float, what: str, *, pause: float = 0.2) -> None:
    """Wait until a condition holds.

    Raises:
      TimeoutError: it does not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(pause)


def answers(port: int) -> bool:
    """Whether a process listens at a port of the loopback address."""
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", port)) == 0


def certificates(folder: Path, host: str, *, days: int = 30) -> None:
    """Make a CA (ca.crt) and a certificate for an IP address (server.crt, server.key), as docs/recipes describes."""
    openssl = lambda *arguments: subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes", "-days", str(days)]
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=our CA")
    openssl(
        *("req", "-x509", *curve, "-keyout", "server.key", "-out", "server.crt", "-subj", f"/CN={host}"),
        *("-CA", "ca.crt", "-CAkey", "ca.key", "-addext", f"subjectAltName=IP:{host}"),
        *("-addext", "basicConstraints=critical,CA:FALSE"),
    )


# --- Measurements ----------------------------------------------------------------------------------------------------


def measure(folder: Path, *, nodes: int, model: str, rounds: int, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Time and bytes of FedMR's rounds on real clients and in the simulator.

    Args:
      folder: a new one.
      nodes: K = N, one SuperNode each.
      model: a network; its samples are the digits or, where it wants images of 32 x 32 in colours, 100 random ones per
        client.
      rounds: at least two; the first compiles and is left out.
      flags: more flags of the run, such as ``--compress=int8``.
    """
    dataset = "digits"
    with federation(folder) as one:
        if not model.startswith("cnn_digits"):
            random = np.random.default_rng(0)
            x, y = random.integers(0, 255, (125 * nodes, 32, 32, 3), np.uint8), random.integers(0, 10, 125 * nodes)
            dataset = str(folder / "random.npz")
            np.savez(dataset, x=x, y=y)
        more, flags = flags, [f"--dataset={dataset}", f"--model={model}", "--strategy=fedmr", "--partition=iid"]
        flags += ["--local_epochs=1", *more]
        flags += [f"--clients={nodes}", f"--cohort={nodes}", f"--rounds={rounds}", "--batch_size=50", "--eval_every=1"]
        one.python("fedjax_mr.main", *flags, "--devices=1", "--lanes=1", f"--run_dir={folder}/simulated")
        one.python("fedjax_mr.deploy", "new", str(folder / "fed"), *flags)
        one.python("fedjax_mr.deploy", "divide", str(folder / "fed" / "data"), *flags)
        load = os.getloadavg()[0]
        one.superlink()
        for client in range(nodes):
            samples = f"{folder}/fed/data/client-{client}.npz"
            one.supernode(client, {"client-id": client, "data": samples, "state": f"{folder}/fed/state-{client}"})
        began = time.monotonic()
        status = one.finish(one.run("fed"), 3600)
        wall, processors = time.monotonic() - began, one.processor_seconds()
    real, simulated = (metrics(folder / name) for name in ("fed/run", "simulated"))
    between = lambda rows, *names: [
        sum(later[name] - row[name] for name in names) for row, later in itertools.pairwise(rows)
    ]
    return {
        "nodes": nodes,
        "model": model,
        "rounds": rounds,
        "status": status,
        "seconds_per_round": between(real, "seconds"),
        "simulated_seconds_per_round": between(simulated, "seconds"),
        "bytes_per_round": between(real, "bytes_down", "bytes_up")[-1],
        "seconds_of_the_run": wall,
        "processor_seconds": processors,
        "load_before": load,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--model", default="cnn_digits")
    parser.add_argument("--rounds", type=int, default=4)
    told, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), nodes=told.nodes, model=told.model, rounds=told.rounds, flags=flags)))


if __name__ == "__main__":
    main()
