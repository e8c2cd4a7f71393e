"""pfl-research's simulation with PyTorch: `FederatedAveraging` on a `SimulatedBackend`.

Several processes are workers that share the clients of a round. pfl keeps the order of a client's samples, so they are
shuffled when the client is drawn: where clients have few classes, the samples come in the order of their labels.
"""

import importlib.metadata
import os

import contest
import numpy as np
import torch
import torch.distributed as distributed
import torch_parts

job = contest.job()
torch.set_num_threads(job.threads)
rank, address = contest.fellows(job.processes)
if job.processes > 1:
    os.environ["PFL_WORKER_RANK"] = str(rank)
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * job.processes)

# pfl meets its workers while it is imported.
from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByUser  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.data.pytorch import PyTorchTensorDataset  # noqa: E402
from pfl.data.sampling import get_user_sampler  # noqa: E402
from pfl.hyperparam.base import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Weighted  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402

x, y, test_x, test_y = contest.load(job)
np.random.seed(0)  # noqa: NPY002 (pfl draws from it): the same cohorts in every process
random = np.random.default_rng(rank)  # for the samples


class Network(torch.nn.Module):
    """LeNet-5 with the two functions that pfl asks of a network."""

    def __init__(self) -> None:
        """Make the network."""
        super().__init__()
        self.inner = torch_parts.network()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy."""
        return torch.nn.functional.cross_entropy(self.inner(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        """The loss, for pfl's own evaluation of the first round."""
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


def clients() -> FederatedDataset:
    """The clients. The dataset of a client is created when the client is drawn."""

    def make(client: int) -> PyTorchTensorDataset:
        order = random.permutation(len(y[client]))
        return PyTorchTensorDataset(torch_parts.tensors(x[client][order], y[client][order]))

    return FederatedDataset(make, get_user_sampler("minimize_reuse", list(range(len(y)))))


network = Network()
model = PyTorchModel(
    network,
    lambda parameters, lr: torch.optim.SGD(parameters, lr, job.momentum),
    torch.optim.SGD(network.parameters(), 1.0),
)
backend = SimulatedBackend(clients(), clients(), postprocessors=[WeightByUser()])
training = NNTrainHyperParams(local_batch_size=job.batch, local_num_epochs=job.epochs, local_learning_rate=job.lr)
algorithm = FederatedAveraging()
done = 0


def train(rounds: int) -> None:
    """Train so many rounds more."""
    global done
    done += rounds
    parameters = NNAlgorithmParams(
        central_num_iterations=done, evaluation_frequency=10**9, train_cohort_size=job.cohort, val_cohort_size=None
    )
    algorithm.run(parameters, backend, model, training, send_metrics_to_platform=False)


def share(command: int) -> int:
    """The command of rank 0, in every process."""
    if job.processes > 1:
        distributed.broadcast(given := torch.tensor([command]), src=0)
        return int(given)
    return command


contest.serve(
    train,
    lambda: torch_parts.test(network.inner, test_x, test_y),
    parameters=torch_parts.count(network),
    versions=f"pfl {importlib.metadata.version('pfl')}, {torch_parts.VERSION}",
    rank=rank,
    share=share,
)
