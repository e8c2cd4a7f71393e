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
# # Why recombination finds flat ground
#
# FedMR trains K models and shuffles their layers after every round. Its paper says that this leads to flat minima of
# the loss, where models generalise better. This notebook shows the reason with small runs on scikit-learn's digits, of
# FedAvg, FedMR, and Indep. Indep is FedMR without the shuffle.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The runs
#
# There are three methods with three seeds each. The seeds of a method train in one compiled program.

# %%
import fedjax_mr as fmr

rounds = 40
seeds = 3
results = {}
for method in ("fedavg", "fedmr", "indep"):
    settings = dict(strategy=method, rounds=rounds, eval_every=2, devices=1, progress=False, overwrite=True)
    results[method] = fmr.run_together(
        [fmr.Config(**settings, seed=seed, run_dir=f"runs/flat/{method}-{seed}") for seed in range(seeds)]
    )

# %% [markdown]
# ## A shuffle loses nothing
#
# Recombination permutes the K copies of every tensor. Therefore it does not change the mean of the K models. It also
# does not change their spread, which is the sum of their squared distances from that mean (Lemma 4.4 of the paper). The
# next cell checks this with the models of a run:

# %%
import jax
import jax.numpy as jnp

from fedjax_mr.strategies import fedmr

run = results["fedmr"][0]
units = fedmr.recombination_units(fedmr.Hyper(), run.model.layers())


def recombined(models, number):
    return fedmr.recombine(models, units, jax.random.key(number))


def mean_and_spread(models):
    """The mean of K models as one vector, and the sum of their squared distances from it."""
    vectors = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(models)], axis=1)
    mean = vectors.mean(axis=0)
    return mean, float(jnp.sum((vectors - mean) ** 2))


(mean, before), (mean_after, after) = map(mean_and_spread, (run.state.models, recombined(run.state.models, 1)))
print(f"spread before {before:.4f}, after {after:.4f}; the mean moved by {float(jnp.abs(mean - mean_after).max()):.1e}")
assert abs(after / before - 1) < 1e-4 and jnp.allclose(mean, mean_after, atol=1e-5)

# %% [markdown]
# ## A shuffle moves every model to another corner
#
# A model is a choice of one of K copies for each of its L tensors. All K^L choices are the corners of a box, and the K
# models are K of these corners. Every shuffle moves the models to other corners, and training continues from there.
# Therefore training makes progress only if **all corners are good**. The models of Indep need to be good only at their
# own corners.
#
# The next cell tests the K models and 30 random corners of their box:

# %%
import numpy as np

from fedjax_mr import data

digits = data.load("digits")
inputs, labels = jnp.asarray(digits.test_x) * 2 - 1, digits.test_y  # as training normalises them
accuracy = jax.jit(lambda variables: jnp.mean(jnp.argmax(run.model.apply(variables, inputs), axis=1) == labels))


def accuracies(models):
    return [float(accuracy(fmr.trees.take(models, row))) for row in range(5)]


corners = {}
for method in ("fedmr", "indep"):
    for seed, each in enumerate(results[method]):
        models = each.state.models
        own, mean = np.mean(accuracies(models)), float(accuracy(fmr.trees.mean(models)))
        corners[method, seed] = [value for draw in range(6) for value in accuracies(recombined(models, draw))]
        found = f"the models {own:.3f}, corners {np.mean(corners[method, seed]):.3f}, the mean of the models {mean:.3f}"
        print(f"{method}, seed {seed}: {found}")

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
for axis, method, title in zip(axes, ("fedmr", "indep"), ("FedMR", "Indep: never mixed"), strict=True):
    for seed in range(seeds):
        axis.scatter([seed + shift for shift in np.linspace(-0.2, 0.2, 30)], corners[method, seed], s=9, alpha=0.7)
    axis.set(title=title, xlabel="seed", xticks=range(seeds))
    axis.grid(axis="y", alpha=0.3)
axes[0].set_ylabel("test accuracy of a corner")
plt.show()

# %% [markdown]
# The corners of FedMR's box are as good as its models. The corners of Indep's box are not, although its models are
# nearly as good as FedMR's. If all corners of a box are good, the loss is low and flat inside the box.
#
# ## The models stay similar without averaging
#
# Similarity is the mean cosine between the K uploaded models. FedMR's models are never averaged. But a model that moves
# far away does not stay in one piece: the next shuffle distributes its layers among the other models.

# %%
from IPython.display import Image

from fedjax_mr.analysis.__main__ import main as analysis

together = [f"runs/flat/{method}-0" for method in ("fedavg", "fedmr", "indep")]
analysis(["curves", *together, "--column=similarity", "--out=runs/flat/pictures"])
Image("runs/flat/pictures/similarity.png")

# %% [markdown]
# The spread of each layer, as a share of the layer's norm:

# %%
_ = analysis(["spread", *together[1:], "--out=runs/flat/pictures"])

# %% [markdown]
# ## How flat is it?
#
# The plot shows the training loss around the deployed models along a random direction. Every filter of the direction
# has the norm of the model's filter, so a distance of 1 has the same meaning for all models. The table has two measures
# of flatness: the mean increase of the loss at a distance of 0.2, over ten directions, and the largest eigenvalue of
# the Hessian (by power iteration), which is the curvature in the sharpest direction.

# %%
import optax

train_inputs, train_labels = jnp.asarray(digits.x) * 2 - 1, digits.y


@jax.jit
def loss(variables):
    logits = run.model.apply(variables, train_inputs)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, train_labels))


@jax.jit
def direction(variables, number):
    """A Gaussian direction whose filters (all axes but the last) have the norms of the model's. Biases stay."""
    norm = lambda leaf: jnp.sqrt(jnp.sum(leaf**2, axis=tuple(range(leaf.ndim - 1)), keepdims=True))
    leaves, structure = jax.tree.flatten(variables)
    raw = [jax.random.normal(jax.random.key(100 * number + place), leaf.shape) for place, leaf in enumerate(leaves)]
    pairs = zip(leaves, raw, strict=True)
    scaled = [drawn * norm(leaf) / norm(drawn) if leaf.ndim > 1 else 0 * leaf for leaf, drawn in pairs]
    return jax.tree.unflatten(structure, scaled)


@jax.jit
def moved_loss(variables, along, distance):
    return loss(jax.tree.map(lambda leaf, step: leaf + distance * step, variables, along))


@jax.jit
def hessian_times(variables, vector):
    inner = lambda variables: optax.tree.vdot(jax.grad(loss)(variables), vector)
    return jax.grad(inner)(variables)


def rise(variables, distance=0.2, directions=10):
    """Mean increase of the loss at a distance, in both ways of ten random directions."""
    ways = [(direction(variables, number), sign * distance) for number in range(directions) for sign in (-1, 1)]
    return float(np.mean([moved_loss(variables, *way) for way in ways]) - loss(variables))


def largest_eigenvalue(variables, products=100):
    vector = direction(variables, 0)
    for _ in range(products):
        vector = optax.tree.scale(1 / optax.tree.norm(vector), vector)
        vector = hessian_times(variables, vector)
    return float(optax.tree.norm(vector))


steps = np.linspace(-1, 1, 13)
figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
print(f"{'':8}{'seed':>5}{'loss':>9}{'rise at 0.2':>13}{'eigenvalue':>12}")
for method, colour in (("fedavg", "C1"), ("fedmr", "C0")):
    for seed, each in enumerate(results[method]):
        deployed = each.variables
        numbers = f"{loss(deployed):9.4f}{rise(deployed):13.4f}{largest_eigenvalue(deployed):12.2f}"
        print(f"{method:8}{seed:5}{numbers}")
        heights = [moved_loss(deployed, direction(deployed, 0), step) for step in steps]
        axis.plot(steps, heights, color=colour, alpha=0.7, label=method if seed == 0 else None)
axis.set(xlabel="distance (filter norms)", ylabel="training loss (nats)")
axis.legend()
plt.show()

# %% [markdown]
# Compare the rows of the table seed by seed. When this notebook was run, FedMR was flatter in the sharpest direction
# with all three seeds, and in random directions with two of them.
# FedMR's loss was higher after these few rounds, and a model that fits less well is often flatter. On this small
# problem, the flat box is easy to see, but the deployed model in its middle is only a little flatter than FedAvg's.
# [The record](../../experiments/RESULTS.md) shows how much FedMR gains on CIFAR-10 over 500 rounds, and where it does
# not.
