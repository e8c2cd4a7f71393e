"""What an absent client costs when clients train side by side, on lanes.

    python experiments/lab/coalitions.py --lanes=16 --federations=64

Ten clients of the digits (Dirichlet(0.5)), network ``logistic``, one local epoch. Clients on lanes take their steps
together, as many as the longest of them needs. Printed for federations of all ten clients and of five random ones, of
which each keeps ten slots:

* steps: lane-steps that are computed in a round, and needed: the sum of the steps of all clients;
* CPU time of a round of all federations together, smallest of five, and the same per step that is needed;
* the same for five clients without vacant slots: a cohort of five.
"""

import argparse
import time

import jax
import numpy as np

import fedjax_mr as fmr
from fedjax_mr.engine.clients import assign, client_axis
from fedjax_mr.engine.rounds import TrialRounds
from fedjax_mr.engine.trials import of_coalition

CLIENTS, PRESENT, BATCH = 10, 5, 10


def computed_steps(axis, sizes: np.ndarray) -> tuple[int, int]:
    """Lane-steps of a round that are computed, and those that are needed, for rows with ``sizes`` samples."""
    slots = np.asarray(jax.jit(lambda sizes: assign(axis, sizes))(sizes))
    steps = np.append(-(-sizes // BATCH), 0)[slots].reshape(-1, axis.lanes)
    return int(axis.lanes * steps.max(axis=1).sum()), int(steps.sum())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--federations", type=int, default=64)
    flags = parser.parse_args()
    federated = fmr.data.federate(fmr.data.load("digits"), partition="dirichlet", num_clients=CLIENTS, alpha=0.5)
    local = fmr.local.setting(lr=0.1, epochs=1, batch_size=BATCH)
    simulator = fmr.Simulator(
        "fedavg", "logistic", federated, cohort=CLIENTS, local=local, layout=fmr.Layout(devices=1)
    )
    random = np.random.default_rng(0)
    some = [sorted(random.choice(CLIENTS, PRESENT, replace=False)) for _ in range(flags.federations)]
    every = [list(range(CLIENTS))] * flags.federations
    print("clients | slots | computed | needed | CPU ms per round | CPU us per needed step")
    for coalitions, vacant in ((every, True), (some, True), (some, False)):
        constants = [of_coalition(simulator.rounds.constants, each, vacant=vacant) for each in coalitions]
        slots = constants[0].problem.cohort_size
        axis = client_axis(devices=1, lanes=flags.lanes, cohort_size=slots * flags.federations)
        present = np.stack([np.isin(np.arange(CLIENTS), each) for each in coalitions])
        rows = np.sort(np.where(present, np.asarray(federated.sizes)[None], 0), axis=1)[:, -slots:].reshape(-1)
        computed, needed = computed_steps(axis, rows.astype(np.int32))
        together = TrialRounds(constants, axis, stop_at_divergence=False, code=simulator.code)
        state, report = together.run(together.init(), 1)
        assert int(np.sum(report.steps)) == needed
        seconds = []
        for _ in range(5):
            started = time.process_time()
            state, report = jax.block_until_ready(together.run(state, 1))
            seconds.append(time.process_time() - started)
        milliseconds = 1000 * min(seconds)
        row = (
            len(coalitions[0]),
            slots,
            computed,
            needed,
            f"{milliseconds:.1f}",
            f"{1000 * milliseconds / needed:.2f}",
        )
        print(" | ".join(map(str, row)))


if __name__ == "__main__":
    main()
