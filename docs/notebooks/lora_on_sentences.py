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
# # LoRA on sentences
#
# After this notebook you can fine-tune a frozen text model over clients with LoRA adapters, and you know why the mean
# of adapters is not the adapter of the mean.
#
# A pretrained model is large, and clients can neither train nor send all of it. **LoRA** (Hu et al., ICLR 2022)
# freezes a matrix W and trains a small product beside it: x W + (alpha / r) x A B, where A has r columns and B has r
# rows. Only A, B and the last layer are trained and sent.
#
# **What the model and the sentences are.** Nothing is downloaded here. The sentences are made by a small program, and
# the base is a tiny Transformer that this notebook first trains itself. So the numbers below say nothing about real
# language models. [Texts](../recipes/texts.md#a-pretrained-encoder) shows the same steps with MiniLM and real
# sentences.

# %% [markdown]
# The next cell installs the package if it is missing, for example on Colab.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("fedjax_mr") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "fedjax_mr"], check=True)

# %% [markdown]
# ## Sentences
#
# A sentence praises or blames something, such as "the films here are not dull". Some words occur everywhere (good,
# poor), others in one domain only (films: moving, dull). "not" turns the meaning around.

# %%
import random

import jax
import jax.numpy as jnp

import fedjax_mr as fmr
from fedjax_mr.models import adapters

EVERYWHERE = ["good", "great", "lovely"], ["bad", "poor", "awful"]
WORDS = {
    "films": (["moving", "funny"], ["dull", "flat"]),
    "books": (["gripping", "wise"], ["boring", "shallow"]),
    "phones": (["fast", "solid"], ["slow", "broken"]),
    "hotels": (["clean", "quiet"], ["dirty", "noisy"]),
    "meals": (["tasty", "fresh"], ["cold", "stale"]),
    "trains": (["punctual", "roomy"], ["late", "crowded"]),
}


def sentence(domain, draw):
    """A sentence and its label: 1 is praise, 0 is blame."""
    label, negated = draw.randrange(2), draw.randrange(2)
    praise, blame = draw.choice([EVERYWHERE, WORDS[domain], WORDS[domain]])
    word = draw.choice(praise if label != negated else blame)
    start = draw.choice([f"the {domain} here are", f"i find these {domain}", f"my friends call the {domain}"])
    return f"{start} {'not ' if negated else ''}{word}", label


def sentences(domains, count, seed):
    draw = random.Random(seed)
    domain = [draw.choice(domains) for _ in range(count)]
    texts, labels = zip(*(sentence(each, draw) for each in domain), strict=True)
    return fmr.from_texts(texts, labels, domain=domain, length=12)


draw = random.Random(5)
for domain in ("films", "phones", "trains"):
    print(*sentence(domain, draw), sep=" -> ")

# %% [markdown]
# ## The base
#
# The server has public sentences about films and books. It trains a Transformer of two layers on them, before the
# federation exists.

# %%
server = fmr.data.federate(sentences(["films", "books"], 1500, seed=0), num_clients=1, partition="iid")
adam = fmr.local.setting("adam", lr=0.001, epochs=1, batch_size=16)
pretraining = fmr.Simulator("centralized", "transformer_tiny", server, cohort=1, local=adam)
state, _ = pretraining.run(pretraining.init(), 2)
base = jax.device_get(pretraining.deployed(state))
print(f"films and books: test accuracy {pretraining.test(state).accuracy:.3f}")
print(f"{sum(leaf.size for leaf in jax.tree.leaves(base)):,} parameters")

# %% [markdown]
# ## Three ways to fine-tune
#
# The twelve clients write about phones, hotels, meals and trains, one domain each. The base has never seen the words
# of these domains. Four clients train in each round:
#
# - **everything**: FedAvg trains all parameters;
# - **the last layer**: the rest is frozen;
# - **LoRA**: FedIT, which is FedAvg over adapters of rank 4 and the last layer.

# %%
rounds = 12
clients = sentences(["phones", "hotels", "meals", "trains"], 1200, seed=1)
federated = fmr.data.federate(clients, num_clients=12, partition="domain")
with_adapters = adapters.lora(pretraining.model, rank=4, alpha=8.0, key=jax.random.key(7), variables=base)
curves = {}


def finetune(name, method, model, lr, **frozen):
    adam = fmr.local.setting("adam", lr=lr, epochs=2, batch_size=16)
    simulator = fmr.Simulator(method, model, federated, cohort=4, local=adam, **frozen)
    state = simulator.init()
    curves[name] = [float(simulator.test(state).accuracy)]
    for _ in range(rounds // 2):
        state, report = simulator.run(state, 2)
        curves[name].append(float(simulator.test(state).accuracy))
    sent = report.traffic.num_bytes()[1] / 8  # two rounds of four clients
    print(f"{name:15} {curves[name][0]:.3f} -> {curves[name][-1]:.3f}, {sent / 1e3:8,.1f} kB per upload")
    return state


finetune("everything", "fedavg", pretraining.model, 0.001, variables=base)
finetune("the last layer", "fedavg", pretraining.model, 0.005, variables=base, trainable="classifier/*")
_ = finetune("LoRA", "fedit", with_adapters, 0.005)

# %% [markdown]
# The last layer alone cannot learn what a new word means. LoRA changes how the words are read, although the table of
# words is frozen, too. The uploads are smaller by a factor of several hundred.
#
# ## The mean of adapters is not the adapter of the mean
#
# FedIT takes the mean of all A and the mean of all B. But the model uses the *product* A B, and the product of the
# means is not the mean of the products. FedMR shows how far they can be apart: its server keeps K = 4 adapters and
# never averages them. (In FedIT, all clients start a round from the same A and B, so expect a smaller difference
# there.)

# %%
state = finetune("LoRA, FedMR", "fedmr", with_adapters, 0.005)
for path, a, b in adapters.pairs(state.server.models):
    exact = jnp.mean(a @ b, axis=0)  # [K, in, r] @ [K, r, out]
    approximate = jnp.mean(a, axis=0) @ jnp.mean(b, axis=0)
    gap = jnp.linalg.norm(exact - approximate) / jnp.linalg.norm(exact)
    print(f"{'/'.join(path):30} the product of the means is off by {100 * float(gap):.0f} %")

# %% [markdown]
# Therefore FedMR deploys the exact mean of the *products*, as a dense change of each matrix, and it shuffles A and B
# of a matrix together: a B with the A of another client would mean nothing. **FedEx-LoRA** mends FedIT in another
# way: its server adds the difference to the frozen matrix. It sends this dense change to the clients.

# %%
_ = finetune("FedEx-LoRA", "fedexlora", with_adapters, 0.005)

# %% [markdown]
# ## The curves

# %%
import matplotlib.pyplot as plt

figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for name, accuracies in curves.items():
    axis.plot(range(0, rounds + 1, 2), accuracies, marker=".", label=name)
axis.set(xlabel="round", ylabel="test accuracy, new domains")
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# On these simple sentences, FedIT and FedEx-LoRA both learn all words, and FedMR, which never averages its adapters,
# needs more rounds. This is one seed. Whether an exact mean pays on real texts is a question for real texts and
# several seeds; [our table](../../experiments/notebook/adapters.md) says what was run.
#
# ## What to read next
#
# [Fine-tuning](../finetuning.md) has the flags (`--adapter=lora`, `--trainable`), the eight methods for adapters, and
# the export of a model whose adapters are merged into its weights.
