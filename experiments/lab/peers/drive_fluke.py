"""fluke's `FedAVG`: clients one after the other, each with all threads. Its parallel classes need two GPUs.

fluke has a LeNet-5 with BatchNorm; here it trains the network of the others. Its clients forget their optimizer after a
round, as the others' do (``persistency``). Each of its runs ends with a copy of the model to all clients that have ever
trained. This is not part of a round and is left out.
"""

import importlib.metadata

import contest
import torch
import torch_parts

try:
    import torchvision  # noqa: F401
except RuntimeError:  # torchvision for CUDA beside PyTorch for CPUs: it misses operators that fluke does not call
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader

job = contest.job()
torch.set_num_threads(job.threads)
x, y, test_x, test_y = contest.load(job)
FlukeENV().set_seed(job.seed)
FlukeENV().set_device("cpu")
FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)


class Rounds(FedAVG):
    """FedAvg that can continue after a run."""

    def finalize(self) -> None:
        """Do nothing at the end of a run."""


loaders = [
    FastDataLoader(*torch_parts.tensors(*samples), num_labels=10, batch_size=job.batch, shuffle=True)
    for samples in zip(x, y, strict=True)
]
data = DummyDataContainer(loaders, [None] * len(y), None, 10)
client = {
    "batch_size": job.batch, "local_epochs": job.epochs, "loss": "CrossEntropyLoss", "persistency": False,
    "optimizer": DDict(name="SGD", lr=job.lr, momentum=job.momentum),
    "scheduler": DDict(name="StepLR", step_size=1, gamma=1.0),
}  # fmt: skip
network = torch_parts.network()
settings = DDict(model=network, client=DDict(**client), server=DDict(weighted=True))
algorithm = Rounds(len(y), DataSplitter(data, distribution="iid"), settings)

contest.serve(
    lambda rounds: algorithm.run(rounds, job.cohort / len(y)),
    lambda: torch_parts.test(network, test_x, test_y),
    parameters=torch_parts.count(network),
    versions=f"fluke {importlib.metadata.version('fluke-fl')}, {torch_parts.VERSION}",
)
