"""FLARE's server and clients, imported by the processes of its simulator.

FLARE copies this file into its job, from which the drivers' folder may not be the first of the path.
"""

import functools
import os
from multiprocessing.connection import Client

import contest
import torch
import torch_parts
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg

ADDRESS = "PEERS_FLARE"  # variable with the socket at which the driver waits for the server
job = contest.job()
load = functools.cache(lambda: contest.load(job))
network = functools.cache(torch_parts.network)


class Rounds(FedAvg):
    """FLARE's FedAvg, run again for each command of the driver. Clients stay connected between two runs."""

    def run(self) -> None:
        """Train rounds until the driver asks for no more."""
        with Client(os.environ[ADDRESS]) as driver:
            self.model = FLModel(params_type=ParamsType.FULL, params=arrays(torch_parts.network()))
            while rounds := driver.recv():
                self.num_rounds = rounds
                super().run()
                driver.send(self.model.params)
                self.start_round += rounds

    def save_model(self, model: FLModel) -> None:
        """Keep the model of a round, instead of in a file."""
        self.model = model


class Trainer(Executor):
    """A client."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Train the received network on the client's samples."""
        torch.set_num_threads(job.threads)
        x, y, _, _ = load()
        client = int(fl_ctx.get_identity_name().removeprefix("site-")) - 1
        received = FLModelUtils.from_shareable(shareable)
        network().load_state_dict({name: torch.as_tensor(values) for name, values in received.params.items()})
        torch_parts.train_client(network(), job, x[client], y[client])
        return FLModelUtils.to_shareable(FLModel(params_type=ParamsType.FULL, params=arrays(network())))


def arrays(module: torch.nn.Module) -> dict:
    """The tensors of a network as NumPy arrays."""
    return {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
