"""PyTorch with all clients side by side: ``torch.func.vmap`` over the clients and ``torch.compile``.

An opponent on GPUs (`gpu_parts.py`), where clients one after the other leave most of the device idle. The networks are
those of ``torch_networks.py``. Their BatchNorm keeps no running statistics, because vmap cannot update these in place.
"""

from collections.abc import Callable, Sequence

import torch

import fedjax_mr as fmr
import torch_networks
from benchmark import BATCH, CLIENTS, LR, MOMENTUM

Stack = dict[str, torch.Tensor]  # [K, ...] by name


def stacked(network: torch.nn.Module, num_clients: int) -> Stack:
    """K copies of the parameters of a network."""
    copies = lambda value: value.detach().expand(num_clients, *value.shape).clone()
    return {name: copies(value) for name, value in network.named_parameters()}


def local_step(network: torch.nn.Module) -> Callable[[Stack, Stack, torch.Tensor, torch.Tensor], None]:
    """A step of SGD with momentum for all clients.

    Its arguments are the clients' parameters and velocities, which it updates in place, their images [K, B, ...] and
    their labels [K, B].
    """
    torch.func.replace_all_batch_norm_modules_(network)
    network.train()

    def loss(params: Stack, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(torch.func.functional_call(network, params, (x,)), y)

    gradients_of_all = torch.func.vmap(torch.func.grad(loss))

    def step(params: Stack, velocity: Stack, x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.no_grad():
            for name, gradient in gradients_of_all(params, x, y).items():
                velocity[name].mul_(MOMENTUM).add_(gradient)
                params[name].sub_(velocity[name], alpha=LR)

    return step


def side_by_side(
    name: str,
    threads: int,
    device: str,
    epochs: int,
    *,
    dataset: fmr.Dataset,
    num_clients: int = CLIENTS,
    compiled: bool = True,
    graph: bool = False,
) -> Callable[[Sequence[int]], None]:
    """A function that takes numbers of clients, which it ignores, and trains all clients together.

    Args:
      name: of the network.
      threads: of the CPU.
      device: ``cpu`` or ``cuda``.
      epochs: local epochs.
      dataset: images, the same number for each client.
      num_clients: K.
      compiled: whether ``torch.compile`` compiles the step.
      graph: whether the step is recorded as one CUDA graph, which is then replayed.
    """
    torch.set_num_threads(threads)
    if device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32, as XLA's default and PyTorch's for convolutions
    size = len(dataset.y) // num_clients
    batch = min(BATCH, size)
    if size % batch:
        raise ValueError(f"{size} samples per client are no multiple of the batch size {batch}")
    x = torch.as_tensor(dataset.x).permute(0, 3, 1, 2).contiguous().to(device)
    x = x.reshape(num_clients, size, *x.shape[1:])
    y = torch.as_tensor(dataset.y).long().to(device).reshape(num_clients, size)
    network = torch_networks.build(name).to(device)
    start = stacked(network, num_clients)
    params = {key: value.clone() for key, value in start.items()}
    velocity = {key: torch.zeros_like(value) for key, value in start.items()}
    clients = torch.arange(num_clients, device=device)[:, None]
    update = local_step(network)

    def of_rows(rows: torch.Tensor) -> None:
        images = x[clients, rows].float().mul(1 / 255).sub(0.5).div(0.5)
        update(params, velocity, images, y[clients, rows])

    step = torch.compile(of_rows) if compiled else of_rows
    if graph:
        step = recorded(step, torch.zeros((num_clients, batch), dtype=torch.long, device=device))

    def train(numbers: Sequence[int]) -> None:
        for key, value in start.items():
            params[key].copy_(value)
            velocity[key].zero_()
        for _ in range(epochs):
            order = torch.rand((num_clients, size), device=device).argsort(1)
            for rows in order.split(batch, 1):
                step(rows.contiguous())
        if device != "cpu":
            torch.cuda.synchronize()

    return train


def recorded(step: Callable[[torch.Tensor], None], rows: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A step as a CUDA graph. It reads its argument from the memory of ``rows``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and chooses algorithms, before the recording
        for _ in range(3):
            step(rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(rows)

    def replay(chosen: torch.Tensor) -> None:
        rows.copy_(chosen)
        graph.replay()

    return replay
