"""Small federations and their compiled rounds, for tests of strategies."""

import functools
import gc
import threading
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from fedjax_mr import models
from fedjax_mr.client import local
from fedjax_mr.data import Dataset, FederatedData, Split
from fedjax_mr.data.federated import Public
from fedjax_mr.engine import program
from fedjax_mr.engine.layout import Layout
from fedjax_mr.engine.round import Federation, RunConstants, begin, start, train_client
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.models import layers
from fedjax_mr.models.blocks import Flatten
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.strategies.interface import Cohort
from fedjax_mr.strategies.parts import averaging
from fedjax_mr.strategies.traffic import usual_traffic
from fedjax_mr.testing.adapted import adapted

# The tests' programs are small and run for milliseconds, so optimising them would take longer than running them.
QUICK_TO_COMPILE = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": "false",  # in JAX 0.10; later there are no other emitters
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion",  # a sixth of the time of a small round
}
SIZES = (7, 12, 1, 5, 9, 4)  # samples per client: uneven, one client with a single sample
COHORT, CLASSES, BATCH, EPOCHS = 3, 3, 4, 2


class ThinBlock(nn.Module):
    """A convolution with BatchNorm and dropout."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        # No bias: before a normalisation its gradient is only rounding, along which Adam would take full steps.
        x = layers.Conv(4, (2, 2), strides=2, padding="VALID", use_bias=False, name="conv")(x)
        x = nn.relu(layers.BatchNorm(name="norm")(x, train=train, mask=mask)).reshape(x.shape[0], -1)
        return nn.Dropout(0.1, deterministic=not train)(x)


class ThinHead(nn.Module):
    """The classifier of all networks."""

    num_classes: int

    @nn.compact
    def __call__(self, z, *, train=False, mask=None):
        return layers.Dense(self.num_classes, name="dense")(z)


class Thin(models.BlockNet):
    """The smallest network of the contract: convolution, BatchNorm, dropout, dense layer."""

    def blocks(self):
        return ("body", ThinBlock()), ("classifier", ThinHead(self.num_classes))


class Linear(models.BlockNet):
    """Multinomial logistic regression: convex, and every strategy must make progress on it."""

    def blocks(self):
        return ("flatten", Flatten()), ("classifier", ThinHead(self.num_classes))


class Normed(models.BlockNet):
    """BatchNorm and dropout as in ``Thin``, on the images themselves: what the quick contract trains everywhere."""

    def blocks(self):
        return ("body", NormedImages()), ("classifier", ThinHead(self.num_classes))


class Perceptron(models.BlockNet):
    """One smooth hidden layer: the network on which equations are written down a second time."""

    def blocks(self):
        return ("hidden", Hidden()), ("classifier", ThinHead(self.num_classes))


class Hidden(nn.Module):
    """The layer of `Perceptron`."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        return nn.tanh(layers.Dense(5, name="dense")(x.reshape(x.shape[0], -1)))


class NormedImages(nn.Module):
    """The body of `Normed`."""

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        x = layers.BatchNorm(name="norm")(x.reshape(x.shape[0], -1), train=train, mask=mask)
        return nn.Dropout(0.1, deterministic=not train)(x)


class Constant(models.BlockNet):
    """The parameters are the logits of every sample, so gradients and losses can be followed by hand."""

    def blocks(self):
        return (("classifier", Logits(self.num_classes)),)


class Logits(nn.Module):
    """The layer of `Constant`; it starts at 0."""

    num_classes: int

    @nn.compact
    def __call__(self, x, *, train=False, mask=None):
        theta = self.param("theta", nn.initializers.zeros, (self.num_classes,))
        return jnp.broadcast_to(theta, (x.shape[0], self.num_classes))


NETWORKS = {"thin": Thin, "normed": Normed, "linear": Linear, "perceptron": Perceptron, "constant": Constant}


@functools.cache  # a model keeps its shapes
def network_of(name):
    """A network by its name, or the zoo of several names separated by commas; ``adapted`` has adapters."""
    if name == "adapted":
        return adapted(head=True)
    built = [models.Model(NETWORKS[each](num_classes=CLASSES), (4, 4, 1), name=each) for each in name.split(",")]
    return built[0] if len(built) == 1 else models.Zoo.of(built)


@functools.cache
def federated(sizes=SIZES):
    """A small federation of 4 x 4 images whose class shows in their brightness; ``sizes`` [N] are its clients'."""
    rng = np.random.default_rng(0)
    count = sum(sizes)
    y = rng.integers(0, CLASSES, count).astype(np.int32)
    x = (rng.normal(size=(count, 4, 4, 1)) * 0.5 + y[:, None, None, None]).astype(np.float32)
    split = Split.of(np.split(rng.permutation(count), np.cumsum(sizes)[:-1]))
    public = (rng.normal(size=(10, 4, 4, 1)) + rng.integers(0, CLASSES, (10, 1, 1, 1))).astype(np.float32)
    labels = np.arange(10, dtype=np.int32) % CLASSES
    return FederatedData(Dataset("bright", x, y, x, y, CLASSES), split, public=Public(public, labels))


class SharingSimulator(Simulator):
    """A simulator that shares compiled programs even with code of users, which no test changes."""

    def _code_of(self, *_):
        return None


# Not all at once: a compiled program takes hundreds of memory maps, and Linux allows a process 65,530 of them.
@functools.lru_cache(maxsize=40)
def simulator(
    build,
    network="thin",
    *,
    sizes=SIZES,
    cohort=COHORT,
    lr=0.05,
    momentum=0.5,
    epochs=EPOCHS,
    batch_size=BATCH,
    devices=None,
    lanes=None,
    memory_on_host=False,
    data_on_host=False,
    **options,
):
    """A simulator of the small federation; ``build`` is (build, hyper) of a strategy."""
    return SharingSimulator(
        build[0],
        network_of(network),
        federated(sizes),
        cohort=cohort,
        local=local.setting(lr=lr, momentum=momentum, epochs=epochs, batch_size=batch_size),
        architectures=[client % len(network.split(",")) for client in range(len(sizes))],
        layout=Layout(
            devices=devices,
            lanes=lanes,
            memory="host" if memory_on_host else "device",
            data_placement="host" if data_on_host else "device",
        ),
        hyper=build[1],
        **options,
    )


def _averaging(hyper, problem):
    return averaging(problem)


@functools.lru_cache(maxsize=24)  # the same object for the same federation: programs may then be shared
def constants(network="thin", *, seed=0, sizes=SIZES, **federation):
    """The constants of the small federation: its problem, the images and rows of its clients, and the key of a run."""
    options = {"devices": 1, "lanes": 1, "seed": seed, "sizes": sizes} | federation
    build, problem, known, key, _ = simulator((_averaging, None), network, **options).rounds.constants
    samples, index, offsets = jax.device_get(known)
    images = samples._replace(x=federated(sizes).dataset.x, shape=None)
    return RunConstants(build, problem, Federation(images, index, offsets), key)


def default_hyper(strategy):
    """The hyper-parameters with which the contract trains a strategy; None if it has none."""
    row = STRATEGIES[strategy]
    small = row.contract.small
    return small if small is not None or row.hyper is None else row.hyper()


def random_like(models, seed=0, *, scale=0.1):
    """K different models near some; their running variances stay positive."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: np.asarray(leaf) * (1 + scale * rng.random(leaf.shape, np.float32)), models)


def numbers_like(shapes, seed=0, *, scale=1.0):
    """Normal numbers for the variables of a network, drawn by NumPy: no program of its initialisers is compiled.

    Their standard deviation is ``scale`` over the root of a kernel's inputs, and a tenth of it for vectors. Scales and
    variances are positive.
    """
    rng = np.random.default_rng(seed)

    def numbers(path, leaf):
        if path[-1].key in ("scale", "var"):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype)
        inputs = np.prod(leaf.shape[:-1]) if len(leaf.shape) > 1 else 100
        return (scale * rng.standard_normal(leaf.shape) / inputs**0.5).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(numbers, shapes)


def first_cohort(problem):
    """The cohort of the clients 0 to K - 1."""
    ids = jnp.arange(problem.cohort_size, dtype=jnp.int32)
    return Cohort(ids, problem.sizes[: problem.cohort_size])


def make_engine(strategy, network="thin", *, devices=1, lanes=1, hyper=None, **federation):
    """The compiled rounds of a strategy; tests with equal arguments share them."""
    row = STRATEGIES[strategy]
    network = "adapted" if row.adapters else network
    hyper = default_hyper(strategy) if hyper is None else hyper
    options = {"devices": devices, "lanes": lanes, "seed": 0} | federation
    return simulator((row.build, hyper), network, **dict(sorted(options.items()))).rounds


MOST_MAPS = 35_000  # of the 65,530 that Linux allows a process; beyond them XLA dies by a segmentation fault


def lower_in_few_contexts(programs: int = 200) -> None:
    """Lower so many programs of a thread in one MLIR context: making one takes half of the lowering of a small one."""
    made, initialise = threading.local(), mlir.ModuleContext.__init__

    @functools.wraps(initialise)
    def in_a_shared_context(self: Any, *args: Any, context: Any = None, **options: Any) -> None:
        if context is None:
            made.left = getattr(made, "left", 0) - 1
            if made.left < 0:  # what a context knows stays in it, so it is not kept for ever
                made.context, made.left = mlir.make_ir_context(), programs - 1
            context = made.context
        initialise(self, *args, context=context, **options)

    mlir.ModuleContext.__init__ = in_a_shared_context


def drop_programs() -> None:
    """Delete the programs of earlier tests if they take too many memory maps."""
    if memory_maps() > MOST_MAPS:
        simulator.cache_clear()
        program.forget()
        jax.clear_caches()
        gc.collect()


def memory_maps():
    """The number of memory maps of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def bytes_of_a_round(engine, round=0):
    """The bytes down, up and between clients in a round, for strategies whose traffic follows from shapes."""

    def shapes(constants):
        progress = start(constants)
        plan, rows = begin(engine.axis, constants, progress)
        rows = jax.tree.map(lambda leaf: leaf[: constants.problem.cohort_size], rows)
        uploads = jax.vmap(lambda row: train_client(constants, progress.round, row)[0])(rows)
        return progress.server, plan.cohort, rows.payload, uploads

    state, cohort, payloads, uploads = jax.eval_shape(shapes, engine.constants)
    traffic = usual_traffic(payloads, uploads)
    if engine.strategy.traffic is not None:
        traffic = engine.strategy.traffic(traffic, state, uploads, cohort, round)
    return traffic.num_bytes()


def tree_equal(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), a, b)


def tree_close(a, b, *, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=atol), a, b)
