"""Is a federation as private as it claims? A lower bound of epsilon from whole federations with and without a canary.

    python experiments/studies/audit.py --folder=audit

Five clients share the digits, all in each of ten rounds, with differential privacy for clients. Client 0 is a canary,
the worst case: whatever it receives, it uploads this plus C, or in the other half of the federations minus C, in a
weight that no other client changes, because its pixel is always 0. So the two worlds differ by all data of one client.
1,000 federations of each world train, 500 in one program.

An attacker sees one number of each federation:

* ``uploads``: the sum over the rounds of what client 0 has added to this weight. Theorem 1 of docs/privacy.md allows
  it.
* ``model``: this weight of the deployed model at the end.

He guesses the world by a threshold, which is chosen on one half of the federations. On the other half, Clopper and
Pearson (Biometrika 1934) bound his true positive rate t from below and his false positive rate f from above, each with
97.5 percent. Then epsilon is at least log((t - delta) / f) (Jagielski, Ullman, Oprea, NeurIPS 2020): the column
``any``. If the trade-off of the two rates is that of two Gaussians, as in Theorem 1, their distance is at least the
difference of the normal quantiles of t and f, and so is that of epsilon (Nasr et al., USENIX Security 2023): the column
``gaussian``, which needs fewer federations. Both must stay below the column ``claim``; ``factor`` is claim / gaussian.
The last row has a tenth of the noise that it claims, which an audit must find.
"""

import argparse
import csv
import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.analysis import command
from fedjax_mr.channel import accounting, channel, links, privacy
from fedjax_mr.engine.clients import client_axis
from fedjax_mr.engine.rounds import TrialRounds
from fedjax_mr.engine.simulator import Simulator
from fedjax_mr.keys import random_key
from fedjax_mr.settings import bind, field
from fedjax_mr.strategies import STRATEGIES
from fedjax_mr.terminal import interrupts

CLIENTS, CANARY, ROUNDS = 5, 0, 10
CLIP, NOISE, DELTA = 0.1, 6.0, 1e-5
FEDERATIONS, BLOCK = 1000, 500  # of each world, and in a program
CONFIDENCE = 0.975  # of each of the two rates
METHODS = ("fedavg", "fedmr", "fedcross", "indep")


@dataclasses.dataclass(frozen=True)
class World:
    """What the two halves of the federations, and the last row, differ in."""

    sign: float = field(1.0, "of the canary's change")
    noise: float = field(NOISE, "noise multiplier s")


def weight(model: Any) -> jax.Array:
    """The weight of the canary in models with leaves [..., 64, 10]: that of pixel 0 and class 0."""
    return model["params"]["classifier"]["dense"]["kernel"][..., 0, 0]


def moved(model: Any, step: Any) -> Any:
    """A model with another weight of the canary."""
    add = lambda leaf: leaf.at[0, 0].add(step) if leaf.ndim == 2 else leaf  # the kernel is the only matrix
    return jax.tree.map(add, model)


def inner_of(method: str, problem: Any) -> Any:
    """A method without a channel. Means are uniform, because numbers of samples are not protected."""
    row = STRATEGIES[method]
    assert row.hyper is not None
    return row.build(row.hyper(weights="uniform") if method == "fedavg" else row.hyper(), problem)


def build_of(method: str, noise_on: str) -> Callable[[World, Any], Any]:
    """The builder of a private method in which client 0 is the canary."""

    def build(world: World, problem: Any) -> Any:
        inner = inner_of(method, problem)

        def client_update(payload: Any, memory: Any, data: Any, round: Any, key: Any) -> tuple:
            upload, memory, metrics = inner.client_update(payload, memory, data, round, key)
            canary = moved(payload["model"], world.sign * CLIP)
            model = trees.where(data.client_id == CANARY, canary, upload["model"])
            return upload | {"model": model}, memory, metrics

        link = links.privacy(problem, clip=CLIP, noise=world.noise, noise_on=noise_on)
        private = channel(inner._replace(client_update=client_update), problem, [link])

        def server_update(state: Any, uploads: Any, cohort: Any, round: Any, key: Any) -> tuple:
            received = private.dispatch(state, cohort, key)["model"]
            added = weight(uploads["model"]) - weight(received)
            new, info = private.server_update(state, uploads, cohort, round, key)
            return new, info | {"added": jnp.sum(jnp.where(cohort.ids == CANARY, added, 0.0))}

        return private._replace(server_update=server_update)

    return build


def simulator(method: str, noise_on: str) -> tuple[Simulator, Any]:
    """A federation, and the builder of its method. A pixel of 0 is an input of 0, so its weights have no gradient."""
    digits = fmr.data.load("digits")
    assert not digits.x[:, 0, 0].any()
    dataset = dataclasses.replace(digits, mean=(0.0,), std=(1.0,))
    federated = fmr.data.federate(dataset, num_clients=CLIENTS, partition="dirichlet", alpha=1.0, seed=1)
    local = fmr.local.setting(lr=0.05, steps=1, batch_size=32)
    build = build_of(method, noise_on)
    return fmr.Simulator(
        build, "logistic", federated, cohort=CLIENTS, local=local, hyper=World(), layout=fmr.Layout(devices=1)
    ), build


def train(method: str, noise_on: str, noise: float, count: int, first_seed: int) -> dict[str, np.ndarray]:
    """What the attacker sees of federations of both worlds, by view: [2, count], first with +C."""
    federation, build = simulator(method, noise_on)
    if reason := privacy.refusal(inner_of(method, federation.problem), federation.problem, noise_on=noise_on):
        raise SystemExit(f"{method}: {reason}")
    seen: dict[str, list[np.ndarray]] = {"uploads": [], "model": []}
    worlds = [(sign, first_seed + number) for number, sign in enumerate(np.repeat([1.0, -1.0], count).tolist())]
    for first in range(0, len(worlds), BLOCK):
        constants = [
            federation.rounds.constants._replace(build=bind(build, World(sign, noise)), key=random_key(seed))
            for sign, seed in worlds[first : first + BLOCK]
        ]
        axis = client_axis(devices=1, lanes=None, cohort_size=CLIENTS * len(constants))
        together = TrialRounds(constants, axis, stop_at_divergence=False, code=federation.code)
        progress = together.init()
        start, added = np.asarray(weight(together.deployed(progress))), np.zeros(len(constants))
        for _ in range(ROUNDS):
            progress, report = together.run(progress, 1)
            added += np.asarray(report.info["added"])
        seen["uploads"].append(added)
        seen["model"].append(np.asarray(weight(together.deployed(progress))) - start)
    return {view: np.concatenate(parts).reshape(2, count) for view, parts in seen.items()}


def rates(with_canary: np.ndarray, without: np.ndarray, threshold: float) -> tuple[float, float]:
    """The lower bound of the true positive rate of a threshold, and the upper bound of the false positive rate."""
    hits, false, count = np.sum(with_canary > threshold), np.sum(without > threshold), len(without)
    lowest = stats.beta.ppf(1 - CONFIDENCE, hits, len(with_canary) - hits + 1) if hits else 0.0
    highest = stats.beta.ppf(CONFIDENCE, false + 1, count - false) if false < count else 1.0
    return float(lowest), float(highest)


def any_epsilon(true: float, false: float) -> float:
    """The smallest epsilon that two rates allow."""
    return max(0.0, float(np.log(max(true - DELTA, 1e-9) / false)))


def gaussian_epsilon(true: float, false: float) -> float:
    """The smallest epsilon of a Gaussian mechanism that two rates allow."""
    distance = float(stats.norm.ppf(true) - stats.norm.ppf(false))
    if not distance > 0:
        return 0.0
    return accounting.epsilon(1, noise=2 / distance, delta=DELTA, num_clients=1, cohort=1, sampling="public")


def audited(seen: np.ndarray, bound: Callable[[float, float], float]) -> float:
    """The lower bound of epsilon from numbers of both worlds [2, M]: a threshold of one half, tested on the other."""
    half = seen.shape[1] // 2
    thresholds = np.quantile(seen[:, :half], np.linspace(0.01, 0.99, 99))
    best = max(thresholds, key=lambda threshold: bound(*rates(seen[0, :half], seen[1, :half], threshold)))
    return bound(*rates(seen[0, half:], seen[1, half:], best))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--folder", type=Path, default=Path("audit"), help="of the table audit.csv")
    parser.add_argument("--federations", type=int, default=FEDERATIONS, help="of each of the two worlds")


def main(arguments: argparse.Namespace) -> None:
    """Train the federations, write the table and print it."""
    claim = {"delta": DELTA, "num_clients": CLIENTS, "cohort": CLIENTS, "sampling": "public"}
    runs = [(method, "upload", NOISE, ("uploads", "model")) for method in METHODS]
    runs += [("fedavg", "mean", NOISE, ("model",)), ("fedavg", "upload", NOISE / 10, ("uploads",))]
    rows: list[dict[str, Any]] = []
    for number, (method, noise_on, noise, views) in enumerate(runs):
        released = {"upload": "uploads", "mean": "mean"}[noise_on]
        claimed = accounting.epsilon(ROUNDS, noise=NOISE, released=released, **claim)
        seen = train(method, noise_on, noise, arguments.federations, first_seed=1_000_000 * number)
        for view in views:
            found = {"any": audited(seen[view], any_epsilon), "gaussian": audited(seen[view], gaussian_epsilon)}
            facts = {"method": method, "noise_on": noise_on, "noise": noise, "view": view, "claim": claimed}
            rows.append(facts | found | {"factor": claimed / found["gaussian"] if found["gaussian"] else math.inf})
            print("  ".join(f"{each:.2f}" if isinstance(each, float) else f"{each:8}" for each in rows[-1].values()))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "audit.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
