"""D-PSGD by graph: accuracy, consensus and contraction on the digits; time per round against the edges; bytes by level.

    python experiments/lab/graphs.py train [--seeds=2] [--rounds=60] [--only=dpsgd:ring,fedmr]
    python experiments/lab/graphs.py seconds
    python experiments/lab/graphs.py levels

``train`` trains 16 clients, Dirichlet(0.1), all of them in every round, and prints a row of notebook/mixing.md per
method: ``expected`` and ``each round`` of `fedjax_mr.analysis.mixing`, test accuracy of the mean of all models, mean
accuracy of the clients' own models on the global test set, consensus distance and kilobytes per client and round.
``seconds`` times rounds of 64 clients on random regular graphs. ``levels`` counts what 16 clients and the edge servers
of HierFAVG send in eight rounds.
"""

import argparse
import sys
import time

import jax
import numpy as np

import fedjax_mr as fmr
from fedjax_mr.analysis import mixing
from fedjax_mr.strategies import dpsgd, fedavg, fedcross, fedmr, gossipmr, hierfavg, kgt
from fedjax_mr.strategies.interface import kept_models

GRAPHS = ("ring", "torus", "regular", "exponential", "one_peer", "star", "complete")
METHODS = [
    *(("dpsgd", dpsgd.Hyper(graph=graph)) for graph in GRAPHS),
    *(("gossipmr", gossipmr.Hyper(graph=graph)) for graph in ("ring", "complete")),
    ("kgt", kgt.Hyper()),
    ("fedavg", fedavg.Hyper("uniform")),
    ("fedmr", fedmr.Hyper()),
    ("fedcross", fedcross.Hyper()),
]


def train(seeds: int, rounds: int, only: str) -> None:
    """Print a row for each method: mean and standard deviation over the seeds."""
    dataset = fmr.data.load("digits")
    known = {f"{name}:{getattr(hyper, 'graph', '')}".rstrip(":"): (name, hyper) for name, hyper in METHODS}
    for name, hyper in [known[each] for each in only.split(",")] if only else METHODS:
        found = [of_seed(dataset, name, hyper, seed, rounds) for seed in range(seeds)]
        means, deviations = np.mean(found, axis=0), np.std(found, axis=0, ddof=1 if seeds > 1 else 0)
        cells = [f"{mean:.2f} ± {deviation:.2f}" for mean, deviation in zip(means[:2], deviations[:2], strict=True)]
        simulator = simulator_of(dataset, name, hyper, 0)
        problem = simulator.problem
        numbers = mixing.numbers_of(mixing.maps(fmr.STRATEGIES[name].build(hyper, problem), problem, draws=40))
        graph = getattr(hyper, "graph", "-")
        row = (name, graph, f"{numbers.expected:.3f}", f"{numbers.each_round:.3f}", *cells)
        print(f"| {' | '.join((*row, f'{means[2]:.2f}', f'{means[3]:.0f}'))} |", flush=True)


def simulator_of(dataset, name, hyper, seed):
    """The federation of a seed: its partition and its random numbers."""
    federated = fmr.data.federate(dataset, partition="dirichlet", num_clients=16, seed=seed, alpha=0.1)
    setting = fmr.local.setting(lr=0.05, epochs=2, batch_size=20)
    return fmr.Simulator(
        name, "mlp", federated, cohort=16, local=setting, hyper=hyper, seed=seed, layout=fmr.Layout(devices=1)
    )


def of_seed(dataset, name, hyper, seed, rounds):
    """Accuracy of the deployed model, mean accuracy of the single models, consensus, kilobytes per client and round."""
    simulator = simulator_of(dataset, name, hyper, seed)
    state, report = simulator.run(simulator.init(), rounds)
    deployed = 100 * float(simulator.test(state).accuracy)
    models = kept_models(simulator.rounds.strategy, state.server)
    if models is None:
        single, apart = deployed, 0.0
    else:
        single = 100 * float(np.mean(simulator.evaluation.each(models).accuracy))
        flat = np.concatenate([np.reshape(leaf, (16, -1)) for leaf in jax.tree.leaves(models["params"])], axis=1)
        apart = float(np.sqrt(((flat - flat.mean(axis=0)) ** 2).sum(axis=1).mean()))
    return deployed, single, apart, sum(report.traffic.num_bytes()) / rounds / 16 / 1000


def seconds() -> None:
    """Print milliseconds per round of 64 clients by the degree of the graph: wall clock, and CPU time of all threads.

    Each is the least of five calls of five rounds. On a busy machine only the second means something.
    """
    dataset = fmr.data.load("digits")
    federated = fmr.data.federate(dataset, partition="iid", num_clients=64, seed=0)
    setting = fmr.local.setting(lr=0.05, steps=1, batch_size=20)
    for degree in (2, 4, 8, 16, 32, 63):
        hyper = dpsgd.Hyper(graph="regular", degree=degree)
        one = fmr.Simulator(
            "dpsgd", "mlp", federated, cohort=64, local=setting, hyper=hyper, layout=fmr.Layout(devices=1)
        )
        state, _ = one.run(one.init(), 5)
        walls, works = [], []
        for _ in range(5):
            wall, work = time.perf_counter(), time.process_time()
            state, _ = jax.block_until_ready(one.run(state, 5))
            walls.append((time.perf_counter() - wall) / 5)
            works.append((time.process_time() - work) / 5)
        edges = np.count_nonzero(dpsgd.graph_of(hyper, 64, 64).shares) // 2
        print(f"| {degree} | {edges} | {1000 * min(walls):.1f} | {1000 * min(works):.1f} |", flush=True)


def levels() -> None:
    """Print the kilobytes per round between clients and edge servers, and between these and the cloud."""
    federated = fmr.data.federate(fmr.data.load("digits"), partition="iid", num_clients=16, seed=0)
    setting = fmr.local.setting(lr=0.05, steps=1, batch_size=20)
    methods: list[tuple] = [
        ("fedavg", fedavg.Hyper()),
        *(("hierfavg", hierfavg.Hyper(edges=edges, period=period)) for edges in (2, 4) for period in (1, 2, 4)),
    ]
    for name, hyper in methods:
        one = fmr.Simulator(name, "mlp", federated, cohort=16, local=setting, hyper=hyper, layout=fmr.Layout(devices=1))
        _, report = one.run(one.init(), 8)
        down, up, peer = (number / 8 / 1000 for number in report.traffic.num_bytes())
        chosen = (getattr(hyper, "edges", "-"), getattr(hyper, "period", "-"))
        print(f"| {name} | {chosen[0]} | {chosen[1]} | {down + up:.0f} | {peer:.0f} |", flush=True)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "seconds", "levels"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.what == "train":
        train(arguments.seeds, arguments.rounds, arguments.only)
    else:
        {"seconds": seconds, "levels": levels}[arguments.what]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
