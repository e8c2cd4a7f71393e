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
# # Your own method in 20 lines
#
# From an idea to a table and a picture, beside FedAvg and FedMR.
#
# **The idea.** FedAvg replaces the K trained models by their mean. FedMR shuffles their layers and never averages.
# What lies between? After FedMR's shuffle, each model goes a part of the way towards the mean of all: `pull = 0` is
# FedMR, `pull = 1` is FedAvg (with equal weights for all clients).

# %% [markdown]
# The next cell installs the package where it is missing, on Colab for example.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The method
#
# A method is a function `build(hyper, problem)` that returns pure functions. This one takes FedMR's and changes what
# the server does after a round. Each field of `Hyper` is a setting, with its range checked and, on the command line,
# a flag.

# %%
import dataclasses

import fedjax_mr as fmr
from fedjax_mr.strategies import fedmr


@dataclasses.dataclass(frozen=True)
class Hyper:
    """The method's own settings."""

    pull: float = fmr.field(0.2, "share of the way that each model goes towards the mean", low=0, high=1)


def build(hyper, problem):
    """Return FedMR with a pull towards the mean."""
    base = fedmr.build(fedmr.Hyper(), problem)

    def server_update(state, uploads, cohort, round, key):
        after, info = base.server_update(state, uploads, cohort, round, key)
        mean = fmr.trees.broadcast(fmr.trees.mean(after.models), problem.cohort_size)
        return after._replace(models=fmr.trees.interpolate(after.models, mean, hyper.pull)), info

    return base._replace(server_update=server_update)


fmr.STRATEGIES["fednear"] = fmr.Row(build, Hyper, "this page", title="FedNear")

# %% [markdown]
# That is all: the engine trains the clients, counts the traffic, tests, keeps checkpoints and resumes.
#
# ## Three methods, three seeds
#
# `run_seeds` trains the seeds of a setting in one compiled program. Every run has a folder, as if it had been started
# alone. The data are scikit-learn's digits, held by 20 clients; five of them take part in a round.

# %%
rounds = 40
for method in ("fedavg", "fedmr", "fednear"):
    settings = dict(strategy=method, rounds=rounds, alpha=0.3, eval_every=2, devices=1, progress=False, overwrite=True)
    fmr.run_seeds([fmr.Config(**settings, seed=seed, run_dir=f"runs/own/{method}-{seed}") for seed in range(3)])

# %% [markdown]
# ## The table
#
# What `python -m fedjax_mr.analysis table runs/own --target=0.9` prints: means over the seeds with their standard
# deviations, the rounds and bytes until 90 % of the test images are recognised.

# %%
from fedjax_mr.analysis.__main__ import main as analysis

_ = analysis(["table", "runs/own", "--target=0.9"])

# %% [markdown]
# ## The picture
#
# What `python -m fedjax_mr.analysis curves runs/own` draws: means, and bands of one standard deviation.

# %%
from IPython.display import Image

analysis(["curves", "runs/own"])
Image("runs/own/analysis/accuracy.png")

# %% [markdown]
# Three seeds tell two methods apart only where their bands do. The honest next steps are more seeds, other divisions
# (`alpha=0.1`), and choosing `pull` on seeds that are not reported.
#
# ## Where to go on
#
# In a file of its own the method has flags, help, sweeps and the tests that every method must pass, by
# `--import=my_method.py`: [Your own method](../recipes/own_method.md).
