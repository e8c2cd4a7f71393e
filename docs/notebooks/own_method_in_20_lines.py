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
# After this notebook you can turn an idea into a method, and compare it with FedAvg and FedMR in a table and a plot.
#
# **The idea.** FedAvg replaces the K trained models by their mean. FedMR shuffles their layers and never averages. The
# new method is between them: after FedMR's shuffle, each model moves part of the way towards the mean of all models.
# `pull = 0` is FedMR, and `pull = 1` is FedAvg with equal weights for all clients.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The method
#
# A method is a function `build(hyper, problem)` that returns pure functions. This one starts from FedMR's functions and
# changes the server's update. Each field of `Hyper` is a setting. Its range is checked, and on the command line it is a
# flag.

# %%
import dataclasses

import fedjax_mr as fmr
from fedjax_mr.strategies import fedmr


@dataclasses.dataclass(frozen=True)
class Hyper:
    """The method's own settings."""

    pull: float = fmr.field(0.2, "step of each model towards the mean, as a share of the distance", low=0, high=1)


def build(hyper, problem):
    """FedMR with a pull towards the mean."""
    base = fedmr.build(fedmr.Hyper(), problem)

    def server_update(state, uploads, cohort, round, key):
        after, info = base.server_update(state, uploads, cohort, round, key)
        mean = fmr.trees.broadcast(fmr.trees.mean(after.models), problem.cohort_size)
        return after._replace(models=fmr.trees.interpolate(after.models, mean, hyper.pull)), info

    return base._replace(server_update=server_update)


fmr.STRATEGIES["fednear"] = fmr.Row(build, Hyper, "this page", title="FedNear")

# %% [markdown]
# That is all. The engine trains the clients, counts the traffic, tests the model, writes checkpoints and resumes.
#
# ## Three methods, three seeds
#
# `run_together` trains several runs in one compiled program. Every run has its own folder, as if it had been
# started alone. The data are scikit-learn's digits. 20 clients share them, and five clients train in each round.

# %%
rounds = 40
for method in ("fedavg", "fedmr", "fednear"):
    settings = dict(strategy=method, rounds=rounds, alpha=0.3, eval_every=2, devices=1, progress=False, overwrite=True)
    fmr.run_together([fmr.Config(**settings, seed=seed, run_dir=f"runs/own/{method}-{seed}") for seed in range(3)])

# %% [markdown]
# ## The table
#
# The command `python -m fedjax_mr.analysis table runs/own --target=0.9` prints the same table: mean and standard
# deviation over the seeds, and the rounds and bytes until the test accuracy is 90 %.

# %%
from fedjax_mr.analysis.__main__ import main as analysis

_ = analysis(["table", "runs/own", "--target=0.9"])

# %% [markdown]
# ## The plot
#
# The command `python -m fedjax_mr.analysis curves runs/own` draws the same plot: means, and bands of one standard
# deviation.

# %%
from IPython.display import Image

analysis(["curves", "runs/own"])
Image("runs/own/analysis/accuracy.png")

# %% [markdown]
# With three seeds, two methods differ only where their bands do not overlap. Next, use more seeds and other partitions
# (`alpha=0.1`), and choose `pull` on seeds that you do not report.
#
# ## What to read next
#
# In its own file, loaded with `--import=my_method.py`, the method has flags, help, sweeps, and the tests that every
# method must pass: [Your own method](../recipes/own_method.md).
