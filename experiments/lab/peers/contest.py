"""What the drivers of ``peers.py`` share: the work to do, and the conversation with the script that started them.

Runs in the environment of every contestant: nothing but the standard library and NumPy.
"""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what libraries print goes with their errors


@dataclasses.dataclass
class Job:
    """What a contestant is to do: FedAvg on the data of a file.

    Attributes:
      data: the file that `load` reads.
      network: its name: ``lenet5`` or ``resnet18``.
      cohort: K, clients of a round.
      epochs: local epochs.
      batch: samples of a local step.
      lr: learning rate of SGD.
      momentum: of SGD.
      processes: among which the clients of a round are shared.
      threads: of each process.
      variant: what else distinguishes the contestants of one driver.
      seed: of the initial weights, the cohorts and the batches.
      seeds: how many seeds, from this one on, the process trains one after another. Only ours trains more than one.
    """

    data: str
    network: str
    cohort: int
    epochs: int
    batch: int
    lr: float
    momentum: float
    processes: int
    threads: int
    variant: str
    seed: int
    seeds: int


def job() -> Job:
    """The job that the environment describes."""
    return Job(**json.loads(os.environ["PEERS_JOB"]))


def load(job: Job) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images [N, samples, 32, 32, 3] of bytes and labels [N, samples], then those of the test, without the axis N."""
    with np.load(job.data) as file:
        return file["x"], file["y"], file["test_x"], file["test_y"]


def fellows(processes: int) -> tuple[int, str]:
    """The rank of this process and the address at which all meet. Rank 0 starts the others as copies of itself."""
    if "PEERS_RANK" in os.environ:
        return int(os.environ["PEERS_RANK"]), os.environ["PEERS_ADDRESS"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    for rank in range(1, processes):
        environment = os.environ | {"PEERS_RANK": str(rank), "PEERS_ADDRESS": address}
        subprocess.Popen([sys.executable, *sys.argv], env=environment, stdin=subprocess.DEVNULL)
    return 0, address


def _commands() -> Iterator[int]:
    """The commands: a number of rounds to train, 0 for a test, -1 at the end."""
    for line in sys.stdin:
        yield int(line)
    yield -1


def serve(
    train: Callable[[int], Any],
    test: Callable[[], tuple[float, float]],
    *,
    parameters: int,
    versions: str,
    rank: int = 0,
    share: Callable[[int], int] = lambda command: command,
) -> None:
    """Train and test as the script asks; returns when it asks no more.

    Args:
      train: trains so many rounds, and returns when they are done.
      test: returns the loss (nats) and the accuracy of the global model on the test images.
      parameters: of the network.
      versions: of the libraries at work.
      rank: of this process; only rank 0 is asked and answers.
      share: called by all ranks with rank 0's command (the others pass 0): returns it.
    """
    answer = lambda **facts: rank or print(json.dumps(facts), file=ANSWERS)
    answer(parameters=parameters, versions=versions)
    commands = _commands()
    while (command := share(0 if rank else next(commands))) >= 0:
        if command:
            started = time.perf_counter()
            train(command)
            answer(seconds=time.perf_counter() - started)
        else:
            loss, accuracy = test()
            answer(loss=loss, accuracy=accuracy)
