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
# # Asynchronous FedCross
#
# After this notebook you know what a synchronous round costs on slow devices, and how K circulating models make
# FedCross asynchronous.
#
# In a synchronous round the server waits for the slowest client. Some phones need ten times as long as others, so
# most devices are idle most of the time. FedAvg with asynchronous clients has a problem: an upload is *stale* if the
# server has changed its only model since the client started. **Methods with several models have a natural way out**:
# every client in flight trains a model of its own, and no other client changes this model meanwhile.
#
# FedCross (Hu et al., 2022) keeps K models. A model that returns is mixed a little with another one, its
# collaborator: w_i = alpha v_i + (1 - alpha) v_j. In the asynchronous form, which is our own, this happens as soon as
# one model returns. Then the model is sent to the next client. No client waits for another.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## The same work, synchronous and asynchronous
#
# `fleet="classes"` gives each of the 20 clients a simulated device and a network of one of five classes of speed. The
# training itself is the same as always. Only the column `clock` is new: the seconds that these devices would need.
#
# Both runs train 10 models at the same time, and both train 300 clients: 30 rounds of 10, or 300 arrivals of one.

# %%
import fedjax_mr as fmr

rounds = 30
common = dict(clients=20, fleet="classes", alpha=0.5, lr=0.05, seed=0, devices=1, progress=False, overwrite=True)
synchronous = fmr.run(
    fmr.Config(
        strategy="fedcross", cohort=10, rounds=rounds, eval_every=1, run_dir="runs/async/fedcross-sync", **common
    )
)
asynchronous = fmr.run(
    fmr.Config(
        strategy="fedcross", mode="async", in_flight=10, cohort=1, rounds=10 * rounds, eval_every=10,
        run_dir="runs/async/fedcross-async", **common,
    )
)  # fmt: skip
for name, result in (("synchronous", synchronous), ("asynchronous", asynchronous)):
    last = result.rows[-1]
    print(f"{name:12}: {last['clock'] / 3600:.2f} simulated hours, test accuracy {last['accuracy']:.3f}")

# %% [markdown]
# ## Where the time goes
#
# In the timeline, a row is a client, with the fastest device on top. A bar is a job: the download, the training and
# the upload. First the synchronous run:

# %%
from IPython.display import Image

from fedjax_mr.analysis.__main__ import main as analysis

_ = analysis(["timeline", "runs/async/fedcross-sync", "--rounds=8"])
Image("runs/async/fedcross-sync/analysis/timeline.png")

# %% [markdown]
# A round ends when its longest bar ends. Until then, the other nine clients wait. In the asynchronous run, ten
# clients train at every moment, because a model that arrives is sent again at once. Each grey line is a new version
# of the server, after one arrival. The colour of a bar is its *staleness*, the number of versions since the client
# started:

# %%
_ = analysis(["timeline", "runs/async/fedcross-async", "--rounds=80"])
Image("runs/async/fedcross-async/analysis/timeline.png")

# %% [markdown]
# The slowest clients return after 20 other arrivals. With one global model, these uploads would change a model that
# has moved on. Here, each of them updates a model that waited for it.
#
# ## Accuracy over time, and over work

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
for name, result, jobs in (("synchronous", synchronous, 10), ("asynchronous", asynchronous, 1)):
    accuracies = [row["accuracy"] for row in result.rows]
    axes[0].plot([row["clock"] / 3600 for row in result.rows], accuracies, label=name)
    axes[1].plot([row["round"] * jobs for row in result.rows], accuracies, label=name)
axes[0].set(xlabel="simulated hours", ylabel="test accuracy")
axes[1].set(xlabel="trained clients")
for axis in axes:
    axis.grid(alpha=0.3)
axes[0].legend()
plt.show()

# %% [markdown]
# The left plot is about *time*: the asynchronous run is done in less than half of the simulated hours. The right plot
# is about *work*: for the same number of trained clients, which is about the same number of bytes, the asynchronous
# method is not better. Show both when you compare asynchronous methods.
#
# ## The price
#
# Fast clients return sooner, so they are chosen more often. Count the bars in the rows of the two timelines: the data
# of slow clients count less in the asynchronous run. There are other choices of clients: GitFL prefers clients that
# trained rarely.
#
# ## What to read next
#
# [Simulated time](../clock.md) has the fleets, the deadlines for synchronous rounds, and the other asynchronous
# methods: FedAsync, FedBuff, FedSA, GitFL and CaBaFL. [Our table](../../experiments/notebook/clock.md) compares them
# on two seeds.
