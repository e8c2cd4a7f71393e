"""Published approximations of contributions, from the uploads of one training run of all clients.

Letters: N clients, T rounds. v is the value of a model. In each round, v(A) is the value of the model that the server
would have made from the uploads of the clients A of its cohort alone, and v(nobody) that of the model before the round
(`fedjax_mr.whatif.uploads` rebuilds and tests these models). A client outside of the cohort contributes 0 in the round.

* ``fedsv``: the sum over the rounds of the Shapley values of v (Wang, Rausch, Zhang, Jia, Song: A Principled Approach
  to Data Valuation for Federated Learning, 2020; Song, Tong, Wei, IEEE Big Data 2019, as MR). They sum to v(all) -
  v(nobody) of the run.
* ``gtg_shapley``: the same from a few random orders, without rounds and ends of orders that change v little (Liu, Chen,
  Yu, Liu, Cui: GTG-Shapley, ACM TIST 2022). The settings are those of the authors' code, in units of v. It
  stores the value of a set that truncation has skipped, and reads it as if it were tested; here such a set is tested
  when another order needs it. There, the number of orders has no limit; here it is at most `MOST_ORDERS`.
* ``round_leave_one_out``: the sum over the rounds of v(cohort) - v(cohort without the client) (the federated
  leave-one-out that Wang et al. 2020 compare with).
* ``influence``: the sum over the rounds of the decrease of the test loss to first order: minus the inner product of the
  loss's gradient at the model before the round and of what the server adds for the client, for FedAvg
  (n_i / sum of n) x change (Wang et al.: Efficient Participant Contribution Evaluation for Horizontal and Vertical
  Federated Learning, ICDE 2022, as DIG-FL). The authors' code sets negative numbers to 0 and divides by their sum, to
  weight clients in training; here neither is done.
* ``cosine``: the mean, over the client's rounds, of the cosine of its change with that of the server's model (Xu et
  al.: Gradient-Driven Rewards to Guarantee Fairness in Collaborative Machine Learning, NeurIPS 2021, as CGSV). In the
  paper these numbers also weight the clients in training and are averaged with a momentum.
* ``local_loss``: the mean, over the client's rounds, of sqrt(n_i) x the loss of the model before the round on the
  client's training samples (Goetz et al.: Active Federated Learning, 2019). In the paper it selects clients. As a
  contribution, it assumes that clients whose samples are learnt badly are worth most.

The last three ignore the metric: they are about the loss, or about no test at all.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_mr.whatif.coalitions import Coalition
from fedjax_mr.whatif.contributions import shapley

BETWEEN_ROUNDS, WITHIN_ROUND = 0.01, 0.001  # GTG-Shapley: changes of v that are ignored
LEAST_ORDERS, MOST_ORDERS = 30, 1000
LAST, CRITERION = 10, 0.05  # it stops if the last means over the orders differ by 5 percent or less


class Round(NamedTuple):
    """What is known about one round of the training run.

    Attributes:
      values: v of each subset of the cohort. Higher is better.
      influence, cosine, local_loss: numbers of each client of the cohort, see above.
    """

    values: Mapping[Coalition, float]
    influence: Mapping[int, float]
    cosine: Mapping[int, float]
    local_loss: Mapping[int, float]

    @property
    def cohort(self) -> list[int]:
        """The clients of the round."""
        return sorted(self.influence)


def fedsv(rounds: Sequence[Round], count: int) -> np.ndarray:
    """The contributions of N = ``count`` clients [N], as those of all functions below."""
    total = np.zeros(count)
    for each in rounds:
        cohort = each.cohort
        place = {client: number for number, client in enumerate(cohort)}
        values = {frozenset(map(place.__getitem__, some)): np.array([value]) for some, value in each.values.items()}
        total[cohort] += shapley(values, len(cohort))[0]
    return total


def gtg_shapley(rounds: Sequence[Round], count: int) -> np.ndarray:
    """GTG-Shapley with the random orders of seed 0."""
    generator, total = np.random.default_rng(0), np.zeros(count)
    for each in rounds:
        total += guided(each.values, each.cohort, count, generator)
    return total


def guided(
    values: Mapping[Coalition, float], cohort: Sequence[int], count: int, generator: np.random.Generator
) -> np.ndarray:
    """GTG-Shapley's contributions to one round [N]."""
    nobody, everyone = values[frozenset()], values[frozenset(cohort)]
    if abs(everyone - nobody) <= BETWEEN_ROUNDS:
        return np.zeros(count)
    gains: list[np.ndarray] = []
    while not _converged(gains):
        for first in cohort:  # guided: each client begins equally many orders
            order = [first, *generator.permutation([client for client in cohort if client != first]).tolist()]
            gain, before = np.zeros(count), nobody
            for size, client in enumerate(order, 1):
                after = before if abs(everyone - before) < WITHIN_ROUND else values[frozenset(order[:size])]
                gain[client], before = after - before, after
            gains.append(gain)
    return np.mean(gains, axis=0)


def _converged(gains: Sequence[np.ndarray]) -> bool:
    if len(gains) <= LEAST_ORDERS:
        return False
    means = (np.cumsum(gains, axis=0) / np.arange(1, len(gains) + 1)[:, None])[-LAST:]
    changes = np.mean(np.abs(means - means[-1]) / (np.abs(means[-1]) + 1e-12), axis=1)
    return changes.max() <= CRITERION or len(gains) >= MOST_ORDERS


def round_leave_one_out(rounds: Sequence[Round], count: int) -> np.ndarray:
    """The sum of what the last model of each round loses without the client's upload."""
    total = np.zeros(count)
    for each in rounds:
        everyone = frozenset(each.cohort)
        total[each.cohort] += [each.values[everyone] - each.values[everyone - {client}] for client in each.cohort]
    return total


def influence(rounds: Sequence[Round], count: int) -> np.ndarray:
    """The sum of the inner products."""
    return np.array([sum(each.influence.get(client, 0.0) for each in rounds) for client in range(count)])


def cosine(rounds: Sequence[Round], count: int) -> np.ndarray:
    """The mean cosine."""
    return _mean([each.cosine for each in rounds], count)


def local_loss(rounds: Sequence[Round], count: int) -> np.ndarray:
    """The mean loss, times sqrt(n_i)."""
    return _mean([each.local_loss for each in rounds], count)


def _mean(numbers: Sequence[Mapping[int, float]], count: int) -> np.ndarray:
    """The mean over the rounds of each client; 0 for a client without any."""
    of = [[each[client] for each in numbers if client in each] for client in range(count)]
    return np.array([np.mean(each) if each else 0.0 for each in of])


RULES: dict[str, Callable[[Sequence[Round], int], np.ndarray]] = {
    "fedsv": fedsv,
    "gtg_shapley": gtg_shapley,
    "round_leave_one_out": round_leave_one_out,
    "influence": influence,
    "cosine": cosine,
    "local_loss": local_loss,
}

UNITS = {"influence": "loss", "cosine": "cosine", "local_loss": "local loss"}
"""What the numbers of a rule are about, if it is not the metric."""


def approximations(runs: Sequence[Sequence[Round]], count: int) -> dict[str, np.ndarray]:
    """The contributions of N clients [S, N] by each rule, from S training runs of all clients."""
    return {name: np.stack([rule(rounds, count) for rounds in runs]) for name, rule in RULES.items()}
