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
# FedMR trains K models and shuffles their layers after every round. Its paper says that this leads to flat parts of
# the loss, where models generalise better. This page looks at the reason with small runs on scikit-learn's digits:
# FedAvg, FedMR, and Indep, which is FedMR without its shuffle.

# %% [markdown]
# The next cell installs the package where it is missing, on Colab for example.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The runs
#
# Three methods, three seeds each, the seeds of a method in one compiled program.

# %%
import fedjax_mr as fmr

rounds = 40
seeds = 3
results = {}
for method in ("fedavg", "fedmr", "indep"):
    settings = dict(strategy=method, rounds=rounds, eval_every=2, devices=1, progress=False, overwrite=True)
    results[method] = fmr.run_seeds(
        [fmr.Config(**settings, seed=seed, run_dir=f"runs/flat/{method}-{seed}") for seed in range(seeds)]
    )

# %% [markdown]
# ## A shuffle loses nothing
#
# Recombination permutes the K copies of every tensor. So it changes neither the mean of the K models nor their
# spread, the sum of their squared distances from that mean (Lemma 4.4 of the paper). Here it is with the models of a
# run:

# %%
import jax
import jax.numpy as jnp

from fedjax_mr.strategies import fedmr

run = results["fedmr"][0]
units = fedmr.recombination_units(fedmr.Hyper(), run.model.layers())


def recombined(models, number):
    return fedmr.recombine(models, units, jax.random.key(number))


def mean_and_spread(models):
    """Return the mean of K models as one vector, and the sum of their squared distances from it."""
    vectors = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(models)], axis=1)
    mean = vectors.mean(axis=0)
    return mean, float(jnp.sum((vectors - mean) ** 2))


(mean, before), (mean_after, after) = map(mean_and_spread, (run.state.models, recombined(run.state.models, 1)))
print(f"spread before {before:.4f}, after {after:.4f}; the mean moved by {float(jnp.abs(mean - mean_after).max()):.1e}")
assert abs(after / before - 1) < 1e-4 and jnp.allclose(mean, mean_after, atol=1e-5)

# %% [markdown]
# ## But it moves every model to another corner
#
# Think of the K models as choices: for each tensor one of K copies. Together they span a box of K^L corners, where L
# is the number of tensors; the K models are K of them. Every shuffle puts the models on other corners, and training
# goes on from there. So training only gets on where **all corners are good**. The models of Indep never have to be
# good at any corner but their own.
#
# We test the K models, and 30 random corners of their boxes:

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
# The corners of FedMR's box are as good as its models. Those of Indep are not, although its models alone do nearly as
# well. A box all of whose corners are good is a piece of low, even ground: this is the flatness.
#
# ## The models stay alike without being averaged
#
# Similarity is the mean cosine between the K uploaded models. Nobody averages FedMR's models, but a model that runs
# away does not stay whole: at the next shuffle its layers are dealt out to the others.

# %%
from IPython.display import Image

from fedjax_mr.analysis.__main__ import main as analysis

together = [f"runs/flat/{method}-0" for method in ("fedavg", "fedmr", "indep")]
analysis(["similarity", *together, "--out=runs/flat/pictures"])
Image("runs/flat/pictures/similarity.png")

# %% [markdown]
# Layer by layer, the spread as a share of the layer's norm:

# %%
_ = analysis(["spread", *together[1:], "--out=runs/flat/pictures"])

# %% [markdown]
# ## How flat is it?
#
# The loss around the deployed models, along a random direction with the same relative length for all filters. The
# table has two numbers for flatness: the mean rise of the loss at a distance of 0.2 over ten directions, and the
# largest eigenvalue of the Hessian, the curvature in the sharpest direction.

# %%
deployed = [f"runs/flat/{method}-{seed}" for method in ("fedavg", "fedmr") for seed in range(seeds)]
analysis(["landscape", *deployed, "--dimensions=1", "--points=13", "--of=train", "--out=runs/flat/pictures"])
Image("runs/flat/pictures/landscape1d.png")

# %% [markdown]
# Read the table seed by seed. When this page was made, the sharpest direction was clearly flatter for FedMR with two
# seeds of three and level with the third; in random directions the two methods were about alike. FedMR's loss was
# higher after these few rounds, and a model that fits less is often flatter. So on this small problem the even box is
# plain to see, and the flatness around its middle is modest. On CIFAR-10, over 500 rounds,
# [the record](../../experiments/RESULTS.md) says what FedMR gains in the end, and where it does not.
