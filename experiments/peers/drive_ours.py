"""This project's engine, as its users run it: CPU cores are devices, all rounds asked for in one call."""

import contest
import jax

import fedjax_mr as fmr
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.evaluation import Evaluation
from fedjax_mr.experiment.build import build_model, build_rounds, samples
from fedjax_mr.experiment.federation import federated_data

job = contest.job()
set_up_jax(devices=None, cohort_size=job.cohort)
x, y, test_x, test_y = contest.load(job)
half = (0.5,) * 3
dataset = fmr.Dataset("synthetic", x.reshape(-1, *x.shape[2:]), y.reshape(-1), test_x, test_y, 10, mean=half, std=half)
config = fmr.Config(
    strategy="fedavg", model="lenet5", partition="iid", clients=len(y), cohort=job.cohort, local_epochs=job.epochs,
    batch_size=job.batch, lr=job.lr, momentum=job.momentum,
)  # fmt: skip
federated = federated_data(config, dataset=dataset)
model = build_model(config, federated)
engine = build_rounds(config, federated, model, client_axis(cohort_size=job.cohort, devices=None, lanes=None))
evaluation = Evaluation(model, samples(federated, test_x, test_y), engine.axis)
progress = engine.init()


def train(rounds: int) -> None:
    """Train so many rounds more."""
    global progress
    progress, _ = jax.block_until_ready(engine.run(progress, rounds))


def test() -> tuple[float, float]:
    """Return the loss and the accuracy of the global model."""
    tested = evaluation.one(engine.deployed(progress))
    return float(tested.loss), float(tested.accuracy)


contest.serve(
    train,
    test,
    parameters=sum(leaf.size for leaf in jax.tree.leaves(engine.deployed(progress))),
    versions=f"jax {jax.__version__}",
)
