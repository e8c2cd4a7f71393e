"""FLARE's simulator: its `FedAvg` on a server process, and clients in worker processes.

With fewer workers than clients, FLARE starts a process for each client's turn. With as many, each client keeps its
process. Clients that are not selected have turns, too. The start of the simulator is not timed: its `FedAvg` waits for
the next command, and its rounds are timed from there. Meanwhile its processes are suspended. Otherwise it would start
idle clients in turn.
"""

import contextlib
import importlib.metadata
import os
import signal
import tempfile
import threading
from multiprocessing.connection import Listener
from pathlib import Path

import contest
import flare_parts
import psutil
import torch
import torch_parts
from nvflare.job_config.api import FedJob

job = contest.job()
x, y, test_x, test_y = contest.load(job)
if len(y) > 10:
    raise SystemExit("FLARE starts a process for each client in each round: use --course=flare")
network = torch_parts.network()
folder = tempfile.TemporaryDirectory()
os.environ[flare_parts.ADDRESS] = str(Path(folder.name) / "socket")
listener = Listener(os.environ[flare_parts.ADDRESS])

simulation = FedJob(name="fedavg")
simulation.to_server(flare_parts.Rounds(num_clients=job.cohort, persistor_id=""))
simulation.to_clients(flare_parts.Trainer(), tasks=["train"])
start = lambda: simulation.simulator_run(folder.name + "/work", n_clients=len(y), threads=job.processes)
threading.Thread(target=start, daemon=True).start()
server = listener.accept()


def tell(number: int) -> None:
    """Send a signal to all processes of the simulator."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def train(rounds: int) -> None:
    """Train so many rounds more."""
    tell(signal.SIGCONT)
    server.send(rounds)
    trained = server.recv()
    tell(signal.SIGSTOP)
    network.load_state_dict({name: torch.as_tensor(values) for name, values in trained.items()})


contest.serve(
    train,
    lambda: torch_parts.test(network, test_x, test_y),
    parameters=torch_parts.count(network),
    versions=f"nvflare {importlib.metadata.version('nvflare')}, {torch_parts.VERSION}",
)
tell(signal.SIGKILL)
