"""Does unlearning forget a client? Published rules, compared with a federation that never had it.

    python experiments/studies/unlearning.py --folder=unlearning

Five clients share the digits (Dirichlet(1)), all in each of 30 rounds of FedAvg. Half of the samples of client 0 carry
the trigger of a backdoor and the label 0. Then client 0 is forgotten. The truth is the model of the same seed whose
federation never had client 0. Printed are, as mean and standard deviation over the seeds, on the test set:

* disagreement: share of the samples whose predicted class differs from that of the truth;
* distance: mean absolute difference of the probabilities of all classes from those of the truth;
* accuracy, and backdoor: share of images with the trigger that are taken for a 0;
* rounds: training after the request, in rounds of the remaining clients with all local epochs.

Rules:

* ``nothing``: the model of all clients.
* ``fine-tuning``: `AFTERWARDS` more rounds without the client.
* ``federaser``: calibrated replay (Liu, Ma, Yang, Wang, Liu: FedEraser, IWQoS 2021). Beginning with the initial model,
  the remaining clients train a share `RATIO` of their epochs in every `INTERVAL`-th round. Each change gets the norm of
  the change that the client had uploaded in this round, and the server averages them. The first of these rounds takes
  the old changes as they are.
* ``federaser, by layer``: as published reimplementations do, of which none is the authors': the mean change gets, layer
  by layer, the norm of the old mean change.
* ``ascent``: client 0 maximises its loss, starting at the mean of the other clients' last models, and is projected onto
  a ball around it (Halimi, Kadhe, Rawat, Baracaldo: Federated Unlearning: How to Efficiently Erase a Client in FL?,
  2022). Its radius follows the authors' rule: sqrt(d / 3), where d is the mean squared distance of ten random models
  from the centre. Five epochs of SGD with learning rate 0.01, momentum 0.9 and gradients clipped to norm 5. The authors
  stop early at a threshold that they chose for their data; here all epochs run.
* ``ascent, fine-tuned``: the same and `AFTERWARDS` rounds without the client, as in the paper.
* ``retrained, fewer rounds``: `AFTERWARDS` rounds without the client from the initial model, the same work as above.
* ``retrained, other seed``: a model that never had the client, with other random numbers: what to expect of a perfect
  rule that does not know those of the truth.
"""

import argparse
import csv
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_mr as fmr
from fedjax_mr import trees
from fedjax_mr.analysis import command
from fedjax_mr.client import local
from fedjax_mr.client.samples import backdoored
from fedjax_mr.engine.devices import set_up_jax
from fedjax_mr.engine.round import Progress, RunConstants
from fedjax_mr.engine.rounds import Rounds
from fedjax_mr.engine.simulator import Simulator, normalised
from fedjax_mr.engine.trials import OneTrial, of_coalition
from fedjax_mr.keys import random_key
from fedjax_mr.terminal import interrupts

CLIENTS, FORGOTTEN, TARGET, SEEDS = 5, 0, 0, (0, 1, 2)
ROUNDS, AFTERWARDS = 30, 7
INTERVAL, RATIO = 2, 0.5  # FedEraser
ASCENT = {"epochs": 5, "lr": 0.01, "momentum": 0.9, "clip": 5.0, "batch": 32}
OTHERS = [client for client in range(CLIENTS) if client != FORGOTTEN]
COLUMNS = ("disagreement", "distance", "accuracy", "backdoor", "rounds")


def simulator() -> Simulator:
    """The federation, in which half of the samples of client 0 have a backdoor."""
    set_up_jax(devices=1, cohort_size=CLIENTS)
    federated = fmr.data.federate(
        fmr.data.load("digits"), num_clients=CLIENTS, partition="dirichlet", alpha=1.0, seed=1
    )
    dataset, rows = federated.dataset, federated.train.rows(FORGOTTEN)
    poisoned = np.zeros(len(dataset.y), bool)
    poisoned[rows[::2]] = True
    samples = backdoored(normalised(dataset, dataset.x, dataset.y), poisoned, TARGET)
    assert samples.trigger is not None
    x = np.where(poisoned[:, None, None, None] & samples.trigger.mask, samples.trigger.value, dataset.x)
    federated = dataclasses.replace(federated, dataset=dataclasses.replace(dataset, x=x, y=np.asarray(samples.y)))
    local_setting = fmr.local.setting(lr=0.05, epochs=2, batch_size=32, momentum=0.5)
    return fmr.Simulator("fedavg", "mlp", federated, cohort=CLIENTS, local=local_setting, layout=fmr.Layout(devices=1))


def rounds_of(simulator: Simulator, constants: RunConstants) -> Rounds:
    """Compiled rounds with other constants."""
    return Rounds(constants, simulator.axis, trial=OneTrial(simulator.axis, code=simulator.code))


def train(rounds: Rounds, progress: Progress, count: int) -> Progress:
    """Some rounds, without their report."""
    return rounds.run(progress, count)[0]


def continued(rounds: Rounds, model: Any, number: int) -> Progress:
    """The progress of a federation that has a copy of a model after some rounds."""
    start, model = rounds.init(), jax.tree.map(np.array, model)
    return start._replace(server=start.server._replace(model=model), round=jnp.int32(number))


class History:
    """The training of all clients with one seed, as FedEraser's server stores it.

    Attributes:
      models: the model before each round.
      changes: what each client [K] adds to it, by the number of the client.
      last: the uploads of the last round.
    """

    def __init__(self, rounds: Rounds) -> None:
        """Train all rounds."""
        self.models: list[Any] = []
        self.changes: list[dict[int, Any]] = []
        progress = rounds.init()
        for _ in range(ROUNDS):
            self.models.append(jax.device_get(progress.server.model))
            progress, _, cohort, uploads = rounds.observed(progress)
            self.last = by_client(uploads["model"], cohort.ids)
            self.changes.append({client: changed(model, self.models[-1]) for client, model in self.last.items()})
        self.final = jax.device_get(progress.server.model)


def by_client(models: Any, ids: Any) -> dict[int, Any]:
    """Stacked models [K, ...] by the numbers of their clients."""
    return {int(client): jax.tree.map(lambda leaf, row=row: leaf[row], models) for row, client in enumerate(ids)}


def changed(new: Any, old: Any) -> Any:
    """The change of the parameters."""
    return jax.tree.map(np.subtract, new["params"], old["params"])


def mean_of(changes: dict[int, Any], sizes: np.ndarray) -> Any:
    """The mean change of the remaining clients, weighted by their samples."""
    weights = sizes[OTHERS] / sizes[OTHERS].sum()
    return jax.tree.map(lambda *leaves: np.tensordot(weights, leaves, axes=1), *(changes[each] for each in OTHERS))


def rescaled(new: Any, old: Any) -> Any:
    """A change with the norm of another one."""
    norm = lambda tree: float(np.sqrt(trees.squared_norm(tree)))
    return jax.tree.map(lambda leaf: leaf * (norm(old) / norm(new)), new)


def federaser(simulator: Simulator, constants: RunConstants, history: History, *, by_layer: bool) -> Any:
    """FedEraser's model."""
    sizes = np.asarray(simulator.federated.sizes, float)
    epochs = round(RATIO * float(constants.problem.local.epochs))
    fewer = dataclasses.replace(constants.problem, local=constants.problem.local.in_epochs(epochs))
    rounds = rounds_of(simulator, of_coalition(constants._replace(problem=fewer), OTHERS))
    model = history.models[0]
    for number in range(0, ROUNDS, INTERVAL):
        old = history.changes[number]
        if number == 0:
            step = mean_of(old, sizes)
        else:
            _, _, cohort, uploads = rounds.observed(continued(rounds, model, number))
            sent = by_client(uploads["model"], cohort.ids)
            new = {client: changed(each, model) for client, each in sent.items()}
            if by_layer:
                step = jax.tree.map(rescaled, mean_of(new, sizes), mean_of(old, sizes))
            else:
                step = mean_of({each: rescaled(new[each], old[each]) for each in OTHERS}, sizes)
        model = model | {"params": jax.tree.map(lambda a, b: (a + b).astype(a.dtype), model["params"], step)}
    return model


def ascent(simulator: Simulator, history: History, seed: int) -> Any:
    """The model after client 0 has maximised its loss within the ball."""
    sizes = np.asarray(simulator.federated.sizes, float)
    start = mean_of({client: model["params"] for client, model in history.last.items()}, sizes)
    start = jax.tree.map(jnp.float32, start)
    distance = lambda one, two: trees.squared_norm(trees.subtract(one, two))
    keys = jax.random.split(jax.random.key(seed), 10)
    radius = np.sqrt(np.mean([distance(start, simulator.model.init(key)["params"]) for key in keys]) / 3)
    data = jax.device_get(simulator.client(FORGOTTEN))
    rows = data.index[int(data.offset) : int(data.offset) + int(data.size)]
    optimizer = optax.chain(
        optax.clip_by_global_norm(ASCENT["clip"]), optax.sgd(ASCENT["lr"], momentum=ASCENT["momentum"])
    )
    rest = {name: value for name, value in history.final.items() if name != "params"}

    @jax.jit
    def step(params: Any, state: Any, batch: jax.Array) -> tuple[Any, Any]:
        ones = jnp.ones(batch.shape)
        loss = lambda params: (
            -local.score_batch(simulator.model, rest | {"params": params}, data.samples, batch, ones).loss / len(batch)
        )
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        moved = optax.apply_updates(params, updates)
        scale = jnp.minimum(1.0, radius / jnp.sqrt(distance(moved, start)))
        return jax.tree.map(lambda new, centre: centre + scale * (new - centre), moved, start), state

    params, state, generator = start, optimizer.init(start), np.random.default_rng(seed)
    for _ in range(int(ASCENT["epochs"])):
        order = generator.permutation(rows)
        for first in range(0, len(order) - ASCENT["batch"] + 1, ASCENT["batch"]):
            params, state = step(params, state, order[first : first + ASCENT["batch"]])
    return rest | {"params": params}


def models_of(simulator: Simulator, seed: int) -> tuple[Any, dict[str, tuple[Any, float]]]:
    """The truth, and the model of each rule with its rounds of training."""
    constants = simulator.rounds.constants._replace(key=random_key(seed))
    without = rounds_of(simulator, of_coalition(constants, OTHERS))
    other_seed = rounds_of(simulator, of_coalition(constants._replace(key=random_key(seed + 1000)), OTHERS))
    history = History(rounds_of(simulator, constants))
    tuned = lambda model: train(without, continued(without, model, ROUNDS), AFTERWARDS).server.model
    retrained = lambda rounds: train(rounds, rounds.init(), ROUNDS).server.model
    replay = functools.partial(federaser, simulator, constants, history)
    ascended = ascent(simulator, history, seed)
    replayed = RATIO * (len(range(0, ROUNDS, INTERVAL)) - 1)
    return retrained(without), {
        "nothing": (history.final, 0),
        "fine-tuning": (tuned(history.final), AFTERWARDS),
        "federaser": (replay(by_layer=False), replayed),
        "federaser, by layer": (replay(by_layer=True), replayed),
        "ascent": (ascended, 0),
        "ascent, fine-tuned": (tuned(ascended), AFTERWARDS),
        "retrained, fewer rounds": (train(without, without.init(), AFTERWARDS).server.model, AFTERWARDS),
        "retrained, other seed": (retrained(other_seed), ROUNDS),
    }


def predictor(simulator: Simulator) -> Callable[[Any], np.ndarray]:
    """A function from a model to its probabilities on the test set [M, C]."""
    dataset = simulator.federated.dataset
    test = normalised(dataset, dataset.test_x, dataset.test_y)
    rows = np.arange(len(dataset.test_y), dtype=np.int32)
    outputs = jax.jit(lambda variables: jax.nn.softmax(local.outputs(simulator.model, variables, test, rows)))
    return lambda variables: np.asarray(outputs(variables))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--folder", type=Path, default=Path("unlearning"), help="of the table unlearning.csv")


def main(arguments: argparse.Namespace) -> None:
    """Train, forget, write the table and print its means."""
    federation = simulator()
    probabilities, backdoor = predictor(federation), federation.backdoor_evaluation(TARGET)
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        truth, models = models_of(federation, seed)
        expected = probabilities(truth)
        for rule, (model, rounds) in ({"truth": (truth, ROUNDS)} | models).items():
            found = probabilities(model)
            measured = (
                np.mean(found.argmax(axis=1) != expected.argmax(axis=1)),
                np.mean(abs(found - expected)),
                federation.evaluation.one(model).accuracy,
                backdoor.one(model).accuracy,
                rounds,
            )
            rows.append({"rule": rule, "seed": seed} | dict(zip(COLUMNS, map(float, measured), strict=True)))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "unlearning.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{'rule':24}", *(f"{name:>17}" for name in COLUMNS))
    for rule in dict.fromkeys(row["rule"] for row in rows):
        values = np.array([[row[name] for name in COLUMNS] for row in rows if row["rule"] == rule])
        mean, spread = values.mean(axis=0), values.std(axis=0, ddof=1)
        print(f"{rule:24}", *(f"{one:8.4f} ± {two:6.4f}" for one, two in zip(mean, spread, strict=True)))


if __name__ == "__main__":
    sys.exit(interrupts.run(lambda: command.script(sys.modules[__name__])))
