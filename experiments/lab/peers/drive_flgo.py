"""FLGo's simulation: FedAvg, or with the variant ``async`` FedBuff with 20 clients at the same simulated time."""

import importlib
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import contest
import flgo
import flgo.algorithm.fedavg
import flgo.algorithm.fedbuff
import flgo.benchmark.partition
import torch
import torch_parts

job = contest.job()
torch.set_num_threads(job.threads)
folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)  # FLGo imports a benchmark from the current folder, and writes its records there
sys.path.insert(0, folder.name)

BENCHMARK = """
import contest
import torch_parts
from torch.utils.data import TensorDataset

x, y, test_x, test_y = contest.load(contest.job())
train_data = TensorDataset(*torch_parts.tensors(x.reshape(-1, *x.shape[2:]), y.reshape(-1)))
test_data = TensorDataset(*torch_parts.tensors(test_x, test_y))
get_model = torch_parts.network
"""

x, y, test_x, test_y = contest.load(job)
Path("config.py").write_text(BENCHMARK, encoding="utf-8")
benchmark = importlib.import_module(
    flgo.gen_benchmark_from_file("images", "config.py", data_type="cv", task_type="classification")
)
benchmark.visualize = lambda *arguments: None  # its picture of the partition takes minutes
# PyTorch 2.13 demands this method of a subset, and FLGo 0.4.4 does not have it.
dataset = importlib.import_module("images.core").TaskPipe.TaskDataset
dataset.__getitems__ = lambda self, indices: [self[index] for index in indices]
flgo.gen_task_by_(benchmark, flgo.benchmark.partition.IIDPartitioner(num_clients=len(y)), "task")

clients = {"sample": "uniform", "proportion": job.cohort / len(y)}
algorithm = flgo.algorithm.fedavg
if job.variant == "async":
    clients |= {"proportion": 2 * job.cohort / len(y), "responsiveness": "LN-100-1000", "algo_para": [0.1, 1.0]}
    algorithm = flgo.algorithm.fedbuff
training = {"num_epochs": job.epochs, "batch_size": job.batch, "learning_rate": job.lr, "momentum": job.momentum}
others = {"train_holdout": 0.0, "eval_interval": 0, "no_tqdm": True, "no_log_console": True}
server = flgo.init("task", algorithm, option=clients | training | others)


def train(rounds: int) -> None:
    """Train until the global model has been updated so many times."""
    while rounds:
        server.gv.clock.step()
        if server.iterate():
            server.current_round += 1
            rounds -= 1


def test() -> tuple[float, float]:
    """Loss and accuracy of the global model."""
    return torch_parts.test(server.model, test_x, test_y)


contest.serve(
    train,
    test,
    parameters=torch_parts.count(server.model),
    versions=f"flgo {importlib.metadata.version('flgo')}, {torch_parts.VERSION}",
)
