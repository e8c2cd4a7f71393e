"""PyTorch's plain loop over the clients; with the variant ``loader`` through a DataLoader, as the papers' code trains.

Several processes share the clients of a round and add up their networks through ``torch.distributed``. The statistics
of BatchNorm are averaged with the parameters.
"""

import contest
import numpy as np
import torch
import torch.distributed as distributed
import torch_parts
from torch.nn.utils import parameters_to_vector, vector_to_parameters

job = contest.job()
torch.set_num_threads(job.threads)
rank, address = contest.fellows(job.processes)
if job.processes > 1:
    distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=job.processes)
x, y, test_x, test_y = contest.load(job)
network = torch_parts.network()
averaged = [tensor for tensor in (*network.parameters(), *network.buffers()) if tensor.is_floating_point()]
server = parameters_to_vector(averaged).detach().clone()
random = np.random.default_rng(job.seed)  # the same cohorts in every process


def train(rounds: int) -> None:
    """Train so many rounds of FedAvg."""
    for _ in range(rounds):
        total = torch.zeros_like(server)
        for client in random.choice(len(y), job.cohort, replace=False)[rank :: job.processes]:
            vector_to_parameters(server.clone(), averaged)
            torch_parts.train_client(network, job, x[client], y[client], loader=job.variant == "loader")
            total += parameters_to_vector(averaged).detach()
        if job.processes > 1:
            distributed.all_reduce(total)
        server.copy_(total / job.cohort)


def test() -> tuple[float, float]:
    """Loss and accuracy of the global model."""
    vector_to_parameters(server.clone(), averaged)
    return torch_parts.test(network, test_x, test_y)


def share(command: int) -> int:
    """The command of rank 0, in every process."""
    if job.processes > 1:
        distributed.broadcast(given := torch.tensor([command]), src=0)
        return int(given)
    return command


contest.serve(train, test, parameters=torch_parts.count(network), versions=torch_parts.VERSION, rank=rank, share=share)
