"""This project's engine, as its users run it: CPU cores are devices, all rounds asked for in one call.

FedAvg, or with the variant ``async`` FedBuff with 20 clients at the same simulated time. LeNet-5 is one of its
networks; ResNet-18 is passed as a user's own module. The statistics of BatchNorm are averaged with the parameters.
Several seeds train one after another; they compile once, because a seed is an argument of the program.
"""

import dataclasses

import contest
import flax_resnet
import jax
import numpy as np

import fedjax_mr as fmr
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.experiment.build import simulator_of
from fedjax_mr.experiment.user_objects import UserObjects

job = contest.job()
set_up_jax(devices=None, cohort_size=job.cohort)
x, y, test_x, test_y = contest.load(job)
half = (0.5,) * 3
dataset = fmr.Dataset(
    "synthetic", x.reshape(-1, *x.shape[2:]), y.reshape(-1), test_x, test_y, 10, mean=half, std=half,
    client=np.repeat(np.arange(len(y), dtype=np.int32), y.shape[1]), client_names=tuple(map(str, range(len(y)))),
)  # fmt: skip
federated = fmr.data.federate(dataset, num_clients=0, partition="natural", seed=0)
clock = {"mode": "async", "in_flight": 2 * job.cohort, "fleet": "lognormal"} if job.variant == "async" else {}
config = fmr.Config(
    strategy="fedbuff" if clock else "fedavg", model="lenet5", clients=0, partition="natural", cohort=job.cohort,
    lr=job.lr, momentum=job.momentum, local_epochs=job.epochs, batch_size=job.batch, rounds=1_000,
    seed=job.seed, **clock,
)  # fmt: skip
own_module = flax_resnet.ResNet18() if job.network == "resnet18" else None
config, model = UserObjects.of(dataset, own_module).build(config, federated)
simulator = simulator_of(config, federated, model)
state = simulator.init()


def train(rounds: int) -> None:
    """Train so many rounds more, then as many from each of the other seeds."""
    global simulator, state
    state, _ = jax.block_until_ready(simulator.run(state, rounds))
    for seed in range(job.seed + 1, job.seed + job.seeds):
        test()
        simulator = simulator_of(dataclasses.replace(config, seed=seed), federated, model)
        state, _ = jax.block_until_ready(simulator.run(simulator.init(), rounds))


def test() -> tuple[float, float]:
    """Loss and accuracy of the global model."""
    tested = simulator.test(state)
    return float(tested.loss), float(tested.accuracy)


contest.serve(
    train,
    test,
    parameters=sum(leaf.size for leaf in jax.tree.leaves(simulator.deployed(state)["params"])),
    versions=f"jax {jax.__version__}",
)
