"""Flower's simulation: `FedAvg` in a ServerApp, clients in Ray's actors, one per process asked for.

Flower calls `run_simulation` deprecated in favour of its command, which starts the same engine.
"""

import importlib.metadata

import contest
import flower_client
import torch_parts
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

job = contest.job()
x, y, test_x, test_y = contest.load(job)
clients = len(y)
network = torch_parts.network()
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train rounds as they are asked for."""
    strategy = FedAvg(fraction_train=job.cohort / clients, fraction_evaluate=0.0, min_available_nodes=clients)

    def train(rounds: int) -> None:
        result = strategy.start(grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=rounds)
        network.load_state_dict(result.arrays.to_torch_state_dict())

    contest.serve(
        train,
        lambda: torch_parts.test(network, test_x, test_y),
        parameters=torch_parts.count(network),
        versions=f"flwr {importlib.metadata.version('flwr')}, {torch_parts.VERSION}",
    )


run_simulation(
    server_app=app,
    client_app=flower_client.app,
    num_supernodes=clients,
    backend_config={
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": job.processes, "include_dashboard": False},
    },
)
