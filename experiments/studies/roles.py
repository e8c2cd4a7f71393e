"""Perplexity of held-out texts of each client, of the frozen base and of runs of a language model.

    python experiments/studies/roles.py RUN [RUN ...] [--prompt=TEXT]

The runs have one dataset, one base and adapters. A line of the table is a client: tokens that are predicted, and the
perplexity of the base and of the deployed model of each run on the client's test samples. The last line has all tokens,
and the mean over clients. With a prompt, the base and each run write a text after it.
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_mr as fmr
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.pretrained import tokenizer_of
from fedjax_mr.experiment.trained import TrainedNetwork
from fedjax_mr.tasks.language import token_losses

BATCH = 8


def losses(network: TrainedNetwork, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The cross-entropy of each token [M, T] in nats, 0 where there is none."""

    @jax.jit
    def of_batch(model: fmr.Model, variables: fmr.Variables, x: jax.Array, y: jax.Array) -> jax.Array:
        return token_losses(model.apply(variables, x), y)[0]

    size = -(-len(x) // BATCH) * BATCH
    fill = lambda rows: jnp.asarray(np.pad(rows, ((0, size - len(rows)), (0, 0))))
    x_all, y_all = fill(x), fill(y)
    parts = [
        of_batch(network.model, network.variables, x_all[i : i + BATCH], y_all[i : i + BATCH])
        for i in range(0, size, BATCH)
    ]
    return np.concatenate([np.asarray(part) for part in parts])


def main() -> None:
    """Print the table, and the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--prompt")
    options = parser.parse_args()
    runs = [fmr.load(folder) for folder in options.runs]
    first = runs[0]
    dataset = federated_data(first.config).dataset
    start = jax.jit(first.model.init)(jax.random.key(0))  # adapters add nothing yet
    networks = {"base": dataclasses.replace(first.deployed, model=first.model, variables=start)}
    networks |= {f"{run.config.strategy} ({run.round} rounds)": run.deployed for run in runs}
    tokens = (dataset.test_y != -1).sum(1)
    found = {name: losses(network, dataset.test_x, dataset.test_y).sum(1) for name, network in networks.items()}
    rows = []
    for client, name in enumerate(dataset.client_names or ()):
        mine = np.asarray(dataset.test_client) == client
        if mine.any():
            rows.append([np.exp(each[: len(mine)][mine].sum() / tokens[mine].sum()) for each in found.values()])
            print(name, int(tokens[mine].sum()), *(f"{value:.1f}" for value in rows[-1]), sep="\t")
    print("client", "tokens", *networks, sep="\t")
    overall = [np.exp(each[: len(tokens)].sum() / tokens.sum()) for each in found.values()]
    print("all tokens", int(tokens.sum()), *(f"{value:.2f}" for value in overall), sep="\t")
    print("mean over clients", "", *(f"{value:.2f}" for value in np.mean(rows, axis=0)), sep="\t")
    if options.prompt:
        for name, network in networks.items():
            text = network.generate(options.prompt, tokenizer_of(first.config), chat=False, tokens=40, seed=0)
            print(f"--- {name}\n{options.prompt}{text}")


if __name__ == "__main__":
    main()
