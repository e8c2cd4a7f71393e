"""BlazeFL's `FedAvgProcessPoolClientTrainer`: a pool of processes in each round, models through shared memory.

Its optimizer has no momentum, so it takes part in courses without one. The statistics of BatchNorm are averaged with
the parameters.
"""

import importlib.metadata
import tempfile
from enum import StrEnum
from pathlib import Path

import contest
import numpy as np
import torch
import torch_parts
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer
from blazefl.core import IPCMode
from torch.utils.data import DataLoader, TensorDataset


class Name(StrEnum):
    """The networks."""

    LENET5 = "lenet5"
    RESNET18 = "resnet18"


class Networks:
    """The networks by name."""

    def select_model(self, model_name: Name) -> torch.nn.Module:
        """The network of the course."""
        return torch_parts.network()


class Clients:
    """The samples of the clients, a file for each, as BlazeFL's examples keep them: workers receive this object."""

    def __init__(self, folder: Path, x: np.ndarray, y: np.ndarray) -> None:
        """Write the files."""
        self.folder = folder
        for client, samples in enumerate(zip(x, y, strict=True)):
            torch.save(torch_parts.tensors(*samples), folder / f"samples{client}.pt")

    def get_dataset(self, type_: str, cid: int | None) -> TensorDataset:
        """The samples of a client."""
        return TensorDataset(*torch.load(self.folder / f"samples{cid}.pt"))

    def set_dataset(self, type_: str, cid: int | None, dataset: TensorDataset) -> None:
        """Do nothing: samples do not change."""

    def get_dataloader(
        self, type_: str, cid: int | None, batch_size: int | None, generator: torch.Generator | None
    ) -> DataLoader:
        """The batches of a client in random order."""
        return DataLoader(self.get_dataset(type_, cid), batch_size, shuffle=True, generator=generator)


def main() -> None:
    """Train and test as the script asks."""
    job = contest.job()
    if job.momentum:
        raise SystemExit("BlazeFL's optimizer has no momentum: use --course=blazefl")
    torch.set_num_threads(1)
    x, y, test_x, test_y = contest.load(job)
    folder, count = Path(tempfile.mkdtemp()), len(y)
    networks, name, clients = Networks(), Name(job.network), Clients(folder, x, y)
    server = FedAvgBaseServerHandler(
        networks, name, clients, 10**6, count, job.cohort / count, "cpu", job.batch, seed=job.seed
    )  # fmt: skip
    trainer = FedAvgProcessPoolClientTrainer(
        networks, name, folder, folder, clients, "cpu", count, job.epochs, job.batch, job.lr, 0, job.processes,
        IPCMode.SHARED_MEMORY,
    )  # fmt: skip

    def train(rounds: int) -> None:
        for _ in range(rounds):
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for upload in trainer.uplink_package():
                server.load(upload)

    contest.serve(
        train,
        lambda: torch_parts.test(server.model, test_x, test_y),
        parameters=torch_parts.count(server.model),
        versions=f"blazefl {importlib.metadata.version('blazefl')}, {torch_parts.VERSION}",
    )


if __name__ == "__main__":
    main()
