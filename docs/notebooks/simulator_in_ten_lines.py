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
# # The simulator in ten lines
#
# After this notebook you can train a federation of your own in Python, look inside it, and compare two methods.
#
# In federated learning, N clients keep their data. In every **round**, a server chooses K of them, the *cohort*. Each
# one trains a model on its own data and uploads it. The server combines the K models. A `Simulator` does all this on
# one machine. It is one Python object: it writes no files and reads no settings from anywhere.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## Ten lines
#
# The data are scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, so nothing is downloaded. 20 clients share
# them: in `dirichlet` with a small `alpha`, each client has mostly a few of the ten classes. The method is FedMR, and
# the network is a small CNN.

# %%
import fedjax_mr as fmr

rounds = 40
digits = fmr.data.load("digits")
federated = fmr.data.federate(digits, num_clients=20, partition="dirichlet", alpha=0.3, client_test_share=0.25)
simulator = fmr.Simulator("fedmr", "cnn_digits", federated, cohort=5, seed=0)
state = simulator.init()
for _ in range(rounds // 10):
    state, report = simulator.run(state, 10)  # 10 rounds in one compiled call
    accuracy = simulator.test(state).accuracy
    print(f"round {int(state.round):3}: training loss {report.train_loss:.3f}, test accuracy {accuracy:.3f}")

# %% [markdown]
# The first call compiles the program, which takes a few seconds. Later calls only run it. The simulator does not
# change in a round. **Everything that changes is in `state`**: `run` takes a state and returns the next one.
#
# ## What a state holds
#
# `state.server` is what the server keeps. FedMR keeps K = 5 models, so every array has a first axis of length 5. The
# model that is tested is their mean. `deployed` returns it.

# %%
import jax

kept, deployed = state.server.models["params"], simulator.deployed(state)["params"]
for (path, leaf), mean in zip(jax.tree.leaves_with_path(kept), jax.tree.leaves(deployed), strict=True):
    print(f"{jax.tree_util.keystr(path, simple=True, separator='/'):25} {leaf.shape!s:20} deployed: {mean.shape}")

# %% [markdown]
# The report of a call counts what happened. The bytes are those that clients and server would send over a network.

# %%
down, up, _ = report.traffic.num_bytes()
print(f"10 rounds: {int(report.images):,} training samples, {down / 1e6:.2f} MB down, {up / 1e6:.2f} MB up")

# %% [markdown]
# ## The same numbers, however you divide the rounds
#
# All random numbers come from the seed, the number of the round and the number of the client. So 4 calls of 10 rounds
# and one call of 40 rounds give the same models, bit for bit. This makes experiments easy to repeat and to continue.

# %%
import numpy as np

again, _ = simulator.run(simulator.init(), rounds)
same = jax.tree.map(lambda one, other: bool(np.array_equal(one, other)), state.server.models, again.server.models)
assert all(jax.tree.leaves(same))
print("all weights of all models are equal")

# %% [markdown]
# ## The clients are not alike
#
# One accuracy hides a lot. `personal` tests the model on each client's own test samples, here a quarter of its data.
# `label_counts` has the number of training samples of each class. Which clients are served worse than the others, and
# what do they have?

# %%
import matplotlib.pyplot as plt

clients = simulator.personal(state)
counts = federated.label_counts()
figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
bottoms = np.zeros(len(counts))
for label in range(10):
    top.bar(range(len(counts)), counts[:, label], bottom=bottoms, color=plt.cm.tab10(label), label=str(label))
    bottoms += counts[:, label]
top.set(ylabel="training samples")
top.legend(title="digit", ncols=2, fontsize=7, title_fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.05))
bottom.bar(range(len(counts)), clients.accuracy, color="tab:gray")
bottom.axhline(accuracy, color="tab:red", linewidth=1, label="global test set")
bottom.set(ylabel="test accuracy", xlabel="client", xticks=range(len(counts)), ylim=(0, 1.02))
bottom.legend(loc="lower left", bbox_to_anchor=(1.0, 0.7), fontsize=8)
plt.show()

# %% [markdown]
# ## Two methods, one plot
#
# A method is a name, or [a function of your own](own_method_in_20_lines.ipynb). `local` has the settings of the
# clients' training, and the network can be any Flax module, such as this one with one hidden layer:

# %%
import flax.linen as nn


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def curve(method, seed):
    """Test accuracy after every second round."""
    training = fmr.local.setting(lr=0.05, momentum=0.5, epochs=5, batch_size=10)
    simulator = fmr.Simulator(method, Network(), federated, cohort=5, local=training, seed=seed)
    state, accuracies = simulator.init(), []
    for _ in range(rounds // 2):
        state, _ = simulator.run(state, 2)
        accuracies.append(float(simulator.test(state).accuracy))
    return accuracies


figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for method, title, color in (("fedavg", "FedAvg", "tab:blue"), ("fedmr", "FedMR", "tab:orange")):
    for seed in range(2):
        accuracies = curve(method, seed)
        axis.plot(range(2, rounds + 1, 2), accuracies, color=color, label=title if seed == 0 else None, alpha=0.8)
        print(f"{title}, seed {seed}: {np.mean(accuracies[-5:]):.3f} (mean of the last five tests)")
axis.set(xlabel="round", ylabel="test accuracy")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# The curves of the two methods lie on each other, and two seeds of one method differ more than the methods do. The
# digits are too easy to separate methods: [which method?](../which_method.md) has answers from long runs on harder
# data.
#
# ## What to read next
#
# `fmr.run(fmr.Config(...))` and the command `python -m fedjax_mr.main` are built on the simulator. They add [a
# folder](../recipes/runs.md) with checkpoints, tables and plots. [FedMR in 60 lines](fedmr_in_60_lines.ipynb) shows
# what happens inside a round.
