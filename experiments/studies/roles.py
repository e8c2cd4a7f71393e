"""Perplexity of held-out texts of each client, of the frozen base and of runs of a language model.

    python experiments/studies/roles.py RUN [RUN ...] [--prompt=TEXT]

The runs have one dataset, one base and adapters. A line of the table is a client: tokens that are predicted, and the
perplexity of the base and of the deployed model of each run on the client's test samples. The last line has all tokens,
and the mean over clients. With a prompt, the base and each run write a text after it.
"""

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

import fedjax_mr as fmr
from fedjax_mr.analysis import command
from fedjax_mr.experiment.federation import federated_data
from fedjax_mr.experiment.pretrained import tokenizer_of
from fedjax_mr.experiment.trained import TrainedNetwork
from fedjax_mr.tasks.language import IGNORED, token_losses
from fedjax_mr.terminal import interrupts

BATCH = 8


@jax.jit
def losses(model: fmr.Model, variables: fmr.Variables, x: jax.Array, y: jax.Array) -> jax.Array:
    """The cross-entropy of each text [B] in nats, summed over its tokens."""
    return jnp.sum(token_losses(model.apply(variables, x), y)[0], axis=1)


def all_losses(network: TrainedNetwork, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Those of texts [M, T], a few at a time."""
    size = -(-len(x) // BATCH) * BATCH
    x, y = (np.pad(rows, ((0, size - len(rows)), (0, 0))) for rows in (x, y))
    batches = [slice(first, first + BATCH) for first in range(0, size, BATCH)]
    found = [losses(network.model, network.variables, x[each], y[each]) for each in batches]
    return np.concatenate(found)


def merged(network: TrainedNetwork) -> TrainedNetwork:
    """The network without adapters, which are added to its weights, so that one program serves all."""
    plain = dataclasses.replace(network.model, frozen={}, start={}, adapter=None)
    variables = jax.device_put(network.model.merged(network.variables))
    return dataclasses.replace(network, model=plain, variables=variables)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs of one federation")
    parser.add_argument("--prompt", help="print what each network writes after it")


def main(options: argparse.Namespace) -> None:
    """Print the table, and the texts."""
    runs = [fmr.load(folder) for folder in options.runs]
    first = runs[0]
    dataset = federated_data(first.config).dataset
    start = jax.jit(first.model.init)(jax.random.key(0))  # adapters add nothing yet
    networks = {"base": dataclasses.replace(first.deployed, variables=start)}
    networks |= {f"{run.config.strategy}, {run.round} rounds": run.deployed for run in runs}
    networks = {name: merged(network) for name, network in networks.items()}
    x, y, owner = dataset.test_x, dataset.test_y, np.asarray(dataset.test_client)
    tokens = (y != IGNORED).sum(1)
    found = {name: all_losses(network, x, y)[: len(x)] for name, network in networks.items()}
    print("client", "tokens", *networks, sep="\t")
    rows = []
    for client, name in enumerate(dataset.client_names or ()):
        if (mine := owner == client).any():
            rows.append([np.exp(each[mine].sum() / tokens[mine].sum()) for each in found.values()])
            print(name, tokens[mine].sum(), *(f"{value:.1f}" for value in rows[-1]), sep="\t")
    overall = [np.exp(each.sum() / tokens.sum()) for each in found.values()]
    print("all tokens", tokens.sum(), *(f"{value:.2f}" for value in overall), sep="\t")
    print("mean over clients", "", *(f"{value:.2f}" for value in np.mean(rows, axis=0)), sep="\t")
    if options.prompt:
        for name, network in networks.items():
            text = network.generate(options.prompt, tokenizer_of(first.config), chat=False, tokens=40, seed=0)
            print(f"--- {name}\n{options.prompt}{text}")


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
