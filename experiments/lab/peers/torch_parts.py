"""What the drivers with PyTorch share: the network, a client's training, the test."""

from collections.abc import Iterator

import contest
import numpy as np
import torch
import torch_resnet
from contest import Job
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import torch_networks

VERSION = f"torch {torch.__version__.partition('+')[0]}"


def network() -> torch.nn.Module:
    """The network of the course with the same parameters in every process."""
    job = contest.job()
    torch.manual_seed(job.seed)
    return {"lenet5": torch_networks.lenet5, "resnet18": torch_resnet.ResNet18}[job.network]()


def count(module: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def tensors(x: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of bytes [n, 32, 32, 3] as floats from -1 to 1 [n, 3, 32, 32], and labels [n]."""
    images = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous().float().mul_(2 / 255).sub_(1)
    return images, torch.from_numpy(y).long()


def batches(
    x: torch.Tensor, y: torch.Tensor, size: int, *, loader: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch in random order, through a DataLoader if requested."""
    if loader:
        yield from DataLoader(TensorDataset(x, y), batch_size=size, shuffle=True)
    else:
        for rows in torch.randperm(len(y)).split(size):
            yield x[rows], y[rows]


def train_client(module: torch.nn.Module, job: Job, x: np.ndarray, y: np.ndarray, *, loader: bool = False) -> None:
    """Train the network on a client's images [n, 32, 32, 3] and labels [n]."""
    optimizer = torch.optim.SGD(module.parameters(), lr=job.lr, momentum=job.momentum)
    images, labels = tensors(x, y)
    module.train()
    for _ in range(job.epochs):
        for x_batch, y_batch in batches(images, labels, job.batch, loader=loader):
            optimizer.zero_grad()
            cross_entropy(module(x_batch), y_batch).backward()
            optimizer.step()


@torch.no_grad()
def test(module: torch.nn.Module, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Loss and accuracy on images [n, 32, 32, 3] and labels [n]."""
    images, labels = tensors(x, y)
    module.eval()
    logits = module(images)
    return cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()
