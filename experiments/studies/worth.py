"""Is a client worth the same under FedAvg, FedMR and FedCross? Exact contributions, compared between methods.

    python experiments/studies/worth.py digits --folder=worth
    python experiments/studies/worth.py writers --folder=worth --data_dir=DIR   # DIR has mnist_by_writer.npz
    python experiments/studies/worth.py lung --folder=worth                     # needs the extra data

All clients are in each cohort, and there are three seeds. ``digits``: six clients, Dirichlet(0.3). ``writers``: six
writers of MNIST's digits, tested on 1,000 digits of 40 other writers. ``lung``: six clients of a survival study as the
package has them, tested on held-out patients.

FedAvg and FedMR train all sets of clients; the value of a client is its Shapley value. FedCross cannot train a single
client, so its clients have the loss of the federation without them (leave-one-out), and so have those of the other two
beside it. Printed are the contributions with their standard deviations over the seeds, and rank correlations between
the methods over different seeds: that of a method with itself says what to expect of equal values. For FedAvg the rank
correlations of all other rules with Shapley values follow, as means over the seeds.
"""

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import numpy as np

import fedjax_mr as fmr
from fedjax_mr.analysis import command
from fedjax_mr.errors import UserError
from fedjax_mr.terminal import interrupts
from fedjax_mr.whatif import WhatIf
from fedjax_mr.whatif.contributions import rank_correlation

CLIENTS, SEEDS = {"digits": 6, "writers": 6, "lung": 6}, (0, 1, 2)
METHODS = {"fedavg": "all", "fedmr": "all", "fedcross": "leave_one_out"}
ROUNDS = 30


def writers(folder: Path) -> fmr.Dataset:
    """The digits of six writers with more than 100 each, and 1,000 digits of forty others for the test."""
    with np.load(folder / "mnist_by_writer.npz") as arrays:
        x, y, client = arrays["x"], arrays["y"], arrays["client"]
    names, counts = np.unique(client, return_counts=True)
    many = names[counts > 100]
    own, others = np.isin(client, many[: CLIENTS["writers"]]), np.flatnonzero(np.isin(client, many[-40:]))
    test = np.random.default_rng(0).choice(others, 1000, replace=False)
    return fmr.from_arrays(
        x[own], y[own], x_test=x[test], y_test=y[test], mean=(0.1307,), std=(0.3081,), client=client[own]
    )


def simulator_of(problem: str, method: str, data_dir: Path | None) -> fmr.Simulator:
    """The federation of all clients."""
    clients = CLIENTS[problem]
    if problem == "digits":
        federated = fmr.data.federate(
            fmr.data.load("digits"), num_clients=clients, partition="dirichlet", alpha=0.3, seed=1
        )
    elif problem == "writers":
        if data_dir is None:
            raise UserError("writers needs --data_dir, the folder with mnist_by_writer.npz")
        federated = fmr.data.federate(writers(data_dir), partition="natural", num_clients=0)
    else:
        federated = fmr.data.federate(fmr.data.load("lung"), partition="natural", num_clients=clients)
    local = fmr.local.setting(lr=0.05, epochs=2, batch_size=32, momentum=0.5)
    return fmr.Simulator(method, "mlp_table" if problem == "lung" else "mlp", federated, cohort=clients, local=local)


def agreement(one: np.ndarray, two: np.ndarray) -> float:
    """Mean rank correlation of contributions [S, N] of two methods over all pairs of different seeds."""
    return statistics.fmean(rank_correlation(one[i], two[j]) for i, j in itertools.permutations(range(len(SEEDS)), 2))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("problem", choices=("digits", "writers", "lung"), help="the federation, see above")
    parser.add_argument("--folder", type=Path, default="worth", help="of the results; a second start continues in it")
    parser.add_argument("--data_dir", type=Path, help="folder with mnist_by_writer.npz, for writers")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each federation. Default: {ROUNDS}")


def main(arguments: argparse.Namespace) -> None:
    """Train what is not in the folder yet, and print."""
    results: dict[str, WhatIf] = {}
    for method, coalitions in METHODS.items():
        results[method] = fmr.what_if(
            simulator_of(arguments.problem, method, arguments.data_dir),
            coalitions=coalitions,
            rounds=arguments.rounds,
            seeds=SEEDS,
            metric="loss",
            approximations=method == "fedavg",
            folder=arguments.folder / arguments.problem / method,
            progress=True,
        )
    for rule in ("shapley", "leave_one_out"):
        print(f"\n{rule}, decrease of the test loss, mean ± standard deviation over {len(SEEDS)} seeds")
        found = {name: values[rule] for name, result in results.items() if rule in (values := result.contributions())}
        for name, values in found.items():
            means, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
            print(f"  {name:9}", *(f"{mean:+.3f} ± {s:.3f}" for mean, s in zip(means, spread, strict=True)), sep="  ")
        for one, two in itertools.combinations_with_replacement(found, 2):
            print(f"  rank correlation of {one} with {two}, other seeds: {agreement(found[one], found[two]):+.2f}")
    print("\nfedavg: rank correlation with Shapley values of the same seed, mean and smallest")
    found = results["fedavg"].contributions()
    for rule, values in found.items():
        ranks = [rank_correlation(one, other) for one, other in zip(values, found["shapley"], strict=True)]
        print(f"  {rule:20} {statistics.fmean(ranks):+.2f}  {min(ranks):+.2f}")


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
