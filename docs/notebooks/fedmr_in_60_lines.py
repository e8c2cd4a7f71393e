# ---
# jupyter:
#   jupytext:
#     formats: py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FedMR in 60 lines of plain JAX
#
# After this notebook you know how FedMR works, line by line.
#
# Federated averaging sends one model to K clients, trains it on each client, and averages the results. **FedMR** (Hu
# et al., KDD 2024) keeps K models instead. Client j of a round trains model j, and the server *recombines* the K
# trained models: for every layer (here: every tensor) it shuffles the K copies among the models. No copy is averaged
# and none is lost, so the mean of the K models does not change. This mean is the deployed model.
#
# This notebook has the whole algorithm without a framework. Only the data comes from the package. At the end, the
# package trains with the same initial weights and random keys, and gets the same numbers.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The data
#
# The data are 1,797 real handwritten digits of 8 x 8 pixels. N = 20 clients share them. Each client has mostly a few of
# the ten classes (Dirichlet, alpha = 0.5). K = 5 clients train in each round.

# %%
import jax
import jax.numpy as jnp

from fedjax_mr import data

rounds = 60
clients, cohort, epochs, batch, lr, momentum, seed = 20, 5, 5, 10, 0.05, 0.5, 0
digits = data.load("digits")
federated = data.federate(digits, num_clients=clients, partition="dirichlet", alpha=0.5, seed=seed)
shares = federated.train
print(shares.sizes, "samples of the 20 clients;", len(digits.test_y), "for the test")

# %% [markdown]
# ## The algorithm
#
# JAX computes random numbers from keys. `fold` makes a new key from a key and some numbers: the round, the client, and
# a number for each purpose (0: initial weights, 1: selection, 3: clients, 4: server). The package uses the same
# numbers.

# %%
x, y = jnp.asarray(digits.x).reshape(-1, 64) * 2 - 1, jnp.asarray(digits.y)
test_x, test_y = jnp.asarray(digits.test_x).reshape(-1, 64) * 2 - 1, jnp.asarray(digits.test_y)
index, offsets, sizes = jnp.asarray(shares.index), jnp.asarray(shares.offsets), jnp.asarray(shares.sizes)
place = jnp.arange(int(sizes.max()))


def fold(key, *numbers):
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key


def start(key):
    """A network with one hidden layer, as its four tensors in forward order."""
    normal = lambda number, *shape: jax.random.normal(fold(key, number), shape) / shape[0] ** 0.5
    return normal(0, 64, 32), jnp.zeros(32), normal(1, 32, 10), jnp.zeros(10)


def apply(model, x):
    kernel1, bias1, kernel2, bias2 = model
    return jax.nn.relu(x @ kernel1 + bias1) @ kernel2 + bias2


def loss(model, x, y, mask):
    logits = apply(model, x)
    each = jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    return jnp.sum(each * mask) / jnp.sum(mask)


def train(model, client, key):
    """Train one client: several epochs of SGD with momentum over its own samples, in random order."""
    size = sizes[client]
    steps = (size + batch - 1) // batch

    def step(number, carry):
        model, velocity = carry
        epoch, position = number // steps, number % steps * batch + jnp.arange(batch)
        draw = jax.random.uniform(fold(key, 2 * epoch), place.shape)
        order = jnp.argsort(jnp.where(place < size, draw, 2.0 + place))  # the client's samples come first
        rows = index[offsets[client] + order[jnp.minimum(position, size - 1)]]
        gradient = jax.grad(loss)(model, x[rows], y[rows], position < size)  # the last batch may be smaller
        velocity = jax.tree.map(lambda v, g: g + momentum * v, velocity, gradient)
        return jax.tree.map(lambda w, v: w - lr * v, model, velocity), velocity

    return jax.lax.fori_loop(0, epochs * steps, step, (model, jax.tree.map(jnp.zeros_like, model)))[0]


def recombine(models, key):
    """Shuffle the K copies of every tensor, with a separate permutation for each tensor."""
    numbers = jnp.broadcast_to(jnp.arange(cohort), (len(models), cohort))
    permutations = jax.random.permutation(key, numbers, axis=1, independent=True)
    return tuple(tensors[order] for tensors, order in zip(models, permutations, strict=True))


@jax.jit
def one_round(models, number):
    words = jax.random.bits(fold(root, 1, number), (clients,))
    chosen = jax.lax.top_k(words, cohort)[1]  # K random clients: those with the largest random numbers
    keys = jax.vmap(lambda client: fold(root, 3, number, client, 0))(chosen)
    trained = jax.lax.map(lambda row: train(*row), (models, chosen, keys))
    return recombine(trained, fold(root, 4, number))


root = jax.random.key(seed)
first = start(fold(root, 0))
models = jax.tree.map(lambda leaf: jnp.stack([leaf] * cohort), first)  # K copies of one initial model
history = []
for number in range(rounds):
    models = one_round(models, number)
    if (number + 1) % 5 == 0:
        deployed = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
        history.append(float(jnp.mean(jnp.argmax(apply(deployed, test_x), axis=1) == test_y)))
print(f"accuracy after {rounds} rounds: {history[-1]:.4f}")

# %% [markdown]
# ## The same with the package
#
# The network is a Flax module with the same initial weights. Settings and seed are the same too.

# %%
import flax.linen as nn

import fedjax_mr as fmr


class Network(nn.Module):
    """The network of above, with the same initial weights."""

    @nn.compact
    def __call__(self, x):
        kernel1, bias1, kernel2, bias2 = (lambda *_, tensor=tensor: tensor for tensor in first)
        x = nn.relu(nn.Dense(32, kernel_init=kernel1, bias_init=bias1)(x.reshape(len(x), -1)))
        return nn.Dense(10, kernel_init=kernel2, bias_init=bias2)(x)


training = fmr.local.setting(lr=lr, momentum=momentum, epochs=epochs, batch_size=batch)
simulator = fmr.Simulator(
    "fedmr", Network(), federated, cohort=cohort, local=training, seed=seed, layout=fmr.Layout(devices=1)
)
state, package = simulator.init(), []
for ours in history:
    state, report = simulator.run(state, 5)
    package.append(float(simulator.test(state).accuracy))
    print(f"round {int(state.round):3}: {ours:.4f} here, {package[-1]:.4f} in the package")

# %% [markdown]
# The accuracies agree, and the weights agree too. On the machine that ran this notebook the difference was 0, bit for
# bit. Other processors may add numbers in another order, so the check allows for rounding.

# %%
import numpy as np

params = simulator.deployed(state)["params"]
theirs = [params[layer][name] for layer in ("Dense_0", "Dense_1") for name in ("kernel", "bias")]
for name, ours, other in zip(("kernel 1", "bias 1", "kernel 2", "bias 2"), deployed, theirs, strict=True):
    print(f"largest difference in {name}: {float(jnp.max(jnp.abs(ours - other)))}")
    np.testing.assert_allclose(ours, other, atol=1e-3)
np.testing.assert_allclose(history, package, atol=1.5 / len(test_y))

# %% [markdown]
# ## What one recombination does
#
# Left: the client that trained each tensor of the five models, after the last round. Every column contains each client
# once. Right: test accuracy of the deployed model, which is the mean of the five models.

# %%
import matplotlib.pyplot as plt

numbers = jnp.broadcast_to(jnp.arange(cohort), (4, cohort))
origin = jax.random.permutation(fold(root, 4, rounds - 1), numbers, axis=1, independent=True).T  # [model, tensor]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.imshow(origin, cmap="Set2", vmin=0, vmax=7, aspect="auto")
for model, row in enumerate(np.asarray(origin)):
    for tensor, owner in enumerate(row):
        left.text(tensor, model, f"client {owner + 1}", ha="center", va="center", fontsize=8)
left.set_xticks(range(4), ["kernel 1", "bias 1", "kernel 2", "bias 2"])
left.set_yticks(range(cohort), [f"model {model + 1}" for model in range(cohort)])
evaluated = range(5, rounds + 1, 5)
right.plot(evaluated, package, label="package", color="tab:blue")
right.plot(evaluated, history, "o", label="60 lines", color="tab:orange", markersize=4)
right.set(xlabel="round", ylabel="test accuracy")
right.grid(alpha=0.3)
right.legend()
plt.show()

# %% [markdown]
# ## What to read next
#
# The package adds [the other methods](../methods/index.md) on the same engine, checkpoints and resuming, a count of the
# traffic, tables and plots, several devices, and networks of any kind. Your own method needs about twenty lines: see
# [the next notebook](own_method_in_20_lines.ipynb).
