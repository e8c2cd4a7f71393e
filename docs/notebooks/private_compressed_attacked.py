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
# # Private, compressed, attacked
#
# After this notebook you can change what happens to a message between a client and the server: make it smaller, make
# it private, let somebody falsify it, and let the server screen it.
#
# **The idea.** A method says how clients train and how the server combines their models. What happens to the messages
# in between does not belong to the method. It is a *channel*, a chain of **links**:
#
# ```text
# server | robust | attack | privacy | compression | network
# ```
#
# Every link works on the *change* of a model: what a client uploads minus what it received. So the same link fits
# FedAvg, which keeps one model, and FedMR, which keeps K models and shuffles their layers. But the effects differ,
# and that is the subject of this notebook.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## Two methods without a channel
#
# The data are scikit-learn's digits. 20 clients share them, and K = 10 train in each round. The next cell trains
# FedAvg and FedMR, and counts the bytes that the clients upload.

# %%
import fedjax_mr as fmr
from fedjax_mr.channel import channel, links
from fedjax_mr.errors import DivergedError
from fedjax_mr.strategies import fedavg, fedmr

rounds = 40
digits = fmr.data.load("digits")
federated = fmr.data.federate(digits, num_clients=20, partition="dirichlet", alpha=0.5)
# Uniform weights: with privacy, the numbers of samples must not leave the clients.
methods = {"FedAvg": (fedavg.build, fedavg.Hyper(weights="uniform")), "FedMR": (fedmr.build, fedmr.Hyper())}
curves = {}


def train(name, links_of):
    """Train both methods with the links ``links_of(problem, stacked)``. Print accuracy and bytes."""
    for method, (build, hyper) in methods.items():

        def with_channel(hyper, problem, build=build, stacked=method == "FedMR"):
            return channel(build(hyper, problem), problem, links_of(problem, stacked))

        simulator = fmr.Simulator(with_channel, "cnn_digits", federated, cohort=10, hyper=hyper, seed=0)
        state, accuracies, sent = simulator.init(), [], 0
        try:
            while int(state.round) < rounds:
                state, report = simulator.run(state, 2)
                sent += report.traffic.num_bytes()[1]
                accuracies.append(float(simulator.test(state).accuracy))
            result = f"accuracy {accuracies[-1]:.3f}, {sent / 1e6:6.2f} MB uploaded"
        except DivergedError as error:
            result = f"{error}".partition(":")[0]
        curves[name, method] = accuracies
        print(f"{method:6} {name}: {result}")


train("plain", lambda problem, stacked: [])

# %% [markdown]
# ## Compressed
#
# Top-k sends only the largest numbers of a change, here 5 %, with their positions. **Error feedback** keeps what was
# not sent, and the client adds it to its next message, so nothing is lost for good. Compare the megabytes.

# %%
train("top 5 %", lambda problem, stacked: [links.compression(problem, "topk", ratio=0.05)])
train("top 5 %, feedback", lambda problem, stacked: [links.compression(problem, "topk", ratio=0.05, feedback="ef")])

# %% [markdown]
# The bytes are those of real messages: a number has 4 bytes, and its position in the tensor needs a few bits, too. So
# 5 % of the numbers cost about 7 % of the bytes.
#
# ## Attacked
#
# Four of the 20 clients are attackers. They upload the *opposite* of their change (`sign_flip`). The server does not
# know who they are. **Multi-Krum** keeps the K - f messages that are closest to each other, with f = 3. For FedAvg,
# the server takes the mean of these messages. For FedMR it *screens*: in the place of a refused model, it keeps the
# model that this client had received. So there are still K models to shuffle.

# %%
attacked = lambda problem: links.attack(problem, "sign_flip", attackers=0.2, seed=0)
screened = lambda problem, stacked: links.robust(problem, "multi_krum", outliers=3, stacked=stacked)
train("attacked", lambda problem, stacked: [attacked(problem)])
train("attacked, Multi-Krum", lambda problem, stacked: [screened(problem, stacked), attacked(problem)])

# %% [markdown]
# **Averaging dilutes an attack, and recombination spreads it.** In FedAvg an attacker's change counts one K-th. In
# FedMR the falsified layers stay whole, and the shuffle hands them on to other models. A method that is better on
# honest clients can be worse under attack, so test both.
#
# ## Private
#
# With **differential privacy for clients**, a reader of all messages cannot be certain whether a client
# took part. Each client shortens its change to the length C and adds Gaussian noise of standard deviation s C to
# every number. FedAvg may add less noise to each message, so that only the *mean* carries the noise s C / K
# (`noise_on="mean"`). FedMR hands every single model on, so each one needs the full noise, and no mean ever reduces
# it: after T rounds, a model carries the noise of T uploads. The price of privacy is higher for several models.


# %%
def private(problem, stacked):
    return [links.privacy(problem, clip=0.1, noise=1.0, noise_on="upload" if stacked else "mean")]


train("private", private)

# %% [markdown]
# `epsilon` bounds how much an observer can learn about a client: the smaller, the better. Here the observer sees all
# messages and knows who sent them. Epsilon depends on the noise s, on the number of rounds and on how often a client
# takes part. It depends neither on C nor on the method.

# %%
from fedjax_mr.channel.accounting import epsilon

for noise in (1, 4):
    value = epsilon(rounds, noise=noise, delta=1e-3, num_clients=20, cohort=10, sampling="public")
    print(f"noise s = {noise}: epsilon {value:.1f} after {rounds} rounds")

# %% [markdown]
# These numbers are too large to promise anything, because 20 clients are few, and half of them take part in each
# round. [Privacy](../privacy.md#epsilon-of-100-rounds) has numbers for 10,000 clients, whose epsilon is small.
#
# ## All together

# %%
import matplotlib.pyplot as plt

names = dict.fromkeys(name for name, _ in curves)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for axis, method in zip(axes, methods, strict=True):
    for number, name in enumerate(names):
        accuracies = curves[name, method]
        color = plt.cm.tab10(number)
        axis.plot(range(2, 2 * len(accuracies) + 1, 2), accuracies, color=color, label=name)
        if 2 * len(accuracies) < rounds:
            axis.plot(2 * len(accuracies), accuracies[-1], "x", color=color, markersize=9)
    axis.set(title=method, xlabel="round", ylim=(0, 1))
    axis.grid(alpha=0.3)
axes[0].set_ylabel("test accuracy")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
plt.show()

# %% [markdown]
# A cross marks where a run diverged. This is one seed of an easy problem: it shows that the links work and what they
# do, and ranks nothing. [Our tables](../../experiments/notebook/channel.md) have more methods and two seeds.
#
# ## What to read next
#
# [The channel](../channel.md) lists all links and their flags (`--compress`, `--attack`, `--robust`, `--dp_clip`),
# [which link works with which method](../channel_matrix.md), and how to write a link of your own.
