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
# Federated averaging sends one model to K clients, trains it on each, and averages. **FedMR** (Hu et al., KDD 2024)
# keeps K models instead. Client j of a round trains model j, and the server *recombines* the K trained models: for
# every layer (here: every tensor) it shuffles the K copies among the models. No copy is averaged, none is lost, so
# the mean of the K models stays what it was; that mean is the model that is deployed.
#
# Here is the whole algorithm without a framework. Only the data come from the package. At the end the package trains
# with the same starting weights and random keys, and arrives at the same numbers.

# %% [markdown]
# The next cell installs the package where it is missing, on Colab for example.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The data
#
# 1,797 real handwritten digits of 8 x 8 pixels. N = 20 clients hold them, each mostly some of the ten classes
# (Dirichlet, alpha = 0.5); K = 5 of them take part in a round.

# %%
import jax
import jax.numpy as jnp

from fedjax_mr import data

rounds = 60
clients, cohort, epochs, batch, lr, momentum, seed = 20, 5, 5, 10, 0.05, 0.5, 0
digits = data.load("digits")
shares = data.federate(digits, num_clients=clients, partition="dirichlet", alpha=0.5, seed=seed).train
print(shares.sizes, "samples of the 20 clients;", len(digits.test_y), "for the test")

# %% [markdown]
# ## The algorithm
#
# JAX's random numbers come from keys; `fold` makes a new key from a key and some numbers: the round, the client, and
# a number for each purpose (0: start, 1: selection, 3: clients, 4: server), by which the package tells them apart,
# too.

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
    """Return a network of one hidden layer as its four tensors, in forward order."""
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
    """Train one client: some epochs of SGD with momentum over its own samples, in random order."""
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
    """Shuffle the K copies of every tensor, each tensor by a permutation of its own."""
    numbers = jnp.broadcast_to(jnp.arange(cohort), (len(models), cohort))
    permutations = jax.random.permutation(key, numbers, axis=1, independent=True)
    return tuple(tensors[order] for tensors, order in zip(models, permutations, strict=True))


@jax.jit
def one_round(models, number):
    words = jax.random.bits(fold(root, 1, number), (clients,))
    chosen = jax.lax.top_k(words, cohort)[1]  # K clients at random: those with the largest words
    keys = jax.vmap(lambda client: fold(root, 3, number, client, 0))(chosen)
    trained = jax.lax.map(lambda row: train(*row), (models, chosen, keys))
    return recombine(trained, fold(root, 4, number))


root = jax.random.key(seed)
first = start(fold(root, 0))
models = jax.tree.map(lambda leaf: jnp.stack([leaf] * cohort), first)  # K copies of one start
history = []
for number in range(rounds):
    models = one_round(models, number)
    if (number + 1) % 5 == 0:
        deployed = jax.tree.map(lambda leaf: leaf.mean(axis=0), models)
        history.append(float(jnp.mean(jnp.argmax(apply(deployed, test_x), axis=1) == test_y)))
print(f"accuracy after {rounds} rounds: {history[-1]:.4f}")

# %% [markdown]
# ## The same from the package
#
# The network as a Flax module that begins with our weights, the same settings, the same seed.

# %%
import flax.linen as nn

import fedjax_mr as fmr


class Network(nn.Module):
    """Our network; it starts with the weights of above."""

    @nn.compact
    def __call__(self, x):
        kernel1, bias1, kernel2, bias2 = (lambda *_, tensor=tensor: tensor for tensor in first)
        x = nn.relu(nn.Dense(32, kernel_init=kernel1, bias_init=bias1)(x.reshape(len(x), -1)))
        return nn.Dense(10, kernel_init=kernel2, bias_init=bias2)(x)


config = fmr.Config(
    strategy="fedmr", dataset="digits", clients=clients, cohort=cohort, partition="dirichlet", alpha=0.5,
    local_epochs=epochs, batch_size=batch, lr=lr, momentum=momentum, seed=seed, rounds=rounds, eval_every=5,
    devices=1, progress=False, run_dir="runs/60_lines", overwrite=True,
)  # fmt: skip
result = fmr.run(config, model=Network())
for ours, row in zip(history, result.rows, strict=True):
    print(f"round {row['round']:3}: {ours:.4f} here, {row['accuracy']:.4f} in the package")

# %% [markdown]
# The accuracies agree, and so do the weights. On the machine that made this page the difference was 0, bit for bit;
# other processors may add up in another order, so the check leaves room for rounding.

# %%
import numpy as np

params = result.variables["params"]
theirs = [params[layer][name] for layer in ("Dense_0", "Dense_1") for name in ("kernel", "bias")]
for name, ours, other in zip(("kernel 1", "bias 1", "kernel 2", "bias 2"), deployed, theirs, strict=True):
    print(f"largest difference in {name}: {float(jnp.max(jnp.abs(ours - other)))}")
    np.testing.assert_allclose(ours, other, atol=1e-3)
np.testing.assert_allclose(history, [row["accuracy"] for row in result.rows], atol=1.5 / len(test_y))

# %% [markdown]
# ## What one recombination does
#
# Left: whose copy of each tensor the five models hold after the last round; every column has each copy once. Right:
# test accuracy of the deployed model, the mean of the five.

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
right.plot(evaluated, [row["accuracy"] for row in result.rows], label="package", color="tab:blue")
right.plot(evaluated, history, "o", label="60 lines", color="tab:orange", markersize=4)
right.set(xlabel="round", ylabel="test accuracy")
right.grid(alpha=0.3)
right.legend()
plt.show()

# %% [markdown]
# ## Where to go on
#
# What the package adds to these lines: [the other methods](../methods/index.md) on the same engine, checkpoints and
# resuming, counted traffic, tables and pictures, several devices, and networks of any kind. Your own method is about
# twenty lines: [the next page](own_method_in_20_lines.ipynb).
