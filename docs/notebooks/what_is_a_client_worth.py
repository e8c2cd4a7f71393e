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
# # What is a client worth?
#
# After this notebook you can say what each client contributes to a federation, and how far cheap estimates of it can be
# trusted.
#
# **The idea.** A client is worth what federations lose without it. So train *every* federation that could have been:
# with five clients, there are 2^5 = 32 sets of them. All 32 federations train in one compiled program, from the same
# initial model and with the same random numbers for each client. What differs between two results is due to the clients
# alone.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## Five hospitals, one of them with a mistake
#
# The data are scikit-learn's digits. Five hospitals share them unevenly. In hospital 4, half of the labels are wrong.

# %%
import numpy as np

import fedjax_mr as fmr

rounds = 20
digits = fmr.data.load("digits")
hospital = np.random.default_rng(0).choice(5, len(digits.y), p=[0.4, 0.25, 0.15, 0.05, 0.15])
wrong = (hospital == 4) & (np.arange(len(digits.y)) % 2 == 0)
labels = np.where(wrong, (digits.y + 1) % 10, digits.y)
dataset = fmr.from_arrays(
    digits.x, labels, x_test=digits.test_x, y_test=digits.test_y, mean=digits.mean, std=digits.std, client=hospital
)
federated = fmr.data.federate(dataset, partition="natural", num_clients=0)
local = fmr.local.setting(lr=0.1, epochs=1, batch_size=32)
simulator = fmr.Simulator("fedavg", "logistic", federated, cohort=5, local=local)

# %% [markdown]
# ## Every federation that could have been
#
# `what_if` trains all 32 sets with two seeds. The value of a set is the test loss of its model; contributions are
# decreases of the loss, so positive numbers are good. With `approximations=True` it also computes what the literature
# uses when retraining is too expensive, from the uploads of one training run.

# %%
result = fmr.what_if(simulator, rounds=rounds, seeds=(0, 1), metric="loss", approximations=True, folder="worth")
print(result.table())

# %% [markdown]
# The **Shapley value** is a hospital's mean gain over all orders in which the hospitals may join. The values of all
# hospitals add up to the gain of the whole federation. Hospital 4 is worth almost nothing: alone it is better than no
# training at all (column `alone`), and it harms all others. **Leave-one-out** compares only two federations, all and
# all but one. It finds the hospital that does harm. But its numbers are small and do not add up to the gain, because
# the others make up for each hospital that is missing.

# %%
values = result.contributions()
assert (values["shapley"][:, 4] < values["shapley"][:, 2]).all()
assert (values["leave_one_out"][:, 4] == values["leave_one_out"].min(axis=1)).all()
assert (values["local_loss"][:, 4] == values["local_loss"].max(axis=1)).all()
gain = result.value([]) - result.value(range(5))
np.testing.assert_allclose(values["shapley"].sum(axis=1), gain, rtol=1e-5)

# %% [markdown]
# ## The lattice
#
# Each point is a federation, from nobody at the bottom to all five at the top. Bright colours are low losses. A line
# joins two federations that differ by one hospital, and it is orange if the hospital made the loss worse.

# %%
from IPython.display import Image

Image("worth/coalitions.png", width=900)

# %% [markdown]
# Follow the orange lines: they join a set with the same set and hospital 4.

# %%
joined = [some for some in result.coalitions if 4 not in some and len(some) > 1]
harm = [result.value(some | {4}).mean() - result.value(some).mean() for some in joined]
print(f"hospital 4 raises the loss of {sum(each > 0 for each in harm)} of {len(harm)} sets of two or more hospitals")

# %% [markdown]
# ## Can we do without retraining?
#
# `fedsv` and `gtg_shapley` take one training run of all hospitals. In each round they rebuild the models of some of
# the hospitals from the uploads, and sum the Shapley values of the rounds. `influence` is the inner product of an
# upload with the gradient of the test loss. `cosine` needs no test set, and `local_loss` only the hospital's own loss.
# [The page](../what_if.md) has the sources. Each panel shows such an estimate against the exact Shapley value.

# %%
Image("worth/approximations.png", width=900)

# %% [markdown]
# A rank correlation of 1 means that a rule has the hospitals in the right order. Most rules have. `local_loss` puts the
# hospital with the wrong labels first, because its labels cannot be learnt. Five hospitals are few, so do not rank the
# rules by this picture; [the page](../what_if.md#how-good-are-the-approximations) has more federations.
#
# **What the rules cannot know.** Look at the scales. By `fedsv`, hospital 4 takes more than half a nat away. Its exact
# value is about zero. A rebuilt model begins each round with the model of *all* hospitals. So what hospital 4 brings to
# a federation that has little else is never seen. Only retraining shows that.
#
# ## What to read next
#
# [What if a client had not joined?](../what_if.md) explains the rules and which methods work, and compares rules that
# make a model forget a client. [Is hospital 7 worth it?](../recipes/worth.md) is the same question with more hospitals.
