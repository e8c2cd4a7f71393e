"""FedJAX's simulation: `federated_averaging` on a Haiku network with the backend ``jit`` or ``pmap``."""

import importlib.metadata
import os

import contest

job = contest.job()
if job.variant == "pmap":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={job.processes}"

import jax  # noqa: E402

if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # removed from JAX after FedJAX's last release

if job.variant == "pmap":
    jax.config.update("jax_pmap_no_rank_reduction", False)  # as FedJAX knew pmap

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

x, y, test_x, test_y = contest.load(job)


def initialised(inputs: int) -> dict:
    """PyTorch's initialisation of a layer with a number of inputs."""
    draw = hk.initializers.RandomUniform(-(inputs**-0.5), inputs**-0.5)
    return {"w_init": draw, "b_init": draw}


def forward(batch: dict) -> jax.Array:
    """The logits of LeNet-5 for images of bytes."""
    pool = lambda z: hk.max_pool(jax.nn.relu(z), 2, 2, "VALID", channel_axis=-1)
    z = batch["x"].astype(jnp.float32) * (2 / 255) - 1
    z = pool(hk.Conv2D(6, 5, padding="VALID", **initialised(75))(z))
    z = pool(hk.Conv2D(16, 5, padding="VALID", **initialised(150))(z))
    for inputs, outputs in ((400, 120), (120, 84), (84, 10)):
        z = hk.Linear(outputs, **initialised(inputs))(hk.Flatten()(z) if inputs == 400 else jax.nn.relu(z))
    return z


def cross_entropy(batch: dict, logits: jax.Array) -> jax.Array:
    """The loss of each sample."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)[:, 0]


sample = {"x": test_x[:1], "y": test_y[:1]}
model = fedjax.create_model_from_haiku(hk.transform(forward), sample, cross_entropy)
with fedjax.for_each_client_backend(job.variant):
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(job.lr, job.momentum),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch, num_epochs=job.epochs),
    )
federated = fedjax.InMemoryFederatedData({client: {"x": x[client], "y": y[client]} for client in range(len(y))})
sampler = fedjax.client_samplers.UniformGetClientSampler(federated, job.cohort, seed=job.seed)
state = algorithm.init(model.init(jax.random.PRNGKey(job.seed)))


def train(rounds: int) -> None:
    """Train so many rounds of FedAvg."""
    global state
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)


@jax.jit
def score(params: dict) -> tuple[jax.Array, jax.Array]:
    """Loss and accuracy."""
    batch = {"x": test_x, "y": test_y}
    logits = model.apply_for_eval(params, batch)
    return cross_entropy(batch, logits).mean(), (logits.argmax(1) == test_y).mean()


def test() -> tuple[float, float]:
    """Loss and accuracy of the global model."""
    loss, accuracy = score(state.params)
    return float(loss), float(accuracy)


contest.serve(
    train,
    test,
    parameters=sum(leaf.size for leaf in jax.tree_util.tree_leaves(state.params)),
    versions=f"fedjax {importlib.metadata.version('fedjax')}, jax {jax.__version__}",
)
